"""Building the kernels: they are compiled at first use and cached, and errors state the cause."""

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
    """A small folder of kernels with a separate cache."""
    monkeypatch.setenv("AUTOPAR_KERNEL_CACHE", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    (sources / "include").mkdir(parents=True)
    (sources / "a.cu").write_text(SOURCE)
    (sources / "include" / "a.h").write_text("#define ANSWER 42\n")
    return sources


def functions_in_sources() -> set[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in build.sources())
    return set(re.findall(r"^AP_API int (\w+)\(", text, re.MULTILINE))


def test_signature_table_lists_exactly_the_c_functions_of_the_sources() -> None:
    assert functions_in_sources() == set(library.SIGNATURES)


def test_signatures_have_the_number_of_arguments_of_the_c_functions() -> None:
    """Arguments shared by several functions are defined in a macro."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in build.sources())
    macros = dict(re.findall(r"^#define (AP_\w+) (.+)$", text, re.MULTILINE))
    for name, parameters in re.findall(r"^AP_API int (\w+)\(([^)]*)\)", text, re.MULTILINE):
        arguments = re.sub(r"\bAP_\w+", lambda macro: macros[macro[0]], parameters)
        assert len(library.SIGNATURES[name]) == arguments.count(",") + 1, name


@needs_host
@pytest.mark.skipif(
    shutil.which("nm") is None, reason="there is no nm to list what a library holds"
)
def test_host_library_exports_exactly_the_functions_of_the_table() -> None:
    assert exported_symbols(build.build_library("host").path) == {
        name for name in library.SIGNATURES if name.endswith("_host")
    }


def exported_symbols(path: Path) -> set[str]:
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    )
    return {
        line.split()[-1]
        for line in symbols.stdout.splitlines()
        if line.split()[-1].startswith("ap_")
    }


@pytest.mark.slow
@needs_nvcc
@pytest.mark.skipif(
    shutil.which("nm") is None, reason="there is no nm to list what a library holds"
)
def test_cuda_library_exports_exactly_the_functions_of_the_table() -> None:
    assert exported_symbols(build.build_library("cuda").path) == {
        name for name in library.SIGNATURES if name.endswith("_cuda")
    }


def test_dtype_codes_match_the_header() -> None:
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


def test_package_data_include_all_sources_and_headers() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.package_data"]["autopar"].split()
    packaged = {path for pattern in patterns for path in (ROOT / "autopar").glob(pattern)}
    assert packaged >= {path for path in build.SOURCES.rglob("*") if path.suffix in (".cu", ".h")}
    assert len(build.sources()) > 2


@needs_host
def test_kernels_compile_without_warnings() -> None:
    assert build.build_library("host").report == ""


@needs_host
def test_second_build_uses_the_cache(folder: Path) -> None:
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
def test_damaged_library_is_compiled_again(
    folder: Path, kind: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = build.build_library("host", folder=folder)
    expected, path = first.path.read_bytes(), first.path.with_suffix(f".{kind}")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20] if damage == "cut" else b"\xff other")
    again = build.build_library("host", folder=folder)
    is_rebuilt = damage == "gone" or (kind, damage) != ("log", "cut")  # the report is empty
    assert (
        again.path == first.path
        and (again.build_s > 0) == is_rebuilt
        and first.path.read_bytes() == expected
    )
    assert damage == "gone" or not is_rebuilt or "compiling it again" in caplog.text


@needs_host
@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("whose", ["folder", "library", "above"])
def test_library_owned_by_another_user_is_not_loaded(
    folder: Path, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = build.build_library("host", folder=folder)
    foreign = {"folder": first.path.parent, "library": first.path, "above": folder.parent}[whose]
    os.chown(foreign, 12345, -1)
    again = build.build_library("host", folder=folder)
    assert again.build_s > 0 and "belongs to user 12345" in caplog.text
    assert again.path.stat().st_uid == again.path.parent.stat().st_uid == 0
    assert (again.path == first.path) == (whose == "library")
    assert build.build_library("host", folder=folder).build_s == 0, (
        "the process keeps the library that it built"
    )


@needs_host
def test_changed_header_source_or_variant_gives_another_library(folder: Path) -> None:
    paths = {
        build.build_library("host", variant, folder=folder).path for variant in ("release", "debug")
    }
    (folder / "include" / "a.h").write_text("#define ANSWER 43\n")
    paths.add(build.build_library("host", folder=folder).path)
    (folder / "a.cu").write_text(SOURCE + "// and more\n")
    paths.add(build.build_library("host", folder=folder).path)
    assert len(paths) == 4


@needs_host
def test_concurrent_builds_compile_once(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: build.build_library("host", folder=folder), range(4)))
    assert sum(one.build_s > 0 for one in libraries) == 1
    assert len({one.path for one in libraries}) == 1


@needs_host
def test_compiler_error_is_shown_with_its_command_and_leaves_no_files(
    folder: Path,
) -> None:
    (folder / "a.cu").write_text("int broken( {\n")
    with pytest.raises(KernelError, match=r"(?s)did not compile.*-std=c\+\+17.*a\.cu.*error"):
        build.build_library("host", folder=folder)
    assert {path.suffix for path in build.cache_folder().iterdir()} == {".lock"}


@needs_host
def test_slow_build_prints_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "_QUIET_S", 0.0)
    build.build_library("host", folder=folder)
    assert "compiling autopar's kernels (host-release), once" in capsys.readouterr().err
    build.build_library("host", folder=folder)
    assert capsys.readouterr().err == ""


def test_compiler_is_stopped_at_the_time_limit(
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
def test_error_for_an_unwritable_cache_names_the_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_KERNEL_CACHE", str(folder / "a.cu" / "cache"))
    with pytest.raises(KernelError, match="AUTOPAR_KERNEL_CACHE"):
        build.build_library("host", folder=folder)


def test_folder_without_kernels_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    (folder / "a.cu").unlink()
    with pytest.raises(KernelError, match="no kernels"):
        build.build_library("host", folder=folder)


def test_unknown_variants_and_device_sanitizers_are_refused() -> None:
    with pytest.raises(KernelError, match="release, debug, thread, emulated, emulated-thread"):
        build.build_library("host", "fast")
    with pytest.raises(KernelError, match="only available for the host"):
        build.build_library("cuda", "thread")


def test_reference_runs_with_a_warning_if_there_is_no_compiler(
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


def test_old_gpu_uses_the_references_with_a_warning(
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
def test_environment_variable_selects_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.host() is not None and library.why_not() == ""
    monkeypatch.setenv("AUTOPAR_KERNELS", "reference")
    assert library.host() is None and "selects the torch reference" in library.why_not()
    assert not library.has(torch.device("cpu"))


@needs_host
def test_command_prints_the_path_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--host"]) == 0
    assert str(build.build_library("host").path) in capsys.readouterr().out


def test_command_fails_if_the_build_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", str(folder / "no-compiler"))
    assert build.main(["--host"]) == 1
    assert "no-compiler" in capsys.readouterr().err


@needs_host
def test_refused_argument_raises_an_error() -> None:
    with pytest.raises(KernelError, match="an argument was refused"):
        library.check(library.function("host", "ap_epoch_signal_host")(None, 1), "ap_epoch_signal")
