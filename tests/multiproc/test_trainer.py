"""The Trainer of transformers, accelerate and peft on several processes match one process with
the plain model, and files are written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from harness import run_processes
from peft import PeftModel
from safetensors.torch import load_file
from trained import BUILD, CLIPPED, Tagger, data, log_of, samples, settings, sum_of_logits
from worker_trainer import SAVED, loop

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_trainer.py")


def wanted(folder: Path, kind: str) -> list[dict[str, float]]:
    """The logs of one process, which saves into `folder`."""
    trainer = transformers.Trainer(
        model=BUILD[kind][1](),
        args=settings(folder, **SAVED),
        **data(),
        compute_metrics=sum_of_logits,
    )
    trainer.train()
    trainer.save_model(str(folder / "end"))
    return log_of(trainer)


def same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> bool:
    """Assert that logs are equal, entry by entry."""
    assert [sorted(line) for line in ours] == [sorted(line) for line in theirs]
    return all(
        mine == pytest.approx(line, rel=2e-4) for mine, line in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["tagger", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_two_trainer_processes_train_log_evaluate_save_and_resume_as_one(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "alone"
    log = wanted(folder, kind)
    ranks: list[Any] = run_processes(2, WORKER, "trained", str(tmp_path), kind)
    assert [each["writes"] for each in ranks] == [True, False]
    for each in ranks:
        assert same(each["log"][:-1], log[:-1])
        assert same(
            [line for line in each["again"] if "loss" in line],
            [line for line in log if "loss" in line],
        )
        assert each["gradients"] == [] and each["parts"]
    assert min(line["grad_norm"] for line in log if "grad_norm" in line) > CLIPPED, (
        "gradients are clipped"
    )
    written = {each.name for each in (tmp_path / "checkpoint-4").iterdir()} - {"autopar"}
    assert written == {each.name for each in (folder / "checkpoint-4").iterdir()} - {
        "optimizer.pt",
        "scheduler.pt",
    }
    mine, theirs = (
        load_file(each / "end" / "adapter_model.safetensors") for each in (tmp_path, folder)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)
    batch = torch.utils.data.default_collate(samples(4, 5))
    models = [
        PeftModel.from_pretrained(BUILD[kind][0](), each / "end") for each in (tmp_path, folder)
    ]
    with torch.no_grad():
        assert models[0](**batch)["loss"].item() == pytest.approx(
            models[1](**batch)["loss"].item(), rel=1e-5
        )


def test_two_processes_with_accelerate_step_as_one() -> None:
    plain = loop(
        accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), lambda _: Tagger()
    )
    ranks: list[Any] = run_processes(2, WORKER, "stepped")
    for each in ranks:
        assert [step for line in each["steps"] for step in line] == pytest.approx(
            [step for line in plain for step in line], rel=1e-4
        )
        assert (
            "cannot be wrapped in DistributedDataParallel" in each["refused"]
            and "autopar.Accelerator" in each["refused"]
        )
