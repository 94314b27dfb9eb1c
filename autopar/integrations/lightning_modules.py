"""Find the child of a LightningModule to compile and how its steps call it. Reject settings of
Lightning that a compiled module does not support.

The call is found with copies of the LightningModule and of the first batch, so that a run counts,
draws and changes the same as without this search.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import lightning.pytorch.callbacks as callbacks
import torchmetrics
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

from autopar.errors import RuntimeStateError, size_text
from autopar.integrations.first_call import first_call, peek_batch
from autopar.runtime.parameter_module import Holder

log = logging.getLogger("autopar")
_AVERAGED = (
    "average saved checkpoints, or p.to_local() of the compiled module's parameters in a custom "
    "hook"
)
_REFUSED: tuple[tuple[type, str], ...] = (
    (callbacks.StochasticWeightAveraging, _AVERAGED),
    (callbacks.WeightAveraging, _AVERAGED),
    (
        callbacks.BaseFinetuning,
        "freeze and unfreeze, with requires_grad_ in a hook, parameters that were trainable when "
        "the module was compiled",
    ),
    (callbacks.BatchSizeFinder, "`autopar plan` predicts the memory of a batch"),
    (
        callbacks.LearningRateFinder,
        "search for the learning rate on one process, with the plain model",
    ),
)


def child_to_compile(module: nn.Module) -> str:
    """Return the name of the only child that has parameters or, if several have, of the only one
    with trained parameters.

    Raises:
        RuntimeStateError: if there is no such child.
    """
    parameters_of = {
        name: list(child.parameters())
        for name, child in module.named_children()
        if next(child.parameters(), None) is not None
    }
    trained = [
        name
        for name, parameters in parameters_of.items()
        if any(p.requires_grad for p in parameters)
    ]
    own_parameters = [
        name for name, parameter in module._parameters.items() if parameter is not None
    ]
    candidates = trained if trained or own_parameters else list(parameters_of)
    if len(candidates) == 1 and not own_parameters:
        if other_children := {
            name: parameters for name, parameters in parameters_of.items() if name != candidates[0]
        }:
            size = size_text(
                sum(p.nbytes for parameters in other_children.values() for p in parameters)
            )
            log.warning(
                "%s is not compiled: every rank holds and computes all of it, with %s of frozen "
                "parameters",
                ", ".join(other_children),
                size,
            )
        return candidates[0]
    names = [*candidates, *own_parameters]
    message = (
        f"{type(module).__name__} has parameters in {', '.join(names)}"
        if names
        else f"{type(module).__name__} has no parameters"
    )
    remedy = (
        "move the trained modules into a single nn.Module, a child that the steps call; it will "
        "be compiled"
    )
    raise RuntimeStateError(message, remedy=remedy)


def call_of(module: Any, name: str, step: str, loaders: Any, prepared: Callable[[Any], Any]) -> Any:
    """Return the arguments with which a step calls a child on the first batch, in the form of
    example inputs of `autopar.compile`.

    Args:
        module: the LightningModule.
        name: name of the child.
        step: name of a method of the module.
        loaders: the loaders, as Lightning accepts them.
        prepared: converts a batch as Lightning does for steps.

    Raises:
        RuntimeStateError: if the arguments cannot be determined before the run.
    """
    remedy = (
        f"pass LightningStrategy(example_inputs=...), a batch as passed to {name}, so that the "
        "step is not run in advance"
    )
    try:
        batch = _first_batch(loaders, in_turn=step != "training_step")
    except ValueError as error:
        raise RuntimeStateError(
            f"{error}: no batch is read before the run", remedy=remedy
        ) from error
    if batch is None:
        raise RuntimeStateError("the data has no batch", remedy=remedy)
    batch = prepared(tree_map_only(Tensor, Tensor.clone, batch))

    def try_step(stand_in: nn.Module) -> None:
        """Run the step on the first batch, with a stand-in for the child."""
        run = getattr(_trial(module, name, stand_in), step)
        run(batch, *_indices(run))

    try:
        child_call = first_call(getattr(module, name), try_step)
    except Exception as error:  # a step may raise anything outside a run
        message = (
            f"{step} was run on the first batch and failed before it called {name}: "
            f"{type(error).__name__}: {error}"
        )
        raise RuntimeStateError(message, remedy=remedy) from error
    if child_call is None:
        message = f"{step} does not call {name} directly"
        raise RuntimeStateError(
            message,
            remedy=(
                f"move the other methods of {name} that the step calls into its forward; or "
                f"{remedy}"
            ),
        )
    return child_call


def _first_batch(loaders: Any, *, in_turn: bool) -> Any:
    combined = (
        loaders
        if isinstance(loaders, CombinedLoader)
        else CombinedLoader(loaders, "sequential" if in_turn else "max_size_cycle")
    )
    if in_turn:
        return peek_batch(combined.flattened[0])
    together = CombinedLoader(combined.iterables, "max_size_cycle")
    read = [peek_batch(each) for each in together.flattened]
    if any(each is None for each in read):
        return None
    together.flattened = [[each] for each in read]
    return next(iter(together))[0]


def _trial(module: Any, name: str, stand_in: nn.Module) -> Any:
    """Return a copy of the module with another child. The copy logs nothing, and its optimizers do
    nothing.
    """
    shared = (*module.parameters(), *(x for x in vars(module).values() if isinstance(x, Dataset)))
    trial = copy.deepcopy(
        module, {id(getattr(module, name)): stand_in, **{id(x): x for x in shared}}
    )
    trial._trainer = module._trainer  # omitted by copying
    for attribute in (
        "log",
        "log_dict",
        "optimizers",
        "lr_schedulers",
        "toggle_optimizer",
        "untoggle_optimizer",
    ):
        setattr(trial, attribute, MagicMock())
    return trial


def _indices(step: Callable[..., Any]) -> tuple[int, ...]:
    """Return what a step takes after the batch: zeros for those of batch_idx and dataloader_idx
    that have no default."""
    step_parameters = list(inspect.signature(step).parameters.values())[1:]
    return (0,) * sum(
        each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        for each in step_parameters
    )


def check_trainer(trainer: Any, module: Any) -> None:
    """Check that a compiled module can serve the trainer's precision and callbacks.

    Raises:
        RuntimeStateError: if it cannot.
    """
    plugin = trainer.precision_plugin
    halved = isinstance(plugin, HalfPrecision) and plugin.precision != "bf16-true"
    if halved or type(plugin) not in (Precision, MixedPrecision, HalfPrecision, DoublePrecision):
        message = f"autopar.LightningStrategy does not support precision={plugin.precision!r}"
        raise RuntimeStateError(
            message,
            remedy='pass precision="16-mixed", "bf16-mixed", "bf16-true", "32-true" or "64-true"',
        )
    for callback in trainer.callbacks:
        for kind, remedy in _REFUSED:
            if isinstance(callback, kind):
                raise RuntimeStateError(
                    f"autopar.LightningStrategy does not support {type(callback).__name__}",
                    remedy=remedy,
                )
    if module.example_input_array is not None:
        module.example_input_array = None
        log.warning(
            "example_input_array is ignored: summaries and graphs would run a part of a compiled "
            "module"
        )


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Check that there is a single optimizer.

    Raises:
        RuntimeStateError: if there are several.
    """
    if len(optimizers) > 1:
        message = f"configure_optimizers returned {len(optimizers)} optimizers"
        raise RuntimeStateError(
            message, remedy="return one optimizer, with a parameter group per setting"
        )


def count_once() -> None:
    """Make all metrics of torchmetrics count each batch once, for the rest of this process.

    By default they sum over the processes of a process group, but here every process sees the same
    batch.
    """
    torchmetrics.Metric.sync = _seen_by_all  # type: ignore[method-assign, assignment]


def _seen_by_all(metric: torchmetrics.Metric, *args: Any, **kwargs: Any) -> None:
    """Keep a metric's own state instead of a sum over processes: every rank has seen everything."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was returned by `autopar.compile`."""
    return isinstance(module, Holder) or isinstance(module._modules.get("module"), Holder)
