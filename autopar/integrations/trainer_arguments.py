"""Arguments of transformers' `Trainer` that a compiled module implements differently or not at all.
They are rejected with a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.runtime.launchers import find_launch
from autopar.runtime.parameter_module import Holder

# State per parameter, as in planning: optimizers of torch that were checked on distributed
# parameters (`autopar.runtime.optimizers`).
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "sgd": "sgd",
    "adagrad": "momentum",
    "rmsprop": "momentum",
}

_CONSTRAINTS = (
    "omit it: the planner chooses how the model is split; use compile_options={'constraints': "
    "[...]} to influence it"
)
_RECOMPUTES = (
    "omit it: the planner chooses what is recomputed, within compile_options={'memory_bytes': ...}"
)
_HOOKS = "omit it: it adds its own hooks or kernels to the model, which is a single program"
_FULL_EVAL = (
    "omit it, and evaluate in the precision of training: bf16=True or fp16=True, or "
    "compile_options={'precision': 'bf16'}"
)

# Argument → whether it is requested, and what to do.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fsdp": (bool, _CONSTRAINTS),
    "deepspeed": (bool, _CONSTRAINTS),
    "parallelism_config": (bool, _CONSTRAINTS),
    "activation_checkpointing": (bool, _RECOMPUTES),
    "gradient_checkpointing": (bool, _RECOMPUTES),
    "fp16_full_eval": (bool, _FULL_EVAL),
    "bf16_full_eval": (bool, _FULL_EVAL),
    "torch_compile": (bool, "omit it, and pass compile_options={'backend': 'inductor'}"),
    "neftune_noise_alpha": (lambda value: value is not None, _HOOKS),
    "use_liger_kernel": (bool, _HOOKS),
    "debug": (bool, _HOOKS),
    "auto_find_batch_size": (
        bool,
        ("set per_device_train_batch_size; `autopar plan` predicts the memory that it needs"),
    ),
    "predict_with_generate": (bool, "omit it: compiled modules do not generate"),
    "push_to_hub": (bool, "omit it, and upload what trainer.save_model wrote"),
    "save_on_each_node": (bool, "save into a folder that all machines share"),
    "enable_jit_checkpoint": (
        bool,
        ("set save_strategy: ranks that stop at different steps would wait for each other"),
    ),
    "train_sampling_strategy": (
        lambda value: value == "batch_rebalance",
        "omit it: it gives each rank different samples",
    ),
}


def check_arguments(args: Any) -> None:
    """Check that a compiled module supports all training arguments.

    Raises:
        AutoparError: for the first argument that it does not support.
    """
    for name, (asked, remedy) in _REFUSED.items():
        value = getattr(args, name, None)
        if asked(value):
            raise AutoparError(f"autopar.Trainer does not support {name}={value!r}", remedy=remedy)
    if args.n_gpu > 1:
        launch = find_launch(os.environ)
        if launch is not None:
            message = (
                f"accelerate does not know that {launch.launcher.name} started {launch.world_size}"
                " processes, so each would use all GPUs of its machine"
            )
            remedy = f"start the script with `{launch.launcher.name} ... autopar run SCRIPT`"
            raise AutoparError(message, remedy=remedy)
        message = (
            f"this machine has {args.n_gpu} GPUs, but only one process was started, which would "
            "use one of them"
        )
        remedy = (
            "start the script with `autopar run -n COUNT`, or select one GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
        raise AutoparError(message, remedy=remedy)


def check_inputs(model: Any, given: dict[str, Any]) -> None:
    """Check that the trainer receives no arguments that it cannot use.

    Args:
        model: the first argument of the trainer.
        given: its other arguments by name.

    Raises:
        AutoparError: if it does.
    """
    if given.get("model_init") is not None:
        raise AutoparError(
            "autopar.Trainer does not support model_init", remedy="pass the model itself: model=..."
        )
    if not isinstance(model, nn.Module):
        raise AutoparError(
            f"model={type(model).__name__} is not a model", remedy="pass a torch.nn.Module"
        )
    if isinstance(model, Holder) or isinstance(model._modules.get("module"), Holder):
        remedy = (
            "pass the plain model, and the arguments of autopar.compile as mesh= and "
            "compile_options={...}"
        )
        raise AutoparError(
            "autopar.Trainer compiles the model itself, but this model is already compiled",
            remedy=remedy,
        )
    if any(p.is_meta for p in model.parameters()):
        remedy = (
            "load its weights with from_pretrained(folder); trainer.save_model writes the "
            "weights of a trained model"
        )
        raise AutoparError("the model's weights are on meta", remedy=remedy)
    if any(each is not None for each in given.get("optimizers", ())):
        remedy = (
            "pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or override "
            "create_optimizer to build it from self.compiled().parameters(), and "
            "create_scheduler"
        )
        raise AutoparError(
            "an optimizer of the plain model's parameters would train nothing", remedy=remedy
        )


def check_optimizer(args: Any, given: dict[str, Any]) -> None:
    """Check that the requested optimizer works with distributed parameters.

    Raises:
        AutoparError: if this is not known.
    """
    name = getattr(args.optim, "value", args.optim)
    if given.get("optimizer_cls_and_kwargs") is None and name not in OPTIMIZERS:
        remedy = f"use one of {', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs="
        raise AutoparError(
            f"optim={name!r} was not tested with distributed parameters",
            remedy=remedy,
        )
