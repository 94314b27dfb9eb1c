"""The torchrun arguments that `autopar run` passes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.api.arguments import launched_processes
from autopar.errors import AutoparError
from autopar.runtime.launching import launch

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(runpy, "run_module", lambda name, run_name: None)
    monkeypatch.setenv(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", ""
    )  # so that monkeypatch restores it after the test
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_one_machine_needs_no_rendezvous_address(script: Path) -> None:
    launch(script, ["--steps", "3"], num_processes=4)
    assert sys.argv == [
        "torchrun",
        "--standalone",
        "--max-restarts=0",
        "--nproc-per-node=4",
        str(script),
        "--steps",
        "3",
    ]


@pytest.mark.parametrize(
    ("num_gpus", "asked", "started"), [(8, None, 8), (0, None, 1), (8, 2, 2), (1, 2, 2)]
)
def test_by_default_each_gpu_has_one_process(
    num_gpus: int, asked: int | None, started: int, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    launch(script, ["--steps", "3"], num_processes=asked)
    by_us = ["-m", "autopar.runtime.launch_worker"] if num_gpus > 1 else []
    assert sys.argv[3:] == [f"--nproc-per-node={started}", *by_us, str(script), "--steps", "3"]


@pytest.mark.slow
def test_a_script_started_by_the_launch_worker_runs_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'", encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, pickle, sys\nfrom beside import WORD\n\nclass Own: pass\n\nif"
        " __name__ == '__main__':\n    assert type(pickle.loads(pickle.dumps(Own()))) is Own and"
        " sys.modules['__main__'].Own is Own\n    with multiprocessing.get_context('spawn').Pool(1)"
        " as pool: pool.apply(Own)\n    print(WORD, sys.argv[1:], __file__)\n    sys.exit(3)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "autopar.runtime.launch_worker", str(script), "--steps", "3"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )
    assert (done.returncode, done.stdout.strip()) == (
        3,
        f"beside ['--steps', '3'] {script}",
    ), done.stderr


def test_an_elastic_run_restarts_after_losing_a_machine(script: Path) -> None:
    launch(script, [], nodes="1:2", meet="host:29500")
    assert "--max-restarts=10" in sys.argv


def test_an_elastic_run_uses_a_new_rendezvous_store_each_time(script: Path) -> None:
    launch(script, [], num_processes=8, nodes="2:4", meet="host:29500", restarts=3)
    told = [
        "--nnodes=2:4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=host:29500",
        "--rdzv-id=autopar",
        "--max-restarts=3",
    ]
    assert sys.argv == ["torchrun", *told, "--nproc-per-node=8", str(script)]
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1", (
        "otherwise a machine that joins later waits for the first one"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": "2"}, "need a rendezvous address"),
        ({"nodes": "two", "meet": "host:1"}, "not a number of machines"),
        ({"nodes": "0"}, "'0' is not a number of machines"),
        ({"nodes": "3:2", "meet": "host:1"}, "from 3 to 2"),
    ],
)
def test_invalid_launch_arguments_are_refused(
    script: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(AutoparError, match=words):
        launch(script, [], **options)
    with pytest.raises(AutoparError, match="does not exist"):
        launch(script.with_name("other.py"), [])


@pytest.mark.parametrize(
    ("world", "here", "shape"),
    [(None, None, (1, 1)), ("4", None, (1, 4)), ("16", "8", (2, 8)), ("6", "4", 6)],
    ids=str,
)
def test_the_default_mesh_covers_all_launched_processes(
    monkeypatch: pytest.MonkeyPatch, world: str | None, here: str | None, shape: object
) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    assert launched_processes() == shape


@pytest.mark.slow
def test_the_traceback_of_torchrun_is_omitted_if_the_script_fails(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("raise ValueError('as the user wrote it')\n")
    command = [sys.executable, "-m", "autopar", "run", "-n", "2", str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1 and "as the user wrote it" in found.stderr
    assert (
        "the script failed, first on rank " in found.stderr.replace("\n", " ")
        and "ChildFailedError" not in found.stderr
    )
    assert "typer" not in found.stderr
