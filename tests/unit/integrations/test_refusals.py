"""Unsupported options are refused before training, with a remedy."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import Tagger, data, settings

import autopar
from autopar.errors import AutoparError
from autopar.integrations.libraries import LEAST, library

ARGUMENTS = {
    "fsdp": True,
    "deepspeed": "ds.json",
    "parallelism_config": object(),
    "activation_checkpointing": True,
    "gradient_checkpointing": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "torch_compile": True,
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "debug": ["underflow_overflow"],
    "auto_find_batch_size": True,
    "predict_with_generate": True,
    "push_to_hub": True,
    "save_on_each_node": True,
    "enable_jit_checkpoint": True,
    "train_sampling_strategy": "batch_rebalance",
    "optim": "adamw_bnb_8bit",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_error_for_an_unsupported_argument_names_it(tmp_path: Path, name: str) -> None:
    args = settings(tmp_path)
    setattr(args, name, ARGUMENTS[name])
    with pytest.raises(AutoparError, match=f"{name}=") as refusal:
        autopar.Trainer(model=Tagger(), args=args, **data())
    assert refusal.value.remedy


def test_several_gpus_with_one_process_are_refused(tmp_path: Path) -> None:
    args = settings(tmp_path)
    args._n_gpu = 4
    with pytest.raises(
        AutoparError, match="this machine has 4 GPUs, but only one process"
    ) as refusal:
        autopar.Trainer(model=Tagger(), args=args, **data())
    assert "autopar run" in refusal.value.remedy


OPTIONS = {
    "an optimizer": (
        {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)},
        "would train nothing",
    ),
    "model_init": ({"model_init": Tagger}, "model_init"),
    "no model": ({"model": None}, "is not a model"),
    "a model on meta": ({"model": Tagger().to("meta")}, "on meta"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_unsupported_trainer_options_are_refused(tmp_path: Path, what: str) -> None:
    options, words = OPTIONS[what]
    with pytest.raises(AutoparError, match=words) as refusal:
        autopar.Trainer(**{"model": Tagger(), "args": settings(tmp_path), **data(), **options})
    assert refusal.value.remedy


def test_trainer_refuses_a_compiled_model(tmp_path: Path) -> None:
    batch = torch.utils.data.default_collate(data()["train_dataset"][:4])
    module = autopar.compile(Tagger(), example_inputs=batch, hardware="cpu-gloo")
    with pytest.raises(AutoparError, match="compiles the model itself"):
        autopar.Trainer(model=module, args=settings(tmp_path), **data())


@pytest.mark.parametrize(
    "argument",
    [{"mixed_precision": "fp8"}, {"fsdp_plugin": object()}, {"parallelism_config": object()}],
)
def test_accelerator_refuses_options_that_the_compiled_module_replaces(
    argument: dict[str, Any],
) -> None:
    with pytest.raises(AutoparError, match=next(iter(argument))):
        autopar.Accelerator(cpu=True, **argument)


def test_accelerator_accepts_only_compiled_modules_and_does_not_save_them() -> None:
    accelerator = autopar.Accelerator(cpu=True)
    with pytest.raises(AutoparError, match="not compiled"):
        accelerator.prepare(Tagger())
    with pytest.raises(AutoparError, match="does not save") as refusal:
        accelerator.save_state("folder")
    assert "Checkpoints" in refusal.value.remedy
    with pytest.raises(AutoparError, match="not those of a prepared compiled module"):
        accelerator.clip_grad_norm_(Tagger().parameters(), 1.0)


@pytest.mark.parametrize("name", LEAST)
def test_error_for_a_missing_or_old_library_states_the_install_command(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert library(name, "this test").__name__ == name
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.9.1")
    with pytest.raises(
        AutoparError, match=rf"needs {name} {LEAST[name]} or newer, but 0\.9\.1 is installed"
    ) as old:
        library(name, "this test")

    def raise_not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", raise_not_found)
    with pytest.raises(
        AutoparError, match=f"this test needs {name}, which is not installed"
    ) as missing:
        library(name, "this test")
    extra = "lightning" if name == "lightning" else "train"
    assert f"pip install '{name}>={LEAST[name]}'" in old.value.remedy == missing.value.remedy
    assert f"'autopar[{extra}]'" in old.value.remedy


def test_error_names_the_library_that_the_trainer_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.1")
    with pytest.raises(AutoparError, match=r"autopar\.Trainer needs accelerate"):
        _ = autopar.Trainer
    with pytest.raises(AttributeError, match="no attribute 'Trainers'"):
        _ = autopar.Trainers


def test_accelerator_gathers_metrics_and_prints_on_one_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    accelerator = autopar.Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(7)), batch_size=4))
    gathered = [accelerator.gather_for_metrics((batch.sum(), torch.ones(4))) for batch in loader]
    assert [[tuple(x.shape) for x in each] for each in gathered] == [[(), (4,)], [(), (3,)]]
    accelerator.print("here")
    accelerator.on_main_process(print)("and here")
    assert capsys.readouterr().out == "here\nand here\n"
