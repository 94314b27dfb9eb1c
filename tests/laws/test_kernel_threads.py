"""The threaded host path has no data races under ThreadSanitizer, which detects planted races."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from native import needs_host

from autopar.errors import KernelError
from autopar.kernels.build import build_program

pytestmark = [pytest.mark.slow, needs_host]
MAIN = Path(__file__).parents[1] / "support" / "kernel_threads.cpp"
FOUND = "WARNING: ThreadSanitizer: data race"


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        made = build_program(MAIN, "thread").path
    except KernelError as error:
        if "tsan" in str(error):
            pytest.skip("the C++ compiler has no ThreadSanitizer")
        raise
    return made


def run(program: Path, mode: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(program), mode], capture_output=True, text=True, timeout=120, check=False
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run under this kernel's memory layout")
    return done


@pytest.mark.parametrize("mode", ("pack", "norm", "hand"))
def test_the_threaded_host_path_has_no_race(program: Path, mode: str) -> None:
    done = run(program, mode)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("mode", ("early", "overlap"))
def test_a_planted_race_is_detected(program: Path, mode: str) -> None:
    done = run(program, mode)
    assert done.returncode != 0
    assert FOUND in done.stderr
