"""Output of the command line to streams of other encodings, and to streams that cannot be
written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_plan import made_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made_plan().save(path)
    return path


def explain(plan_file: Path, stdout: int, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "autopar", "explain", str(plan_file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, timeout=300, check=False
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_the_encoding_lacks_are_replaced(plan_file: Path, encoding: str) -> None:
    whole = explain(plan_file, subprocess.PIPE, PYTHONIOENCODING="utf-8")
    done = explain(plan_file, subprocess.PIPE, PYTHONIOENCODING=encoding)
    assert done.returncode == whole.returncode == 0 and not done.stderr
    text = whole.stdout.decode("utf-8")
    assert not text.isascii()
    assert done.stdout == text.encode(encoding, errors="replace")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_full_disk_is_reported_without_a_traceback(plan_file: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = explain(plan_file, full.fileno())
    assert done.returncode != 0 and b"Traceback" not in done.stderr, done.stderr
    assert b"cannot write the output: No space left on device" in done.stderr
