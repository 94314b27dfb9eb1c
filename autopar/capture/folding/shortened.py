"""Capture a shortened model, after checking that the full model equals the shortened model with
units repeated."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from autopar.capture.diagnostics import ReadsInputs
from autopar.capture.dynamo.constants import known_values
from autopar.capture.dynamo.fakes import no_modes
from autopar.capture.dynamo.joint import RawJoint, raw_joint
from autopar.capture.dynamo.preparing import Prepared
from autopar.capture.folding.repeating import renumber_path, repeat_attributes
from autopar.capture.folding.runs import (
    DEPTH,
    HOOKS,
    INTERNAL,
    KEPT_FIRST,
    KEPT_LAST,
    Order,
    Run,
    contents,
    find_runs,
)
from autopar.capture.folding.shorten import CutWay, Kept, cut_runs, preserve_model
from autopar.capture.folding.stream import (
    Follower,
    Layer,
    NotFoldable,
    NotInTurn,
    Recorder,
    Story,
    Stream,
    places,
    tag_inputs,
    tag_weights,
)
from autopar.capture.outside_values import value_at
from autopar.capture.stamps import FunctionStamp, renewed
from autopar.capture.trace import OutsideValue
from autopar.capture.trees import leaves_of
from autopar.errors import CaptureError

# --------------------------------------------------------------------------------------------------
# Check that a shortened model is the full model without some units, with one eager forward of each
# on fake tensors.
#
# The check includes what affects backward but is not an op: whether gradients are enabled, which
# operands require them, and calls of custom autograd functions. Hooks on tensors, which only run in
# backward, are refused.


def record_ops(
    model: nn.Module, prepared: Prepared, runs: Sequence[Run], layers: Mapping[nn.Module, Layer]
) -> Story:
    """Run the forward of the shortened model on fake tensors and record its ops.

    Args:
        model: the shortened model.
        prepared: the call.
        runs: the runs that were shortened.
        layers: the remaining layers of the runs.

    Raises:
        NotFoldable: forward fails, or does not call the layers in order.
    """
    recorder = Recorder(runs, layers, [KEPT_FIRST + KEPT_LAST] * len(runs))
    recorder.story.results = _run(model, prepared, recorder, "the shortened model")
    return recorder.story


def compare(story: Story, model: nn.Module, prepared: Prepared, runs: Sequence[Run]) -> None:
    """Check that the full model runs the recorded ops, and each removed unit those of the interior
    unit.

    Args:
        story: the recorded ops of the shortened model.
        model: the full model.
        prepared: the call.
        runs: the runs that were shortened.

    Raises:
        NotFoldable: the ops differ; the message names the location.
    """
    layers = dict(places(runs, model))
    follower = Follower(story, prepared.mode, runs, layers, [run.num_units for run in runs])
    if _run(model, prepared, follower, "the model") != story.results:
        raise NotFoldable("what forward returns depends on the number of layers")


def tag(model: nn.Module, prepared: Prepared, runs: Sequence[Run]) -> None:
    """Tag the weights of the full model and the inputs with names that both forwards use.

    Args:
        model: the full model.
        prepared: the call, whose inputs are numbered.
        runs: the runs; weights of their layers are named relative to their unit.
    """
    tag_weights(model, dict(places(runs, model)))
    tag_inputs(leaves_of((prepared.args, prepared.kwargs)))


def _run(model: nn.Module, prepared: Prepared, stream: Stream, name: str) -> tuple[Any, ...]:
    """Run forward, pass its ops to the stream, and return descriptions of its results."""
    try:
        with _watch_stream(stream), prepared.mode, stream:
            args, kwargs = prepared.arguments_anew()
            results = model(*args, **kwargs)
        stream.finish()
        return tuple(stream.describe(leaf, []) for leaf in leaves_of(results))
    except NotFoldable:
        raise
    # a shortened model, or one that reads values of fake tensors, may raise any error
    except Exception as error:
        if stream.refusal is not None:
            raise stream.refusal from error
        first = next(iter(str(error).splitlines()), "")
        raise NotFoldable(
            f"forward of {name} fails on fake tensors: {type(error).__name__}: {first}"
        ) from error


@contextlib.contextmanager
def _watch_stream(stream: Stream) -> Iterator[None]:
    """Notify the stream of calls of layers and of custom autograd functions, and make
    `torch.compiler.is_compiling` return True."""
    layers: Mapping[nn.Module, Layer] = stream.layers

    def enter(module: nn.Module, _: Any) -> None:
        """Notify the stream that a layer begins."""
        if module in layers:
            stream.enter(layers[module])

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        """Notify the stream that a layer ends.

        Args:
            module: the module that was called.
            _: its arguments.
            __: its result.
        """
        if module in layers:
            stream.leave(layers[module])

    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the call of an autograd function, and run it."""
        stream.event(("autograd function", cls), (args, kwargs))
        return plain.__get__(None, cls)(*args, **kwargs)

    def register_hook(*_: Any) -> Any:
        """Refuse a hook on a tensor."""
        raise stream.record_refusal(
            "forward registers a hook on a tensor, whose effect on backward is not compared"
        )

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(mock.patch.object(torch.Tensor, "register_hook", register_hook))
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave).remove)
        yield


def order_of_calls(model: nn.Module, prepared: Prepared) -> dict[nn.Module, int]:
    """Return the number of the first call of each module in a forward on fake tensors; if forward
    fails, only the modules called before."""
    order: dict[nn.Module, int] = {}

    def enter(module: nn.Module, _: Any) -> None:
        """Number a module at its first call."""
        order.setdefault(module, len(order))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.compiler, "_is_compiling_flag", True))
        stack.callback(register_module_forward_pre_hook(enter).remove)
        with contextlib.suppress(
            Exception
        ):  # if the model raises an error for fake tensors, the capture reports it
            prepared.run(model)
    return order


# --------------------------------------------------------------------------------------------------
# Buffers of repeated layers whose values forward reads: they must be equal in all copies of a
# layer.


def know_all_copies(call: Prepared, runs: Sequence[Run]) -> Prepared:
    """Return the call with each known buffer of a layer also known in all layers of its run.

    Raises:
        NotFoldable: the buffers of the layers differ in values, so that branches may differ.
    """
    first_names = {
        name: first for first, others in call.aliases.items() for name in (first, *others)
    }
    copies: set[str] = set()
    for name in (key for key in call.known if isinstance(key, str)):
        for other in (first_names.get(copy, "") for run in runs for copy in _copies(name, run)):
            if other not in call.buffers or not _is_equal(call, name, other):
                raise NotFoldable(
                    f"forward reads the values of the buffer {name!r}, but {other!r} has other"
                    " values"
                )
            copies.add(other)
    missing = copies - call.known.keys()
    return call.with_known(missing) if missing else call


def _copies(name: str, run: Run) -> Iterator[str]:
    """Yield the names of a buffer in all units of a run; nothing if the run does not contain it."""
    position = run.find(name)
    if position is not None:
        yield from (
            f"{layer}{position[1]}" for layer in run.layers[run.like(position[0]) :: run.period]
        )


def _is_equal(call: Prepared, name: str, other: str) -> bool:
    with no_modes():
        one, two = call.buffers[name].own, call.buffers[other].own
        return (
            one.shape == two.shape
            and one.dtype == two.dtype
            and not two.is_meta
            and torch.equal(one, two)
        )


# --------------------------------------------------------------------------------------------------
# Closure variables of the removed layers, which correspond to those of captured layers.


def repeat_closures(
    outside: Iterable[OutsideValue], model: nn.Module, run: Run
) -> tuple[OutsideValue, ...]:
    """Return the closure variables that the full model reads; each removed layer reads the same
    variables as its counterpart in the first unit, in its own closures.

    Args:
        outside: values outside the modules that the shortened model reads.
        model: the full model.
        run: the run to repeat.
    """
    layers, variables = [model.get_submodule(path) for path in run.layers], tuple(outside)
    added = []
    for position in run.removed_positions:
        pairs = zip(
            _cells(layers[run.like(position)]), _cells(layers[position]), strict=True
        )  # equal layers have equal functions
        counterparts = {id(theirs): its for theirs, its in pairs if its is not theirs}
        added += [
            _in_cell(each, counterparts[id(each.holder)])
            for each in variables
            if id(each.holder) in counterparts
        ]
    return variables + tuple(added)


def _in_cell(variable: OutsideValue, cell: types.CellType) -> OutsideValue:
    """Return the same variable of another closure, which may hold another function."""
    value = variable.value
    if isinstance(value, FunctionStamp):
        value = renewed(value, value_at(cell, variable.steps))
    return replace(variable, holder=cell, value=value)


def _cells(layer: nn.Module) -> Iterator[types.CellType]:
    """Yield the closure cells of a layer, in the order in which `runs` compares them."""
    for module in layer.modules():
        for attribute, value in vars(module).items():
            if attribute not in INTERNAL:
                yield from _cells_within(value)
        for hooks in HOOKS:
            yield from _cells_within(vars(module)[hooks])


def _cells_within(value: Any, depth: int = 0) -> Iterator[types.CellType]:
    items: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        items = value
    elif isinstance(value, dict):
        items = (item for pair in value.items() for item in pair)
    elif isinstance(value, types.MethodType):
        items = (value.__self__,)
    elif isinstance(value, functools.partial):
        items = (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        yield from value.__closure__ or ()
        items = (value.__defaults__, *contents(value))
    for member in items if depth < DEPTH else ():
        yield from _cells_within(member, depth + 1)


Replaced = Mapping[Run, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class ShortenedCapture:
    """The capture of a shortened model.

    Attributes:
        raw: the joint graph. Its placeholders and results have the names of the full model, its
            nodes the module paths of the shortened model.
        runs: the runs that were shortened.
        kept: names of modules in the shortened model → their names in the full model (`cut_runs`).
    """

    raw: RawJoint
    runs: tuple[Run, ...]
    kept: Kept


def capture_shortened(model: nn.Module, call: Prepared, replaced: Replaced) -> ShortenedCapture:
    """Shorten a prepared model, check it against the full model, capture it, and restore it.

    Args:
        model: the full model.
        call: the prepared call.
        replaced: runs that cannot be folded → the runs to use instead.

    Raises:
        NotFoldable: there is no run, or the full model does not equal the shortened model with
            units repeated.
    """
    runs = _runs(model, None, replaced)
    try:
        return _capture_shortened(model, call, runs)
    except NotInTurn:
        with warnings.catch_warnings(), preserve_model(model):
            warnings.simplefilter("ignore")
            order = order_of_calls(model, call)
        in_turn = _runs(model, order, replaced)
        if in_turn == runs:
            raise
        return _capture_shortened(model, call, in_turn)


def _runs(model: nn.Module, order: Order | None, replaced: Replaced) -> tuple[Run, ...]:
    runs, reason = find_runs(model, order)
    if not runs:
        raise NotFoldable(reason)
    while any(run in replaced for run in runs):
        runs = tuple(piece for run in runs for piece in replaced.get(run, (run,)))
    if not runs:
        raise NotFoldable("no other layers are equal")
    return runs


def _capture_shortened(model: nn.Module, call: Prepared, runs: tuple[Run, ...]) -> ShortenedCapture:
    call = know_all_copies(call, runs)
    way = _check(model, call, runs)
    with preserve_model(model):
        renamed = cut_runs(model, runs, way)
        try:
            raw = raw_joint(model, call)
        except ReadsInputs:
            raise
        except CaptureError as error:
            raise NotFoldable(f"the shortened model cannot be captured: {error.what}") from error
    names = [
        tuple(_rename_entry(entry, renamed) for entry in entries)
        for entries in (raw.placeholders, raw.results)
    ]
    attributes = tuple(
        replace(each, path=renumber_path(each.path, renamed)) for each in raw.attributes
    )
    outside = raw.outside
    for run in runs:
        attributes, outside = (
            repeat_attributes(attributes, run),
            repeat_closures(outside, model, run),
        )
    unkept = tuple(renumber_path(name, renamed) for name in raw.unkept)
    full = replace(
        raw,
        placeholders=names[0],
        results=names[1],
        attributes=attributes,
        outside=outside,
        unkept=unkept,
    )
    return ShortenedCapture(full, runs, renamed)


def _check(model: nn.Module, call: Prepared, runs: tuple[Run, ...]) -> CutWay:
    """Return the way of shortening with which both models run the same ops."""
    tag(model, call, runs)
    layers = dict(places(runs, model, short=True))
    refusals = []
    for way in CutWay:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with preserve_model(model), known_values(call.origins()):
                    cut_runs(model, runs, way)
                    story = record_ops(model, call, runs, layers)
                with preserve_model(model):
                    compare(story, model, call, runs)
            return way
        except NotFoldable as error:
            refusals.append(error)
    raise next((refusal for refusal in refusals if refusal.run is not None), refusals[0])


def _rename_entry(entry: tuple[str, Any], kept: Kept) -> tuple[str, Any]:
    kind, name = entry
    return kind, renumber_path(name, kept) if isinstance(name, str) else name
