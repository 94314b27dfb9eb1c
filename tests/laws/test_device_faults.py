"""The checks of compute-sanitizer, applied to the device code that is emulated on the CPU. Planted
faults are detected.

AddressSanitizer finds accesses out of bounds, ThreadSanitizer finds races in shared memory, and the
emulation finds barriers that not all threads reach. Dependence on uninitialized memory is found
because the tests of the emulated code fill their memory with NaN. Faults are planted in a copy of
the sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.kernels import build
from tests.laws.test_kernel_races import RACE, RACE_FOUND, planted, watched

__all__ = ["planted"]  # a fixture
pytestmark = pytest.mark.slow
TESTS = "tests/unit/kernels"
PARTED, BEYOND = "not all threads of a block come to the barrier", "AddressSanitizer"
SUMS, NORMS, COMMON, PACK, NORM, SOFTMAX, MOE = (
    "include/sums.h",
    "include/norms.h",
    "include/common.h",
    "pack.cu",
    "row_norm.cu",
    "row_softmax.cu",
    "moe_route.cu",
)
RSTD = (
    "  if (begin + threadIdx.x < end) rstd[threadIdx.x] = ap::rstd_of(squares[begin + threadIdx.x],"
    " n, eps);\n"
)
LEFT, BARRIER = "  if (column >= hidden) return;\n", "  __syncthreads();\n"
HALVES = "    if (place < half) lanes[lane] = lanes[lane] + lanes[lane + half];\n"
HALVED = f"{HALVES}    __syncthreads();\n"
LANES, PACKED = (
    "  lanes[threadIdx.x] = sum;\n",
    "  store_group(segment + at, kGroup, values);\n  return sum;",
)
FETCHED = """  if (count >= kGroup && is_aligned(p)) {
#ifdef AP_ON_DEVICE
    for (int i = 0; i < int(sizeof raw / 16); ++i) reinterpret_cast<uint4*>(raw.items)"""
WITHIN = (
    "  if (number >= r.rows * ap::groups_per_row(r)) return;\n  const ap::Group g = ap::group_of(r,"
    " number);\n  const W most"
)
SCANNED = """      sums[1 - now][thread] = sums[now][thread] + (thread >= step ? sums[now][thread - step] : 0);
      __syncthreads();
"""  # noqa: E501
TILE = "    before += sums[now][255];\n    __syncthreads();\n"

# name: file, original text, planted text
RACES = {
    "lanes are read before all are written": (
        SUMS,
        f"  lanes[lane] = own;\n{BARRIER}  for",
        "  lanes[lane] = own;\n  for",
    ),
    "lanes are added while they are read": (SUMS, HALVED, HALVES),
    "a band's norms are read before they are written": (NORMS, RSTD + BARRIER, RSTD),
    "lanes of bands are read before they are written": (NORM, LANES + BARRIER, LANES),
    "pairs are counted while they are read": (MOE, SCANNED, SCANNED.splitlines(keepends=True)[0]),
    "a tile is written while the last is read": (MOE, TILE, TILE.splitlines(keepends=True)[0]),
}
# and the tests of the emulated code that detect it
OUTSIDE = {
    "a group beyond the end is fetched whole": (
        COMMON,
        FETCHED,
        FETCHED.replace("count >= kGroup", "count > 0"),
        "norm or softmax",
    ),
    "a group beyond the end is stored whole": (
        COMMON,
        "i < kGroup && i < count; ++i) p[i]",
        "i < kGroup; ++i) p[i]",
        "norm or softmax",
    ),
    "rows beyond a band's are read": (
        NORMS,
        "row + turn < end ? row + turn : end - 1",
        "row + turn",
        "norm",
    ),
    "padding is unpacked": (PACK, "  if (at >= part.size) return;\n", "", "pack"),
    "threads without a row read one": (
        SOFTMAX,
        "row < r.rows ? m[row] : W(0)",
        "m[row]",
        "softmax",
    ),
    "threads without a group take one": (
        SOFTMAX,
        WITHIN,
        "\n".join(WITHIN.splitlines()[1:]),
        "softmax",
    ),
    "pairs beyond the last are read": (
        MOE,
        "p < pairs ? experts[p] : 0",
        "experts[p]",
        "pairs or go",
    ),
}
DIVERGENT = {
    "threads leave before a barrier": (
        NORMS,
        RSTD + BARRIER + LEFT,
        RSTD + LEFT + BARRIER,
        "norm and shape2",
    ),
    "a barrier under a condition": (
        SUMS,
        HALVED,
        HALVES.replace(") lanes", ") __syncthreads(), lanes"),
        "norm and shape5",
    ),
}
UNWRITTEN = {
    "padding is not written": (PACK, PACKED, PACKED.replace("kGroup", "left"), "pack"),
    "no sum is written": (
        SOFTMAX,
        "if (row < r.rows && (threadIdx.x & (threads - 1)) == 0) s[row] = sum;",
        "(void)s;",
        "softmax",
    ),
}


def cases(faults: dict[str, tuple[str, ...]]) -> list[object]:
    return [pytest.param(*fault, id=name) for name, fault in faults.items()]


def put(folder: Path, name: str = "", there: str = "", fault: str = "") -> None:
    """Copy all kernels into a folder, with the fault in the named file."""
    for path in build.sources():
        shutil.copy(path, folder / path.name)
    if name:
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(there) == 1
        (folder / name).write_text(text.replace(there, fault), encoding="utf-8")


def emulated(folder: Path, which: str, *, with_addresses: bool) -> subprocess.CompletedProcess[str]:
    """Run the tests of the emulated code with the kernels in `folder`, optionally with
    AddressSanitizer and UndefinedBehaviorSanitizer."""
    environment = {
        **os.environ,
        "PLANTED_KERNELS": str(folder),
        "PYTHONPATH": os.pathsep.join(["tests/support", *sys.path]),
    }
    if with_addresses:
        compiler, *flags = build.compiler("host")
        found = [
            subprocess.run(
                [compiler, f"-print-file-name=lib{name}.so"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for name in ("asan", "ubsan")
        ]
        if not all(os.path.isabs(name) for name in found):
            pytest.skip("this compiler has no AddressSanitizer")
        environment["CXX"] = " ".join(
            [compiler, *flags, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
        )
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # set here, so that the compiler itself is not checked
            patch.setenv("CXX", environment["CXX"])
            build.build_library("host", "emulated", folder=folder)
        environment |= {
            "LD_PRELOAD": ":".join(found),
            "ASAN_OPTIONS": "detect_leaks=0",
        }  # leaks of the interpreter
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-s",
        "-p",
        "no:cacheprovider",
        "-p",
        "planted_kernels",
        "-k",
        which,
        f"{TESTS}/test_device_code.py",
        f"{TESTS}/test_device_exchange.py",
    ]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_no_kernel_access_is_out_of_bounds(planted: Path) -> None:
    put(planted)
    done = emulated(planted, "", with_addresses=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize(("name", "there", "fault", "which"), cases(OUTSIDE))
def test_an_out_of_bounds_access_is_detected(
    planted: Path, name: str, there: str, fault: str, which: str
) -> None:
    put(planted, name, there, fault)
    done = emulated(planted, which, with_addresses=True)
    assert done.returncode != 0 and BEYOND in done.stderr, done.stdout + done.stderr


def test_shared_memory_has_no_race(planted: Path) -> None:
    put(planted)
    done = watched(planted, "device_driver.cpp", variant="emulated-thread")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "there", "fault"), cases(RACES))
def test_a_race_in_shared_memory_is_detected(
    planted: Path, name: str, there: str, fault: str
) -> None:
    put(planted, name, there, fault)
    done = watched(planted, "device_driver.cpp", variant="emulated-thread")
    assert done.returncode == RACE_FOUND and RACE in done.stderr, done.stderr


@pytest.mark.parametrize(("name", "there", "fault", "which"), cases(DIVERGENT))
def test_a_barrier_that_not_all_threads_reach_is_detected(
    planted: Path, name: str, there: str, fault: str, which: str
) -> None:
    put(planted, name, there, fault)
    done = emulated(planted, which, with_addresses=False)
    assert done.returncode == 1 and PARTED in done.stderr, done.stdout + done.stderr
    assert "the launch failed" in done.stdout


@pytest.mark.parametrize(("name", "there", "fault", "which"), cases(UNWRITTEN))
def test_a_read_of_unwritten_memory_is_detected(
    planted: Path, name: str, there: str, fault: str, which: str
) -> None:
    put(planted, name, there, fault)
    done = emulated(planted, which, with_addresses=False)
    assert done.returncode == 1 and "failed" in done.stdout, done.stdout + done.stderr
