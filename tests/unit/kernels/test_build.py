"""Kernels are compiled at first use, once, and kept; what stands in their way is said."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path

import pytest
import torch
from native import needs_host, needs_nvcc

from autopar.errors import KernelError
from autopar.kernels import build, library
from autopar.kernels.packing import BucketLayout, pack, reference_pack

ROOT = Path(__file__).parents[3]
SOURCE = (
    '#include "include/a.h"\nextern "C" __attribute__((visibility("default"))) int answer() {'
    " return ANSWER; }\n"
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AUTOPAR_KERNELS", raising=False)
    library.forget()
    yield
    monkeypatch.undo()
    library.forget()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small folder of kernels, and a cache of its own."""
    monkeypatch.setenv("AUTOPAR_KERNEL_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "sources"
    (made / "include").mkdir(parents=True)
    (made / "a.cu").write_text(SOURCE)
    (made / "include" / "a.h").write_text("#define ANSWER 42\n")
    return made


def functions_in_sources() -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in build.sources())
    return set(re.findall(r"^AP_API int (\w+)\(", text, re.MULTILINE))


def test_every_c_function_of_the_sources_is_declared_in_the_table_and_the_other_way_round() -> None:
    assert functions_in_sources() == set(library.SIGNATURES)


def test_a_declaration_has_as_many_arguments_as_the_function() -> None:
    """Some functions share arguments, which a macro then holds."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in build.sources())
    macros = dict(re.findall(r"^#define (AP_\w+) (.+)$", text, re.MULTILINE))
    for name, written in re.findall(r"^AP_API int (\w+)\(([^)]*)\)", text, re.MULTILINE):
        arguments = re.sub(r"\bAP_\w+", lambda macro: macros[macro[0]], written)
        assert len(library.SIGNATURES[name]) == arguments.count(",") + 1, name


@needs_host
@pytest.mark.skipif(
    shutil.which("nm") is None, reason="there is no nm to list what a library holds"
)
def test_the_host_library_holds_the_functions_of_the_table_and_no_others() -> None:
    assert exported(build.build_library("host").path) == {
        name for name in library.SIGNATURES if name.endswith("_host")
    }


def exported(path: Path) -> set[str]:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    )
    return {
        line.split()[-1] for line in said.stdout.splitlines() if line.split()[-1].startswith("ap_")
    }


@pytest.mark.slow
@needs_nvcc
@pytest.mark.skipif(
    shutil.which("nm") is None, reason="there is no nm to list what a library holds"
)
def test_the_cuda_library_holds_the_functions_of_the_table_and_no_others() -> None:
    assert exported(build.build_library("cuda").path) == {
        name for name in library.SIGNATURES if name.endswith("_cuda")
    }


def test_dtypes_have_the_numbers_of_the_header() -> None:
    header = (build.SOURCES / "include" / "common.h").read_text(encoding="utf-8")
    names = {
        torch.float32: "F32",
        torch.float64: "F64",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
    }
    names |= {torch.int32: "I32", torch.int64: "I64", torch.uint8: "U8"}
    for dtype, name in names.items():
        assert f"AP_{name} = {library.code_of(dtype)}" in header
    with pytest.raises(KernelError, match="complex64"):
        library.code_of(torch.complex64)


def test_the_package_data_hold_every_source_and_header() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["autopar"].split()
    held = {path for pattern in patterns for path in (ROOT / "autopar").glob(pattern)}
    assert held >= {path for path in build.SOURCES.rglob("*") if path.suffix in (".cu", ".h")}
    assert len(build.sources()) > 2


@needs_host
def test_the_kernels_compile_without_a_warning() -> None:
    assert build.build_library("host").report == ""


@needs_host
def test_what_was_compiled_once_is_taken_from_the_cache(folder: Path) -> None:
    first = build.build_library("host", folder=folder)
    second = build.build_library("host", folder=folder)
    assert first.build_s > 0 == second.build_s
    assert first.path == second.path and first.path.is_file()
    assert sorted(path.suffix for path in first.path.parent.iterdir()) == [
        ".lock",
        ".log",
        ".sha256",
        ".so",
    ]


@needs_host
@pytest.mark.parametrize("kind", ["so", "log", "sha256"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_library_that_is_not_as_it_was_written_is_compiled_again(
    folder: Path, kind: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = build.build_library("host", folder=folder)
    wanted, path = first.path.read_bytes(), first.path.with_suffix(f".{kind}")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20] if damage == "cut" else b"\xff other")
    again = build.build_library("host", folder=folder)
    changed = damage == "gone" or (kind, damage) != ("log", "cut")  # the report is empty
    assert (
        again.path == first.path
        and (again.build_s > 0) == changed
        and first.path.read_bytes() == wanted
    )
    assert damage == "gone" or not changed or "compiling it again" in caplog.text


@needs_host
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("whose", ["folder", "library", "above"])
def test_a_library_of_another_user_is_not_loaded(
    folder: Path, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = build.build_library("host", folder=folder)
    planted = {"folder": first.path.parent, "library": first.path, "above": folder.parent}[whose]
    os.chown(planted, 12345, -1)
    again = build.build_library("host", folder=folder)
    assert again.build_s > 0 and "belongs to user 12345" in caplog.text
    assert again.path.stat().st_uid == again.path.parent.stat().st_uid == 0
    assert (again.path == first.path) == (whose == "library")
    assert build.build_library("host", folder=folder).build_s == 0, (
        "this process keeps what it built"
    )


@needs_host
def test_another_header_source_or_variant_is_another_library(folder: Path) -> None:
    paths = {
        build.build_library("host", variant, folder=folder).path for variant in ("release", "debug")
    }
    (folder / "include" / "a.h").write_text("#define ANSWER 43\n")
    paths.add(build.build_library("host", folder=folder).path)
    (folder / "a.cu").write_text(SOURCE + "// and more\n")
    paths.add(build.build_library("host", folder=folder).path)
    assert len(paths) == 4


@needs_host
def test_of_several_that_build_at_once_one_compiles(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: build.build_library("host", folder=folder), range(4)))
    assert sum(one.build_s > 0 for one in built) == 1
    assert len({one.path for one in built}) == 1


@needs_host
def test_an_error_of_the_compiler_is_shown_with_its_command_and_leaves_nothing_behind(
    folder: Path,
) -> None:
    (folder / "a.cu").write_text("int broken( {\n")
    with pytest.raises(KernelError, match=r"(?s)did not compile.*-std=c\+\+17.*a\.cu.*error"):
        build.build_library("host", folder=folder)
    assert {path.suffix for path in build.cache_folder().iterdir()} == {".lock"}


@needs_host
def test_a_build_that_takes_long_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_QUIET_S", 0.0)
    build.build_library("host", folder=folder)
    assert "compiling autopar's kernels (host-release), once" in capsys.readouterr().err
    build.build_library("host", folder=folder)
    assert capsys.readouterr().err == ""


def test_a_compiler_that_does_not_end_is_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = folder / "compiler"
    script.write_text('#!/bin/sh\n[ "$2" = "" ] && exit 0\nexec sleep 60\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "_QUIET_S", 0.0)
    monkeypatch.setattr(build, "LIMIT_S", 0.5)
    with pytest.raises(KernelError, match="took longer than"):
        build.build_library("host", folder=folder)


@needs_host
def test_a_cache_that_cannot_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_KERNEL_CACHE", str(folder / "a.cu" / "cache"))
    with pytest.raises(KernelError, match="AUTOPAR_KERNEL_CACHE"):
        build.build_library("host", folder=folder)


def test_without_kernels_there_is_nothing_to_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "true")
    (folder / "a.cu").unlink()
    with pytest.raises(KernelError, match="no kernels"):
        build.build_library("host", folder=folder)


def test_an_unknown_variant_and_a_sanitizer_for_the_device_are_refused() -> None:
    with pytest.raises(KernelError, match="release, debug, thread, emulated, emulated-thread"):
        build.build_library("host", "fast")
    with pytest.raises(KernelError, match="only available for the host"):
        build.build_library("cuda", "thread")


def test_without_a_compiler_the_reference_runs_and_the_log_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(folder / "no-compiler"))
    layout = BucketLayout(((3, 2),), (0,), 2)
    tensor = torch.arange(6.0).view(3, 2)
    with caplog.at_level(logging.WARNING):
        packed = pack([tensor], layout, torch.float32, squares=True)
        pack([tensor], layout, torch.float32)
    assert library.host() is None
    assert "no-compiler" in library.why_not()
    assert "CXX=" in library.why_not()
    assert [record.getMessage() for record in caplog.records] == [
        "autopar's host kernels are replaced by torch reference implementations:"
        f" {library.why_not()}"
    ]
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            packed, reference_pack([tensor], layout, torch.float32, 0, 2, 1.0, True), strict=True
        )
    )
    with pytest.raises(KernelError, match="no-compiler"):
        library.function("host", "ap_pack_bucket_host")


def test_a_gpu_that_is_too_old_runs_the_references_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AUTOPAR_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    library.forget()
    assert library.cuda() is None
    assert (
        library.why_not("cuda")
        == "they require GPUs of compute capability 8.0 or later, but this one has 7.5"
    )
    assert [
        record.getMessage().count("are replaced by torch reference implementations")
        for record in caplog.records
    ] == [1]
    library.forget()


@needs_host
def test_the_reference_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.host() is not None and library.why_not() == ""
    monkeypatch.setenv("AUTOPAR_KERNELS", "reference")
    assert library.host() is None and "selects the torch reference" in library.why_not()
    assert not library.has(torch.device("cpu"))


@needs_host
def test_the_command_prints_what_was_built_and_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--host"]) == 0
    assert str(build.build_library("host").path) in capsys.readouterr().out


def test_the_command_fails_where_what_is_asked_for_cannot_be_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", str(folder / "no-compiler"))
    assert build.main(["--host"]) == 1
    assert "no-compiler" in capsys.readouterr().err


@needs_host
def test_a_refused_argument_is_an_error() -> None:
    with pytest.raises(KernelError, match="an argument was refused"):
        library.check(library.function("host", "ap_epoch_signal_host")(None, 1), "ap_epoch_signal")
