"""Find out how a training loop calls a model by running a step, up to the call, with a stand-in for
the model.

Compiling needs the shapes of a batch before the first step. Only the loop knows which parts of a
batch it passes, and how.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class _Call(Exception):
    """Carries the arguments of a call of the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the model is called")
        self.args, self.kwargs = args, kwargs


class _Called(nn.Module):
    """A stand-in for the model with its parameters and all attributes. Calling it raises
    `_Call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)
        self._parameters = dict(model.named_parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the arguments as `_Call`."""
        raise _Call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def first_call(model: nn.Module, step: Callable[[nn.Module], object]) -> Any:
    """Return the arguments with which a step first calls the model, in the form of `example_inputs`
    of `autopar.compile`; None if the step does not call the model.

    Args:
        model: the plain model.
        step: runs with the stand-in for the model up to its call; its other errors are passed on.
    """
    try:
        step(_Called(model))
    except _Call as call:
        if call.args and call.kwargs:
            return _by_name(model, call.args, call.kwargs)
        return call.args if call.args else call.kwargs
    return None


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs).arguments
    rest = next(
        (name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), ""
    )
    return {name: x for name, x in bound.items() if name != rest} | bound.get(rest, {})


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the state of random generators when the context ends."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def may_be_read_once(data: Any, num_workers: int) -> bool:
    """Return whether reading a sample may consume it: the data yields samples one after another in
    this process."""
    if isinstance(data, IterableDataset):
        return not type(data).__module__.startswith("datasets.") and num_workers == 0
    return hasattr(data, "__next__")


def peek_batch(loader: Any) -> Any:
    """Return a loader's first batch without consuming it; None if there is none.

    Samplers and their generators are copied. If the loader has workers, the data is read in a
    separate one.

    Raises:
        ValueError: if the data might not be readable again.
    """
    data = getattr(loader, "dataset", loader)
    if may_be_read_once(data, getattr(loader, "num_workers", 0)):
        raise ValueError("the data yields samples one after another, perhaps only once")
    if not isinstance(loader, DataLoader):
        return next(iter(loader), None)
    asked: dict[str, Any] = {"batch_size": loader.batch_size}
    if not isinstance(data, IterableDataset):
        has_batch_sampler = loader.batch_sampler is not None
        chosen = next(
            iter(
                copy.deepcopy(
                    loader.batch_sampler if has_batch_sampler else loader.sampler, {id(data): data}
                )
            ),
            None,
        )
        if chosen is None:
            return None
        asked = (
            {"batch_sampler": [chosen]}
            if has_batch_sampler
            else {"sampler": [chosen], "batch_size": None}
        )
    alone = DataLoader(
        data,
        **asked,
        num_workers=min(loader.num_workers, 1),
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    return next(iter(alone), None)
