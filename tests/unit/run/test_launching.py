"""What `autopar run` asks torchrun for."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.api.arguments import launched
from autopar.errors import AutoparError
from autopar.run.launching import launch


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: None)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")  # so that it is as before afterwards
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_one_machine_needs_no_place_to_meet(script: Path) -> None:
    launch(script, ["--steps", "3"], num_processes=4)
    assert sys.argv == ["torchrun", "--standalone", "--max-restarts=0", "--nproc-per-node=4", str(script), "--steps", "3"]


@pytest.mark.parametrize(("num_gpus", "started"), [(8, 8), (0, 1)])
def test_by_default_each_gpu_has_a_process(num_gpus: int, started: int, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    launch(script, [])
    assert f"--nproc-per-node={started}" in sys.argv


def test_where_machines_come_and_go_losing_one_does_not_end_the_run(script: Path) -> None:
    launch(script, [], nodes="1:2", meet="host:29500")
    assert "--max-restarts=10" in sys.argv


def test_machines_that_come_and_go_meet_anew_each_time(script: Path) -> None:
    launch(script, [], num_processes=8, nodes="2:4", meet="host:29500", restarts=3)
    told = ["--nnodes=2:4", "--rdzv-backend=c10d", "--rdzv-endpoint=host:29500", "--rdzv-id=autopar", "--max-restarts=3"]
    assert sys.argv == ["torchrun", *told, "--nproc-per-node=8", str(script)]
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", "else a machine that joins later waits for the first one's word"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": "2"}, "no place to meet"),
        ({"nodes": "two", "meet": "host:1"}, "no number of machines"),
        ({"nodes": "0"}, "no number"),
        ({"nodes": "3:2", "meet": "host:1"}, "from 3 to 2"),
    ],
)
def test_what_cannot_be_started_is_refused(script: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        launch(script, [], **options)
    with pytest.raises(AutoparError, match="no script"):
        launch(script.with_name("other.py"), [])


@pytest.mark.parametrize(
    ("world", "here", "shape"), [(None, None, (1, 1)), ("4", None, (1, 4)), ("16", "8", (2, 8)), ("6", "4", 6)], ids=str
)
def test_the_mesh_is_by_default_all_that_was_started(
    monkeypatch: pytest.MonkeyPatch, world: str | None, here: str | None, shape: object
) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    assert launched() == shape


def test_where_the_script_fails_torchruns_own_traceback_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('as the user wrote it')\n")
    command = [sys.executable, "-m", "autopar", "run", "-n", "2", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "as the user wrote it" in found.stderr
    assert "the script failed, on rank " in found.stderr.replace("\n", " ") and "ChildFailedError" not in found.stderr
    assert "typer" not in found.stderr
