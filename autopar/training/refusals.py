"""What transformers' `TrainingArguments` may ask for that a compiled module does in another way, or not: refused, with what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.run.holder import Holder

# Their state per parameter, as planning has it: torch's optimizers that were checked on distributed parameters (`autopar.run.optimizers`).
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd", "adagrad": "momentum", "rmsprop": "momentum"}

_CONSTRAINTS = "leave it out: how the model is split is the planner's choice, or that of compile_options={'constraints': [...]}"
_RECOMPUTES = "leave it out: what is run again is the planner's choice, under compile_options={'memory_bytes': ...}"
_HOOKS = "leave it out: it puts hooks or kernels of its own into the model, which is one program"
_FULL_EVAL = "leave it out, and evaluate as it is trained: bf16=True or fp16=True, or compile_options={'precision': 'bf16'}"

# Argument → whether it is asked for, and what to do.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "fsdp": (bool, _CONSTRAINTS),
    "deepspeed": (bool, _CONSTRAINTS),
    "parallelism_config": (bool, _CONSTRAINTS),
    "activation_checkpointing": (bool, _RECOMPUTES),
    "gradient_checkpointing": (bool, _RECOMPUTES),
    "fp16_full_eval": (bool, _FULL_EVAL),
    "bf16_full_eval": (bool, _FULL_EVAL),
    "torch_compile": (bool, "leave it out, and pass compile_options={'backend': 'inductor'}"),
    "neftune_noise_alpha": (lambda value: value is not None, _HOOKS),
    "use_liger_kernel": (bool, _HOOKS),
    "debug": (bool, _HOOKS),
    "auto_find_batch_size": (bool, "set per_device_train_batch_size: the plan says beforehand what memory it takes (autopar plan)"),
    "predict_with_generate": (bool, "leave it out: compiled modules do not generate"),
    "push_to_hub": (bool, "leave it out, and upload what trainer.save_model wrote"),
    "save_on_each_node": (bool, "save into a folder that all machines share"),
    "enable_jit_checkpoint": (bool, "set save_strategy: ranks that are told to stop at different steps would wait for each other"),
    "train_sampling_strategy": (lambda value: value == "batch_rebalance", "leave it out: it gives each rank samples of its own"),
}


def check_arguments(args: Any) -> None:
    """Raises AutoparError on the first argument that cannot be served."""
    for name, (asked, remedy) in _REFUSED.items():
        value = getattr(args, name, None)
        if asked(value):
            raise AutoparError(f"autopar.Trainer does not take {name}={value!r}", remedy=remedy)
    if args.n_gpu > 1:
        what = f"{args.n_gpu} GPUs are here and one process, which would use one of them"
        raise AutoparError(what, remedy="start the script by `autopar run -n COUNT`, or name one GPU in CUDA_VISIBLE_DEVICES")


def check_inputs(model: Any, given: dict[str, Any]) -> None:
    """Raises AutoparError where the trainer is given what it cannot use.

    Args:
        given: its other arguments by name.
    """
    if given.get("model_init") is not None:
        raise AutoparError("autopar.Trainer does not take model_init", remedy="pass the model itself: model=...")
    if not isinstance(model, nn.Module):
        raise AutoparError(f"model={type(model).__name__} is no model", remedy="pass a torch.nn.Module")
    if isinstance(model, Holder) or isinstance(model._modules.get("module"), Holder):
        remedy = "pass the plain model, and what autopar.compile was given as mesh= and compile_options={...}"
        raise AutoparError("autopar.Trainer compiles the model itself, of which this is a compiled one", remedy=remedy)
    if any(p.is_meta for p in model.parameters()):
        remedy = "load its weights, from_pretrained(folder); a model that was trained has them where trainer.save_model wrote them"
        raise AutoparError("the model's weights are on meta", remedy=remedy)
    if any(each is not None for each in given.get("optimizers", ())):
        remedy = (
            "pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), or override create_optimizer, to build it of "
            "self.compiled().parameters(), and create_scheduler"
        )
        raise AutoparError("an optimizer of the plain model's parameters would train nothing", remedy=remedy)


def check_optimizer(args: Any, given: dict[str, Any]) -> None:
    """Raises AutoparError on an optimizer of which it is not known that it works on distributed parameters."""
    name = getattr(args.optim, "value", args.optim)
    if given.get("optimizer_cls_and_kwargs") is None and name not in OPTIMIZERS:
        remedy = f"use one of {', '.join(OPTIMIZERS)}, or pass optimizer_cls_and_kwargs="
        raise AutoparError(f"autopar.Trainer does not know whether optim={name!r} works on distributed parameters", remedy=remedy)
