"""Mixed precision in fp16 by transformers, accelerate and Lightning: losses are scaled, and steps
left out, as for the plain model.

accelerate scales losses on GPUs alone, and trains in fp32 on a CPU. `scaled` gives it there what it
has on a GPU.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from lightning.pytorch.plugins import MixedPrecision
from lit import QUIET, Classifier, batches
from torch import nn
from trained import Tagger, data, samples, settings, told

import autopar
from autopar.errors import RuntimeStateError

IN_TWO = {"hardware": "h100-sxm", "num_microbatches": 2}
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


def grad_scaler(init_scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)


def scaled(accelerator: Any, init_scale: float = 2.0**24) -> Any:
    accelerator.native_amp, accelerator.scaler = True, grad_scaler(init_scale)
    return accelerator


@pytest.mark.parametrize("max_norm", [0.05, pytest.param(0.0, marks=pytest.mark.slow)])
def test_transformers_trainer_scales_losses_and_leaves_out_steps_as_its_own(
    tmp_path: Path, max_norm: float
) -> None:
    logs, scales, outside = [], [], {"model": Tagger(), **data()}
    for trainer in (
        transformers.Trainer(
            args=settings(tmp_path, fp16=True, num_train_epochs=4, max_grad_norm=max_norm),
            **outside,
        ),
        autopar.Trainer(
            args=settings(tmp_path, fp16=True, num_train_epochs=4, max_grad_norm=max_norm),
            **{**outside, "model": Tagger()},
            mesh={"gpu": 1},
            compile_options=IN_TWO,
        ),
    ):
        scaled(trainer.accelerator)
        trainer.train()
        logs.append([line for line in told(trainer) if "grad_norm" in line])
        scales.append(trainer.accelerator.scaler.get_scale())
    wanted, found = logs
    norms = [line["grad_norm"] for line in wanted]
    assert scales[0] == scales[1] < 2.0**24 and norms[0] != norms[0] and norms[-1] == norms[-1], (
        "steps were left out, and others not"
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, nan_ok=True)


def test_on_a_cpu_fp16_is_what_it_is_for_transformers(tmp_path: Path) -> None:
    losses = []
    for kind, more in (
        (transformers.Trainer, {}),
        (autopar.Trainer, {"mesh": {"gpu": 1}, "compile_options": IN_TWO}),
    ):
        trainer = kind(
            model=Tagger(), args=settings(tmp_path, fp16=True, max_steps=1), **data(), **more
        )
        trainer.train()
        losses.append(told(trainer)[0]["loss"])
        assert trainer.accelerator.scaler is None
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def looped(accelerator: Any, compiled: Any) -> list[float]:
    """Losses, norms and scales of a loop with accumulation and clipping, as accelerate's
    documentation has it."""
    model, found = compiled(torch.utils.data.default_collate(samples(4, 1))), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for seed in range(8):
        with accelerator.accumulate(model):
            loss = model(**torch.utils.data.default_collate(samples(4, seed)))["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        assert loss.dtype == torch.float32 or "precision" in model.plan.options
        found += [loss.item(), accelerator.scaler.get_scale()]
    return found


@pytest.mark.parametrize(
    ("way", "scale"),
    [("autocast", 2.0**24), pytest.param("precision", 2.0**12, marks=pytest.mark.slow)],
)
def test_accelerate_scales_losses_of_modules_that_were_compiled_for_it(
    way: str, scale: float
) -> None:
    """With a precision the loss itself is in float16, which bounds the scale."""
    runs = []
    for kind in (accelerate.Accelerator, autopar.Accelerator):
        AcceleratorState._reset_state(True)
        accelerator = scaled(
            kind(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2), scale
        )

        def compiled(batch: Any, accelerator: Any = accelerator) -> nn.Module:
            precision = {"precision": "fp16"} if way == "precision" else {}
            with contextlib.nullcontext() if precision else accelerator.autocast():
                return autopar.compile(
                    Tagger(), {"gpu": 1}, example_inputs=batch, **IN_TWO, **precision
                )

        runs.append(
            looped(accelerator, compiled if kind is autopar.Accelerator else lambda _: Tagger())
        )
    AcceleratorState._reset_state(True)
    wanted, found = runs
    assert found == pytest.approx(wanted, rel=2e-3, nan_ok=True)
    assert len({each for each in wanted if each > 2.0**10}) > 1


def test_accelerate_refuses_modules_that_were_not_compiled_for_its_precision_and_fp16_without_a_scaler() -> (  # noqa: E501
    None
):
    batch = torch.utils.data.default_collate(samples(4, 1))
    plain = autopar.compile(Tagger(), {"gpu": 1}, example_inputs=batch, **IN_TWO)
    narrow = autopar.compile(Tagger(), {"gpu": 1}, example_inputs=batch, precision="fp16", **IN_TWO)
    AcceleratorState._reset_state(True)
    accelerator = scaled(autopar.Accelerator(cpu=True, mixed_precision="fp16"))
    with pytest.raises(
        RuntimeStateError, match="without the accelerator's mixed precision fp16"
    ) as refusal:
        accelerator.prepare(plain)
    assert "with accelerator.autocast()" in refusal.value.remedy
    assert accelerator.prepare(narrow) is narrow
    AcceleratorState._reset_state(True)
    with pytest.raises(RuntimeStateError, match="its loss is not scaled") as refusal:
        autopar.Accelerator(cpu=True).prepare(narrow)
    AcceleratorState._reset_state(True)
    assert 'precision="bf16"' in refusal.value.remedy


def test_lightning_scales_losses_in_16_mixed(tmp_path: Path) -> None:
    runs = []
    for strategy in (
        "auto",
        autopar.LightningStrategy(mesh={"gpu": 1}, compile_options={"hardware": "h100-sxm"}),
    ):
        module, plugin = Classifier(), MixedPrecision("16-mixed", "cpu", grad_scaler(2.0**22))
        usual = {
            "max_epochs": 3,
            "gradient_clip_val": 0.05,
            "accumulate_grad_batches": 2,
            "enable_checkpointing": False,
        }
        lightning.Trainer(strategy=strategy, plugins=[plugin], **{**QUIET, **usual}).fit(
            module, batches(14, 1)
        )
        runs.append((module.losses, plugin.scaler.get_scale()))
    (wanted, scale), (found, mine) = runs
    assert mine == scale < 2.0**22 and found == pytest.approx(wanted, rel=2e-3)
