"""Is a shortened model the full model without some of its units? One eager forward of each, on fake tensors.

What decides about backward and is no op is compared too: whether gradients are recorded, which operands require them, and
calls of the user's own autograd functions. Hooks on tensors, which only backward runs, are refused in the layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopar.capture._torch.preparing import Prepared
from autopar.capture.folding.entries import NotFoldable, Story
from autopar.capture.folding.runs import KEPT_FIRST, KEPT_LAST, Run
from autopar.capture.folding.stream import Follower, Layer, Recorder, Stream, places, tag_inputs, tag_weights
from autopar.capture.trees import leaves_of


def tell(model: nn.Module, prepared: Prepared, runs: Sequence[Run], layers: Mapping[nn.Module, Layer]) -> Story:
    """The story of the shortened model, which has these layers.

    Raises:
        NotFoldable: its forward fails, or does not call the layers in turn.
    """
    recorder = Recorder(runs, layers, [KEPT_FIRST + KEPT_LAST] * len(runs), prepared.mode)
    recorder.story.results = _run(model, prepared, recorder, "the shortened model")
    return recorder.story


def compare(story: Story, model: nn.Module, prepared: Prepared, runs: Sequence[Run]) -> None:
    """Check that the full model tells the same story, its interior units all that of the shortened model's.

    Raises:
        NotFoldable: it does not; says where it differs.
    """
    layers = dict(places(runs, model))
    follower = Follower(story, runs, layers, [run.num_units for run in runs], prepared.mode)
    if _run(model, prepared, follower, "the model") != story.results:
        raise NotFoldable("what forward returns depends on the number of layers")


def tag(model: nn.Module, prepared: Prepared, runs: Sequence[Run]) -> None:
    """Name the full model's weights and the inputs, once for both forwards."""
    tag_weights(model, dict(places(runs, model)))
    tag_inputs(leaves_of((prepared.args, prepared.kwargs)))


def _run(model: nn.Module, prepared: Prepared, stream: Stream, name: str) -> tuple[Any, ...]:
    """What forward returns, described; everything else is in the stream."""
    try:
        with _watched(stream), prepared.mode, stream:
            args, kwargs = prepared.arguments_anew()
            results = model(*args, **kwargs)
        stream.finish()
        return tuple(stream.described(leaf, []) for leaf in leaves_of(results))
    except NotFoldable:
        raise
    except Exception as error:  # anything may be raised by a model that is cut, or that reads values of fake tensors
        if stream.refusal is not None:
            raise stream.refusal from error
        first = next(iter(str(error).splitlines()), "")
        raise NotFoldable(f"a forward of {name} without data fails: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def _watched(stream: Stream) -> Iterator[None]:
    """Tell the stream of layers and of the user's autograd functions; let the model know that it is traced."""
    layers: Mapping[nn.Module, Layer] = stream.layers

    def enter(module: nn.Module, _: Any) -> None:
        if module in layers:
            stream.enter(layers[module])

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if module in layers:
            stream.leave(layers[module])

    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        stream.event(("autograd function", cls), (args, kwargs))
        return plain.__get__(None, cls)(*args, **kwargs)

    def register_hook(*_: Any) -> Any:
        raise stream.refused("forward registers a hook on a tensor, which only backward would show")

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(mock.patch.object(torch.Tensor, "register_hook", register_hook))
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave).remove)
        yield


def order_of_calls(model: nn.Module, prepared: Prepared) -> dict[nn.Module, int]:
    """The number of the first call of each module that forward calls, as far as it goes with tensors that have no values."""
    order: dict[nn.Module, int] = {}

    def enter(module: nn.Module, _: Any) -> None:
        order.setdefault(module, len(order))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        stack.callback(register_module_forward_pre_hook(enter).remove)
        with contextlib.suppress(Exception):  # whatever a model raises of such tensors, the capture will tell
            prepared.run(model)
    return order
