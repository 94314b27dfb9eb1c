"""Compile the kernels of `autopar_csrc`.

Kernels are compiled at first use, or in advance by ``python -m autopar.kernels.build``. All
``*.cu`` files of the folder are compiled into one library per kind: *host* by the C++ compiler
(``$CXX`` or g++), *cuda* by nvcc (``$NVCC`` or the nvcc on the path). A library is stored in the
cache (``$AUTOPAR_KERNEL_CACHE``, by default ``autopar/kernels`` in the user's cache). Its name
contains a hash of sources, headers, command and compiler, so that changed sources are compiled
again and an outdated library is never loaded. A library is compiled in a temporary folder and moved
to its name under a lock, so that concurrent processes compile it once and never load an incomplete
library. Next to each library are the compiler's output (``.log``; for cuda with ptxas's report of
registers and spills) and its checksum (``.sha256``). A library that does not match its checksum is
compiled again. Since libraries are code, a cache that another user can write to is not used.

Variants: ``release``; ``debug``, in which waits for signals have a time-out (``include/epoch.h``).
For tests of the host library only: ``thread``, with ThreadSanitizer; ``emulated``, in which device
code runs on the CPU (``include/emulated.h``); ``emulated-thread``, both.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autopar.core.private_folder import find_foreign, private_folder, warn_once
from autopar.core.terminal import complain, err, say
from autopar.errors import KernelError

SOURCES = Path(__file__).parent.parent / "csrc"
ARCHITECTURES = ("80", "90a", "100a")
_EMULATED = ("-O1", "-g", "-DAP_DEBUG", "-DAP_EMULATED", "-fno-strict-aliasing")
VARIANTS = {
    "release": ("-O3",),
    "debug": ("-O1", "-g", "-DAP_DEBUG"),
    "thread": ("-O1", "-g", "-DAP_DEBUG", "-fsanitize=thread"),
    "emulated": _EMULATED,
    "emulated-thread": (*_EMULATED, "-DAP_EMULATED_THREADS", "-fsanitize=thread"),
}
COMPILERS = {"host": ("CXX", "g++"), "cuda": ("NVCC", "nvcc")}
"""For each kind: the environment variable that selects a compiler, and the default compiler."""
HOST_ONLY = ("thread", "emulated", "emulated-thread")
LIMIT_S = 600.0
_NAME_ANOTHER = "AUTOPAR_KERNEL_CACHE=FOLDER"
_QUIET_S = 2.0  # a longer build shows a message
_HOST = (
    "-x",
    "c++",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-fvisibility=hidden",
    "-ffp-contract=off",
)
# Code for sm_80 also runs on 8.6 and 8.9. Its PTX is used on devices of other architectures.
_CUDA = (
    "-x",
    "cu",
    "-std=c++17",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "--fmad=false",
    "-Xptxas",
    "-v",
    "-shared",
    "--threads",
    "0",
)


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled library or program.

    Attributes:
        path: the file.
        report: the compiler's output.
        build_s: the seconds of the compilation; 0 if the library was in the cache.
    """

    path: Path
    report: str
    build_s: float


def cache_folder() -> Path:
    """Return the folder of libraries. Create it if it does not exist. If other users can write to
    the selected folder, this is a temporary folder of this process.

    Returns:
        A folder that only the current user can write to.

    Raises:
        KernelError: if the folder cannot be created, or the user has no home folder and no folder
            is selected.
    """
    named = os.environ.get("AUTOPAR_KERNEL_CACHE")
    try:
        folder = (
            Path(named)
            if named
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            / "autopar"
            / "kernels"
        )
        return private_folder(
            folder, "compiled kernels", f"choose a private folder: {_NAME_ANOTHER}"
        )
    except RuntimeError as error:
        raise KernelError(
            "no home folder exists for the kernel cache",
            remedy=f"choose a folder: {_NAME_ANOTHER}",
        ) from error
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> KernelError:
    """Return the error for a cache folder that cannot be created or written to."""
    return KernelError(
        f"the kernel cache cannot be written: {error}", remedy=f"choose another: {_NAME_ANOTHER}"
    )


def sources(folder: Path = SOURCES) -> tuple[Path, ...]:
    """Return the source files of the kernels, sorted by name."""
    return tuple(sorted(folder.glob("*.cu")))


def compiler(kind: str) -> list[str]:
    """Return the command of the compiler for ``host`` or ``cuda``: its path, and the flags in its
    environment variable.

    Raises:
        KernelError: if the compiler does not exist.
    """
    variable, default = COMPILERS[kind]
    name, *flags = shlex.split(os.environ.get(variable) or default)
    path = shutil.which(name)
    if path is None:
        raise KernelError(
            f"no {name} was found to compile the {kind} kernels",
            remedy=f"install it, or set its path: {variable}=/path/to/it",
        )
    return [path, *flags]


def has_compiler(kind: str) -> bool:
    """Return whether there is a compiler for ``host`` or ``cuda``."""
    try:
        return bool(compiler(kind))
    except KernelError:
        return False


def build_library(
    kind: str,
    variant: str = "release",
    architectures: Sequence[str] = ARCHITECTURES,
    folder: Path = SOURCES,
) -> Built:
    """Return the library of all kernels in `folder`. Compile it if it is not in the cache.

    Args:
        kind: ``host`` or ``cuda``.
        variant: a key of `VARIANTS`.
        architectures: the architectures for ``cuda``, such as ``80`` for sm_80.
        folder: the folder of the sources.

    Raises:
        KernelError: if there is no compiler, or it fails. The message contains the command and the
            compiler's output.
    """
    if kind == "cuda" and variant in HOST_ONLY:
        raise KernelError(
            f"variant {variant} is only available for the host", remedy="build it with kind host"
        )
    if variant not in VARIANTS:
        raise KernelError(
            f"unknown variant {variant!r} of the kernels",
            remedy=f"use one of {', '.join(VARIANTS)}",
        )
    start = compiler(kind)
    if kind == "host":
        command = [*start, *VARIANTS[variant], *_HOST, "-shared"]
    else:
        command = [
            *start,
            *VARIANTS[variant],
            *_CUDA,
            *(part for text in architectures for part in _gencode(text)),
        ]
    return _build(f"{kind}-{variant}", command, sources(folder), folder, ".so")


def build_program(main: Path, variant: str = "release", folder: Path = SOURCES) -> Built:
    """Build an executable for the host from the kernels in `folder` and a C++ file.

    Args:
        main: the C++ file, which may include the headers of the kernels.
        variant: a key of `VARIANTS`.
        folder: the folder of the sources.

    Raises:
        KernelError: see `build_library`.
    """
    command = [*compiler("host"), *VARIANTS[variant], *_HOST, f"-I{folder.resolve()}"]
    return _build(f"{main.stem}-{variant}", command, (*sources(folder), main), folder, "")


def _gencode(architecture: str) -> tuple[str, str]:
    code = (
        f"[sm_{architecture},compute_{architecture}]"
        if architecture == "80"
        else f"sm_{architecture}"
    )
    return "-gencode", f"arch=compute_{architecture},code={code}"


def _build(
    name: str, command: Sequence[str], files: Sequence[Path], folder: Path, suffix: str
) -> Built:
    if not files:
        raise KernelError(
            f"no kernels found in {folder}",
            remedy="reinstall the package: its folder csrc is missing",
        )
    cache, stem = cache_folder(), f"{name}-{_key(command, files, folder)}"
    place = cache / f"{stem}{suffix}"
    if (report := _read_cached(place, stem)) is not None:
        return Built(place, report, 0.0)
    try:
        with _lock_file(cache / f"{stem}.lock"):
            report = _read_cached(place, stem)
            return (
                _compile(name, command, files, place, stem)
                if report is None
                else Built(place, report, 0.0)
            )
    except OSError as error:
        raise _unwritable(error) from error


def _read_cached(place: Path, stem: str) -> str | None:
    """Return the compiler's output for a library in the cache; None if the library must be
    compiled."""
    try:
        if not (reason := find_foreign(place)):
            report, expected_digest = (
                place.with_name(f"{stem}.{kind}").read_text(encoding="utf-8")
                for kind in ("log", "sha256")
            )
            if expected_digest == _digest(place):
                return report
            reason = f"{place} was changed after it was written"
    except FileNotFoundError:  # it was not compiled, or not completely
        return None
    except (OSError, ValueError) as error:
        reason = f"{place} cannot be read ({error})"
    warn_once(f"{reason}: compiling it again")
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _key(command: Sequence[str], files: Sequence[Path], folder: Path) -> str:
    """Return a hash of all inputs of the compilation."""
    version = subprocess.run(
        [command[0], "--version"], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    key = hashlib.sha256("\0".join((*command, version.stdout, platform.machine())).encode())
    for path in (*files, *sorted(folder.glob("include/*.h"))):
        key.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return key.hexdigest()[:16]


def _compile(
    name: str, command: Sequence[str], files: Sequence[Path], place: Path, stem: str
) -> Built:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as scratch:
        library_file, log, digest = (Path(scratch) / kind for kind in ("made", "log", "sha256"))
        line = [*command, *map(str, files), "-o", str(library_file)]
        status, report = _run(name, line)
        if status != 0:
            message = f"the kernels ({name}) did not compile:\n{' '.join(line)}\n{report.strip()}"
            variables = " or ".join(variable for variable, _ in COMPILERS.values())
            raise KernelError(
                message, remedy=f"see the compiler output, or set another compiler in {variables}"
            )
        log.write_text(report, encoding="utf-8")
        digest.write_text(_digest(library_file), encoding="utf-8")
        library_file.chmod(0o700)
        for side_file in (log, digest):  # moved first, so that a library never exists without them
            os.replace(side_file, place.with_name(f"{stem}.{side_file.name}"))
        os.replace(library_file, place)
    return Built(place, report, time.perf_counter() - start)


def _run(name: str, line: Sequence[str]) -> tuple[int, str]:
    """Run the compiler. Return its exit status and output. If it takes long, show a message on the
    terminal."""
    # It runs in a separate process group, so that its child processes can also be killed.
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            return _watch_process(name, process)
        except subprocess.TimeoutExpired:
            return 1, f"the compiler took longer than {LIMIT_S:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _watch_process(name: str, process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        return _end_process(process, _QUIET_S)
    except subprocess.TimeoutExpired:
        doing = f"compiling autopar's kernels ({name}), once"
        if not err.is_terminal:
            complain(f"{doing} …")
        with err.status(f"{doing} …"):
            return _end_process(process, LIMIT_S)


def _end_process(process: subprocess.Popen[str], limit_s: float) -> tuple[int, str]:
    report, _ = process.communicate(timeout=limit_s)
    return process.returncode, report


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """A context that holds the lock of a file. On entry, it waits for other processes."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Without --host and --cuda, build with every installed compiler."""
    parser = argparse.ArgumentParser(
        prog="python -m autopar.kernels.build", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--host", action="store_true", help="build with the C++ compiler")
    parser.add_argument("--cuda", action="store_true", help="build with nvcc")
    parser.add_argument("--debug", action="store_true", help="add time-outs to waits")
    parser.add_argument(
        "--arch",
        action="append",
        metavar="80|90a|...",
        help=f"architecture of the device; default: {' '.join(ARCHITECTURES)}",
    )
    options = parser.parse_args(arguments)
    selected = [kind for kind in COMPILERS if getattr(options, kind)]
    kinds = selected or [kind for kind in COMPILERS if has_compiler(kind)]
    failed = not kinds
    if failed:
        complain("neither g++ nor nvcc was found: the torch reference implementations will run")
    for kind in kinds:
        try:
            built = build_library(
                kind, "debug" if options.debug else "release", options.arch or ARCHITECTURES
            )
            say(
                f"{kind}: {built.path}"
                f" ({f'built in {built.build_s:.1f} s' if built.build_s else 'was in the cache'})"
            )
        except KernelError as error:
            complain(f"{kind}: {error}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
