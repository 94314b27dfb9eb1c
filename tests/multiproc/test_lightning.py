"""The Trainer of Lightning on two processes with sharded parameters, compared with the plain
model on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import run_processes
from lit import Classifier, same, train_and_test

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


def test_two_lightning_processes_log_save_and_resume_as_one(tmp_path: Path) -> None:
    wanted = train_and_test(tmp_path / "alone", "auto")
    resumed = train_and_test(
        tmp_path / "alone" / "again", "auto", tmp_path / "alone" / "epoch=0.ckpt"
    )
    ranks = run_processes(
        2, str(Path(__file__).parent / "worker_lightning.py"), "run", str(tmp_path)
    )
    for first, again in ranks:
        same(first, wanted)
        same(again, resumed)
        assert set(first["parts"]) == {0.5}
    assert [first["writes"] for first, _ in ranks] == [True, False]
    mine, theirs = (
        Classifier.load_from_checkpoint(each / "last.ckpt")
        for each in (tmp_path, tmp_path / "alone")
    )
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)
