"""`capture`: trace a model and a batch, and bring the graph into normal form."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture.calls import argument_of, bind_arguments, check_call, find_called
from autopar.capture.diagnostics import ReadsInputs, of_modules, refuse_unseen
from autopar.capture.dynamo.branches import all_finite, asks_for_finite, raises_left_out
from autopar.capture.dynamo.joint import RawJoint, raw_joint
from autopar.capture.dynamo.outputs import prints_left_out
from autopar.capture.dynamo.preparing import Prepared, prepare_call
from autopar.capture.execute import propagate
from autopar.capture.folding import NotFoldable, Run, Shortened, capture_shortened, renumber_path
from autopar.capture.hugging_face import (
    asks_for_documents,
    branches_of_eager,
    empty_caches,
    refuse_caches,
    without_caches,
)
from autopar.capture.normalize import PASSES
from autopar.capture.normalize.clean import inline_constants
from autopar.capture.normalize.random_draws import number_draws, replace_random
from autopar.capture.precision import settle_dtypes
from autopar.capture.python_attributes import (
    tell_of_known,
    tell_of_prints,
    tell_of_raises,
    tell_of_unkept,
)
from autopar.capture.refused_ops import refuse_float8, refuse_random, refuse_sparse
from autopar.capture.side_effects import of_the_model
from autopar.capture.signature import Border
from autopar.capture.tensor_kinds import refuse_state_and_inputs
from autopar.capture.trace import Folding, Trace, assign_keys, label
from autopar.capture.trees import flatten_call, refuse_overlaps
from autopar.core.garbage import collected_seldom
from autopar.errors import CaptureError, Where

_MOST_REPLACED = 4  # runs that turn out not to be equal, before a model is captured in full


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fold: bool = True,
    precision: torch.dtype | None = None,
    inference: bool = False,
) -> Trace:
    """Capture the joint forward and backward graph of `model(*args, **kwargs)` in normal form; the
    forward alone if nothing has a gradient.

    The model may be on any device, ``meta`` included, and is not changed. Only shapes and dtypes of
    the batch are used, apart from values that decide shapes or branches.

    Args:
        model: the model.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        fold: whether to capture equal layers a few at a time and repeat them in the graph; the
            result is the same. If this is not possible, the model is captured in full, and the
            trace's `folding` states why.
        precision: the dtype that wider floating parameters and inputs are read in
            (`autopar.capture.precision`).
        inference: whether to capture the forward alone, though parameters may require gradients.

    Raises:
        CallError: the model itself does not accept the call.
        CaptureError: the model cannot be captured as one graph, or draws random numbers that
            autopar cannot draw; the error names the user's line.
    """
    refuse_unseen(model)
    signature = inspect.signature(model.forward)
    check_call(signature, args, kwargs or {})
    refuse_caches(model, bind_arguments(signature, args, kwargs or {}))
    leaves, _ = flatten_call(args, dict(kwargs or {}))
    refuse_state_and_inputs(model, ((argument_of(path, model), leaf) for path, leaf in leaves))
    refuse_overlaps(model)
    with (
        collected_seldom(),
        prepare_call(model, args, dict(kwargs or {}), precision, inference=inference) as call,
    ):
        _refuse_called(model, call)
        with raises_left_out() as lines, prints_left_out() as printed:
            trace = _capture_with_branches(model, call, fold)
    tell_of_raises(lines)
    tell_of_prints(printed)
    known = [
        position for position, value in trace.settings.items() if isinstance(value, torch.Tensor)
    ]
    tell_of_known([argument_of(call.in_leaves[position][0], model) for position in known])
    return replace(trace, attributes=of_the_model(trace.attributes, model))


def _refuse_called(model: nn.Module, call: Prepared) -> None:
    """Raise CaptureError at the first module that cannot be captured, if forward calls it."""
    refusals = {
        refusal.where.module: refusal
        for refusal in of_modules(model)
        if isinstance(refusal.where, Where)
    }
    reached = find_called(model, refusals, call.run) if refusals else set()
    for path, refusal in refusals.items():
        if path in reached:
            raise refusal


def _capture_with_branches(model: nn.Module, call: Prepared, fold: bool) -> Trace:
    """Capture with the branches that a transformers model takes under tracing; if that fails, with
    those for finite values or those of eager mode."""
    try:
        return _capture_with_caches(model, call, fold)
    except CaptureError as refusal:
        if asks_for_finite(refusal):
            with contextlib.suppress(CaptureError), all_finite(refusal):
                return _capture_with_caches(model, call, fold)
        with branches_of_eager(model) as others:
            if not others:
                raise
            with contextlib.suppress(CaptureError):
                return _capture_with_caches(model, call, fold)
        raise refusal from refusal.__cause__


def _capture_with_caches(model: nn.Module, call: Prepared, fold: bool) -> Trace:
    """Capture without caches of keys and values; with empty caches if the result depends on whether
    there is one."""
    try:
        with without_caches(model):
            return _capture_with_known_inputs(model, call, fold)
    except CaptureError as refusal:
        if not asks_for_documents(refusal):
            raise
    with empty_caches(model):
        return _capture_with_known_inputs(model, call, fold)


def _capture_with_known_inputs(model: nn.Module, call: Prepared, fold: bool) -> Trace:
    """Capture with the values of the inputs that forward reads, if these may be known."""
    while True:
        try:
            return _capture_once(model, call, fold)
        except ReadsInputs as refusal:
            call = call.with_known(refusal.keys)


def _capture_once(model: nn.Module, call: Prepared, fold: bool) -> Trace:
    refusal, replaced = "" if fold else "it was not asked for", dict[Run, tuple[Run, ...]]()
    while fold:
        try:
            shortened = capture_shortened(model, call, replaced)
            return _normal_form(model, shortened.raw, shortened, call)
        except NotFoldable as error:
            refusal = refusal or str(error)
            if error.run is None or len(replaced) == _MOST_REPLACED:
                break
            replaced[error.run] = () if error.unit is None else error.run.others(error.unit)
    return replace(
        _normal_form(model, raw_joint(model, call), None, call), folding=Folding((), refusal)
    )


def _normal_form(
    model: nn.Module, raw: RawJoint, shortened: Shortened | None, call: Prepared
) -> Trace:
    """Bring a raw graph into normal form and return its trace.

    The layers of a shortened model are repeated after the passes and before nodes are numbered.

    Raises:
        NotFoldable: the layers cannot be repeated.
    """
    graph = raw.graph
    tell_of_unkept(raw.unkept)
    given = zip(
        (node for node in graph.nodes if node.op == "placeholder"), raw.placeholders, strict=True
    )
    label(graph, [node for node, (kind, _) in given if kind == "tangent"], raw.held_elsewhere)
    refuse_float8(graph)
    refuse_sparse(graph)
    if shortened is not None:
        for node in graph.nodes:
            node.meta["module"] = renumber_path(node.meta["module"], shortened.kept)
    inline_constants(graph, raw.constants)
    border = Border(raw, call)
    border.narrow()
    state = replace_random(graph)
    refuse_random(graph)
    if state is not None:
        border.add_random_state(state)
    for _, apply in PASSES:
        apply(graph)
    border.widen()
    settle_dtypes(graph, border.state_placeholders(), call.precision)
    propagate(graph)
    runs = shortened.runs if shortened is not None else ()
    border.repeat(runs, model)
    border.add_tangents_last()
    number_draws(graph)
    assign_keys(graph)
    graph.lint()
    return replace(
        border.trace(model), folding=Folding(tuple(map(str, runs)), ""), precision=call.precision
    )
