"""Programs for the remedies of transformers' Trainer, accelerate and peft."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

import autopar
from autopar.integrations.pretrained import names_saved
from tests.support.remedy_programs import Program

_OPTIONS = {"hardware": "cpu-gloo"}
_LORA: dict[str, Any] = {"r": 2, "target_modules": ["head"], "init_lora_weights": False}


def _shared() -> Any:
    """Return the models and data of the tests of training. Importing their libraries takes
    seconds."""
    from tests.support import trained

    return trained


class Stream(IterableDataset[Any]):
    """A stream of samples that can be read once."""

    def __iter__(self) -> Iterator[Any]:
        return iter(_shared().samples(8, 1))


def _batch() -> Any:
    return default_collate(_shared().samples(4, 1))


def _in_folder(work: Callable[[str], object]) -> Callable[[], object]:
    def program() -> object:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(folder)

    return program


def _trainer(
    folder: str,
    *,
    kind: Any = None,
    options: dict[str, Any] | None = None,
    set_to: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """Return a Trainer of a small model for one step.

    Args:
        kind: the class of the trainer.
        options: additional options of `autopar.compile`.
        set_to: training arguments that are set afterwards.
    """
    shared = _shared()
    args = shared.settings(folder, max_steps=1, gradient_accumulation_steps=1)
    for name, value in (set_to or {}).items():
        setattr(args, name, value)
    usual = {
        "model": None if "model_init" in given else shared.Tagger(),
        "train_dataset": shared.samples(8, 1),
    }
    compile_options = {**_OPTIONS, **(options or {})}
    return (kind or autopar.Trainer)(
        args=args, **{**usual, **given}, compile_options=compile_options
    )


def build_trainer(**how: Any) -> Callable[[], object]:
    return _in_folder(lambda folder: _trainer(folder, **how))


def _train_after(*changes: Callable[[Any], object], **how: Any) -> Callable[[], object]:
    """Train after changes of the compiled objects."""

    def work(folder: str) -> object:
        trainer = _trainer(folder, **how)
        if changes:
            trainer.compiled()
        for change in changes:
            change(trainer)
        return trainer.train()

    return _in_folder(work)


def _replace_argument(
    name: str, value: Any, **instead: Any
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a program with a training argument and one with its replacement."""
    return build_trainer(set_to={name: value}), build_trainer(**instead)


def _pass_compiled(folder: str) -> object:
    return _trainer(
        folder, model=autopar.compile(_shared().Tagger(), example_inputs=_batch(), **_OPTIONS)
    )


def _of_samples(count: int, **arguments: Any) -> Callable[[], object]:
    """Compile a trainer with so few samples that there may be no full batch."""

    def work(folder: str) -> object:
        set_to = {"dataloader_drop_last": True, **arguments}
        return _trainer(folder, train_dataset=_shared().samples(count, 1), set_to=set_to).compiled()

    return _in_folder(work)


def _aside(uses_argument: bool) -> Callable[[], object]:
    """Compile a trainer whose loss uses its own attribute or the model that it is given."""

    def work(folder: str) -> object:
        class Aside(autopar.Trainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                return (model if uses_argument else self.model)(**inputs)["loss"]

        return _trainer(folder, kind=Aside).compiled()

    return _in_folder(work)


def _predict(**how: Any) -> Callable[[], object]:
    options = {"outputs": "loss", **how.pop("options", {})}
    return _in_folder(
        lambda folder: _trainer(folder, options=options, **how).predict(_shared().samples(8, 2))
    )


def _resume(folder: str) -> object:
    """Resume from a folder with weights but without an optimizer state."""
    trainer = _trainer(folder)
    trainer.save_model(f"{folder}/checkpoint-1")
    return trainer._load_optimizer_and_scheduler(f"{folder}/checkpoint-1")


def _by_another(folder: str) -> object:
    """Build a trainer as if accelerate had been launched with FSDP."""
    import transformers

    plain = transformers.Trainer.create_accelerator_and_postprocess

    def patched(self: Any) -> None:
        plain(self)
        self.is_fsdp_enabled = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", patched)
        return _trainer(folder)


@contextlib.contextmanager
def _accelerator(**how: Any) -> Iterator[Any]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        yield autopar.Accelerator(cpu=True, **how)
    finally:
        AcceleratorState._reset_state(True)


def _tagger(**options: Any) -> Any:
    return autopar.compile(_shared().Tagger(), example_inputs=_batch(), **{**_OPTIONS, **options})


def _with_accelerator(
    work: Callable[[Any], object] = lambda accelerator: None, **how: Any
) -> Callable[[], object]:
    def program(folder: str) -> object:
        with _accelerator(**how) as accelerator:
            return work(accelerator)

    return _in_folder(program)


def _within_autocast(accelerator: Any) -> object:
    with accelerator.autocast():
        module = _tagger()
    return accelerator.prepare(module)


def _clip(accelerator: Any, all_of_them: bool) -> object:
    module = accelerator.prepare(_tagger())
    module(**_batch())["loss"].backward()
    return accelerator.clip_grad_norm_(
        list(module.parameters())[slice(None if all_of_them else 1)], 1.0
    )


def _save(folder: str) -> object:
    return autopar.Checkpoints(folder).save(1, _tagger())


def _with_adapter(work: Callable[[Any, Any, Path], object]) -> Callable[[], object]:
    """Run `work` on a compiled model with an adapter, the plain model, and a folder."""

    def program(folder: str) -> object:
        plain = _shared().adapted_tagger()
        module = autopar.compile(plain, example_inputs=_batch(), **_OPTIONS)
        return work(module, plain, Path(folder))

    return _in_folder(program)


def _load_adapter(r: int) -> Callable[[], object]:
    """Load an adapter of rank `r` into a model with an adapter of rank 2."""

    def work(module: Any, plain: Any, folder: Path) -> object:
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng([]):
            settings = {**_LORA, **({"modules_to_save": ["norm"]} if r > 2 else {})}
            get_peft_model(_shared().Tagger(), LoraConfig(**settings)).save_pretrained(str(folder))
        return autopar.load_adapter(module, plain, folder)

    return _with_adapter(work)


def _active(*names: str) -> Callable[[], object]:
    """Save an adapter, and load it while the named adapters are active."""

    def work(module: Any, plain: Any, folder: Path) -> object:
        from peft import LoraConfig

        autopar.save_pretrained(module, plain, folder)
        plain.add_adapter("other", LoraConfig(**_LORA))
        plain.base_model.set_adapter(list(names))
        if len(names) > 1:
            return autopar.load_adapter(module, plain, folder)
        plain.set_adapter(names[0])
        return autopar.load_adapter(module, plain, folder)

    return _with_adapter(work)


def _prompts(work: Callable[[Any, str], object]) -> Callable[[], object]:
    """Run `work` on a model with trainable prompts."""

    def program(folder: str) -> object:
        from peft import PromptTuningConfig, get_peft_model

        plain = get_peft_model(
            _shared().base(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        )
        return work(plain, folder)

    return _in_folder(program)


def _arguments() -> dict[str, Program]:
    """Return the programs of training arguments that are refused, with their remedies."""
    constraint, backend = [autopar.constraints.fsdp()], {"backend": "inductor"}
    by_name = {
        "fsdp": (
            True,
            "compile_options={'constraints': [...]}",
            {"options": {"constraints": constraint}},
        ),
        "gradient_checkpointing": (
            True,
            "compile_options={'memory_bytes': ...}",
            {"options": {"memory_bytes": 2**30}},
        ),
        "bf16_full_eval": (
            True,
            "compile_options={'precision': 'bf16'}",
            {"options": {"precision": "bf16"}},
        ),
        "torch_compile": (True, "compile_options={'backend': 'inductor'}", {"options": backend}),
        "neftune_noise_alpha": (5.0, "omit it", {}),
        "auto_find_batch_size": (
            True,
            "set per_device_train_batch_size",
            {"set_to": {"per_device_train_batch_size": 4}},
        ),
        "push_to_hub": (True, "upload what trainer.save_model wrote", {}),
        "enable_jit_checkpoint": (
            True,
            "set save_strategy",
            {"set_to": {"save_strategy": "steps"}},
        ),
    }
    programs = {}
    for name, (value, says, instead) in by_name.items():
        refused, followed = _replace_argument(name, value, **instead)
        programs[f"integrations/trainer_arguments.py check_arguments 0 | {name}"] = Program(
            refused, says, followed
        )
    return programs


TRAINER: dict[str, Program] = {
    **_arguments(),
    "integrations/trainer_arguments.py check_arguments 2": Program(
        build_trainer(set_to={"_n_gpu": 4}),
        "select one GPU with CUDA_VISIBLE_DEVICES",
        build_trainer(set_to={"_n_gpu": 1}),
    ),
    "integrations/trainer_arguments.py check_inputs 0": Program(
        build_trainer(model_init=lambda: _shared().Tagger()),
        "pass the model itself: model=...",
        build_trainer(),
    ),
    "integrations/trainer_arguments.py check_inputs 1": Program(
        build_trainer(model="gpt2"), "pass a torch.nn.Module", build_trainer()
    ),
    "integrations/trainer_arguments.py check_inputs 2": Program(
        _in_folder(_pass_compiled), "as mesh= and compile_options={...}", build_trainer(mesh=1)
    ),
    "integrations/trainer_arguments.py check_inputs 3": Program(
        _in_folder(lambda folder: _trainer(folder, model=_shared().Tagger().to("meta"))),
        "load its weights",
        build_trainer(),
    ),
    "integrations/trainer_arguments.py check_inputs 4": Program(
        build_trainer(optimizers=(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), None)),
        "pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {...})",
        _train_after(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 0.1})),
    ),
    "integrations/trainer_arguments.py check_optimizer 0": Program(
        build_trainer(set_to={"optim": "adamw_bnb_8bit"}),
        "use one of adamw_torch",
        build_trainer(set_to={"optim": "sgd"}),
    ),
    "integrations/trainer.py Trainer.create_accelerator_and_postprocess 0": Program(
        _in_folder(_by_another),
        "start the script with `autopar run -n COUNT`, or with torchrun",
        build_trainer(),
    ),
    "integrations/trainer.py Trainer._first_call 0": Program(
        _of_samples(2),
        "pass a dataset with at least one batch",
        _of_samples(8),
    ),
    "integrations/trainer.py Trainer._first_call 0 | smaller": Program(
        _of_samples(2),
        "or omit dataloader_drop_last",
        _of_samples(2, dataloader_drop_last=False),
    ),
    "integrations/trainer.py Trainer._first_call 1": Program(
        _aside(False), "call its argument `model`, not self.model", _aside(True)
    ),
    "integrations/trainer.py Trainer._check_read_twice 0": Program(
        _train_after(train_dataset=Stream()),
        "pass example_inputs=",
        _in_folder(
            lambda folder: _trainer(folder, train_dataset=Stream(), example_inputs=_batch()).train()
        ),
    ),
    "integrations/trainer.py Trainer.prediction_step 0": Program(
        _predict(),
        'pass compile_options={"outputs": "full"}',
        _predict(options={"outputs": "full"}),
    ),
    "integrations/trainer.py Trainer.prediction_step 0 | loss": Program(
        _predict(),
        "or set prediction_loss_only=True",
        _predict(set_to={"prediction_loss_only": True}),
    ),
    "integrations/trainer.py Trainer._load_optimizer_and_scheduler 0": Program(
        _in_folder(_resume), "and train() without resume_from_checkpoint", _train_after()
    ),
    "integrations/trainer.py TrainerPlainModel.check 0": Program(
        _train_after(lambda trainer: setattr(trainer, "model", _shared().Tagger())),
        "create a new Trainer for it",
        _train_after(),
    ),
    "integrations/trainer.py TrainerPlainModel.check 1": Program(
        _train_after(
            lambda trainer: trainer.model.load_state_dict(
                _shared().Tagger().state_dict(), assign=True
            )
        ),
        "write the parameter of the same name of trainer.compiled()",
        _train_after(
            lambda trainer: trainer.compiled().load_state_dict(_shared().Tagger().state_dict())
        ),
    ),
    "integrations/trainer.py TrainerPlainModel.check 2": Program(
        _train_after(lambda trainer: trainer.model.head.requires_grad_(False)),
        "freeze before the first train() or evaluate()",
        _in_folder(
            lambda folder: (
                made := _trainer(folder),
                made.model.head.requires_grad_(False),
                made.train(),
            )
        ),
    ),
}

ACCELERATE: dict[str, Program] = {
    "integrations/accelerator.py Accelerator.__init__ 0": Program(
        _with_accelerator(fsdp_plugin=SimpleNamespace()), "omit it", _with_accelerator()
    ),
    "integrations/accelerator.py _check_precision 0": Program(
        _with_accelerator(mixed_precision="fp8"),
        '"bf16", "fp16" or "no"',
        _with_accelerator(mixed_precision="bf16"),
    ),
    "integrations/accelerator.py Accelerator._prepare_autocast 0": Program(
        _with_accelerator(
            lambda accelerator: accelerator.prepare(_tagger()), mixed_precision="bf16"
        ),
        "compile it under `with accelerator.autocast():`",
        _with_accelerator(_within_autocast, mixed_precision="bf16"),
    ),
    "integrations/accelerator.py Accelerator._prepare_autocast 0 | precision": Program(
        _with_accelerator(
            lambda accelerator: accelerator.prepare(_tagger()), mixed_precision="bf16"
        ),
        'or with precision="bf16"',
        _with_accelerator(
            lambda accelerator: accelerator.prepare(_tagger(precision="bf16")),
            mixed_precision="bf16",
        ),
    ),
    "integrations/accelerator.py Accelerator.clip_grad_norm_ 0": Program(
        _with_accelerator(lambda accelerator: _clip(accelerator, False)),
        "pass all of pm.parameters()",
        _with_accelerator(lambda accelerator: _clip(accelerator, True)),
    ),
    "integrations/accelerator.py Accelerator.save_state 0": Program(
        _with_accelerator(lambda accelerator: accelerator.save_state("folder")),
        "autopar.Checkpoints(folder)",
        _in_folder(_save),
    ),
    "integrations/accelerator.py check_scaled 0": Program(
        _with_accelerator(
            lambda accelerator: accelerator.prepare(_tagger(precision="fp16", hardware="h100-sxm"))
        ),
        'precision="bf16" to autopar.compile',
        _with_accelerator(
            lambda accelerator: accelerator.prepare(_tagger(precision="bf16", hardware="h100-sxm"))
        ),
    ),
}

ADAPTERS: dict[str, Program] = {
    "integrations/pretrained.py save_pretrained 0": Program(
        _in_folder(lambda folder: autopar.save_pretrained(_tagger(), _shared().Tagger(), folder)),
        "write only the weights with autopar.save_weights",
        _in_folder(lambda folder: autopar.save_weights(_tagger(), folder)),
    ),
    "integrations/pretrained.py load_adapter 0": Program(
        _in_folder(lambda folder: autopar.load_adapter(_tagger(), _shared().Tagger(), folder)),
        "pass the result of get_peft_model",
        _load_adapter(2),
    ),
    "integrations/pretrained.py _active 0": Program(
        _active("default", "other"), "model.set_adapter(name)", _active("default")
    ),
    "integrations/pretrained.py _keys 0": Program(
        _prompts(lambda plain, folder: names_saved(plain)),
        "autopar.save_weights and load_weights",
        _prompts(
            lambda plain, folder: autopar.save_weights(
                autopar.compile(plain, example_inputs=_batch(), **_OPTIONS), folder
            )
        ),
    ),
    "integrations/pretrained.py _match_keys 0": Program(
        _with_adapter(autopar.load_adapter),
        "pass the folder that contains adapter_model.safetensors",
        _load_adapter(2),
    ),
    "integrations/pretrained.py _match_keys 1": Program(
        _load_adapter(4), "with the configuration of that adapter", _load_adapter(2)
    ),
}

PROGRAMS: dict[str, Program] = {**TRAINER, **ACCELERATE, **ADAPTERS}
