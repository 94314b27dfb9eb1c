"""Mixed precision in fp16 with transformers, accelerate and Lightning: losses are scaled and steps
skipped as for the plain model.

accelerate scales losses only on GPUs and trains in fp32 on a CPU. `enable_scaler` gives it a scaler
on a CPU.
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
from trained import Tagger, data, log_of, samples, settings

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


def enable_scaler(accelerator: Any, init_scale: float = 2.0**24) -> Any:
    accelerator.native_amp, accelerator.scaler = True, grad_scaler(init_scale)
    return accelerator


@pytest.mark.parametrize("max_norm", [0.05, pytest.param(0.0, marks=pytest.mark.slow)])
def test_trainer_scales_losses_and_skips_steps_like_transformers(
    tmp_path: Path, max_norm: float
) -> None:
    logs, scales, options = [], [], {"model": Tagger(), **data()}
    for trainer in (
        transformers.Trainer(
            args=settings(tmp_path, fp16=True, num_train_epochs=4, max_grad_norm=max_norm),
            **options,
        ),
        autopar.Trainer(
            args=settings(tmp_path, fp16=True, num_train_epochs=4, max_grad_norm=max_norm),
            **{**options, "model": Tagger()},
            mesh={"gpu": 1},
            compile_options=IN_TWO,
        ),
    ):
        enable_scaler(trainer.accelerator)
        trainer.train()
        logs.append([line for line in log_of(trainer) if "grad_norm" in line])
        scales.append(trainer.accelerator.scaler.get_scale())
    expected, result = logs
    norms = [line["grad_norm"] for line in expected]
    assert scales[0] == scales[1] < 2.0**24 and norms[0] != norms[0] and norms[-1] == norms[-1], (
        "some steps are skipped and others are not"
    )
    for entry, reference in zip(result, expected, strict=True):
        assert entry == pytest.approx(reference, rel=2e-3, nan_ok=True)


def test_fp16_on_a_cpu_matches_transformers(tmp_path: Path) -> None:
    losses = []
    for kind, more in (
        (transformers.Trainer, {}),
        (autopar.Trainer, {"mesh": {"gpu": 1}, "compile_options": IN_TWO}),
    ):
        trainer = kind(
            model=Tagger(), args=settings(tmp_path, fp16=True, max_steps=1), **data(), **more
        )
        trainer.train()
        losses.append(log_of(trainer)[0]["loss"])
        assert trainer.accelerator.scaler is None
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def run_loop(accelerator: Any, make_model: Any) -> list[float]:
    """Run a loop with accumulation and clipping, as in the documentation of accelerate. Return its
    losses, norms and scales."""
    model, values = make_model(torch.utils.data.default_collate(samples(4, 1))), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for seed in range(8):
        with accelerator.accumulate(model):
            loss = model(**torch.utils.data.default_collate(samples(4, seed)))["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                values.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        assert loss.dtype == torch.float32 or "precision" in model.plan.options
        values += [loss.item(), accelerator.scaler.get_scale()]
    return values


@pytest.mark.parametrize(
    ("way", "scale"),
    [("autocast", 2.0**24), pytest.param("precision", 2.0**12, marks=pytest.mark.slow)],
)
def test_accelerator_scales_the_losses_of_compiled_modules(way: str, scale: float) -> None:
    """With `precision`, the loss is in float16, which limits the scale."""
    runs = []
    for kind in (accelerate.Accelerator, autopar.Accelerator):
        AcceleratorState._reset_state(True)
        accelerator = enable_scaler(
            kind(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2), scale
        )

        def compile_tagger(batch: Any, accelerator: Any = accelerator) -> nn.Module:
            precision = {"precision": "fp16"} if way == "precision" else {}
            with contextlib.nullcontext() if precision else accelerator.autocast():
                return autopar.compile(
                    Tagger(), {"gpu": 1}, example_inputs=batch, **IN_TWO, **precision
                )

        runs.append(
            run_loop(
                accelerator, compile_tagger if kind is autopar.Accelerator else lambda _: Tagger()
            )
        )
    AcceleratorState._reset_state(True)
    expected, result = runs
    assert result == pytest.approx(expected, rel=2e-3, nan_ok=True)
    assert len({each for each in expected if each > 2.0**10}) > 1


def test_accelerator_refuses_modules_compiled_for_another_precision() -> None:
    batch = torch.utils.data.default_collate(samples(4, 1))
    plain = autopar.compile(Tagger(), {"gpu": 1}, example_inputs=batch, **IN_TWO)
    narrow = autopar.compile(Tagger(), {"gpu": 1}, example_inputs=batch, precision="fp16", **IN_TWO)
    AcceleratorState._reset_state(True)
    accelerator = enable_scaler(autopar.Accelerator(cpu=True, mixed_precision="fp16"))
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


def test_lightning_scales_losses_with_16_mixed(tmp_path: Path) -> None:
    runs = []
    for strategy in (
        "auto",
        autopar.LightningStrategy(mesh={"gpu": 1}, compile_options={"hardware": "h100-sxm"}),
    ):
        module, plugin = Classifier(), MixedPrecision("16-mixed", "cpu", grad_scaler(2.0**22))
        options = {
            "max_epochs": 3,
            "gradient_clip_val": 0.05,
            "accumulate_grad_batches": 2,
            "enable_checkpointing": False,
        }
        lightning.Trainer(strategy=strategy, plugins=[plugin], **{**QUIET, **options}).fit(
            module, batches(14, 1)
        )
        runs.append((module.losses, plugin.scaler.get_scale()))
    (expected, scale), (losses, final_scale) = runs
    assert final_scale == scale < 2.0**22 and losses == pytest.approx(expected, rel=2e-3)
