"""`capture`: trace a model and a batch, and bring the graph into normal form."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.calls import argument_of, bind_arguments, check_call, find_called
from autopar.capture.diagnostics import ReadsInputs, of_modules, refuse_unseen
from autopar.capture.dynamo.branches import all_finite, asks_for_finite, raises_left_out
from autopar.capture.dynamo.call_objects import refuse_other_objects
from autopar.capture.dynamo.joint import RawJoint, raw_joint
from autopar.capture.dynamo.outputs import prints_left_out
from autopar.capture.dynamo.preparing import Prepared, prepare_call
from autopar.capture.execute import propagate
from autopar.capture.folding import (
    NotFoldable,
    Run,
    Shortened,
    capture_shortened,
    renumber_path,
    repeat,
)
from autopar.capture.graphs import dtype_of, emit, is_tensor, shape_of, sweep
from autopar.capture.hugging_face import (
    asks_for_documents,
    branches_of_eager,
    empty_caches,
    refuse_caches,
    without_caches,
    without_use_of_caches,
)
from autopar.capture.module_values import of_the_model
from autopar.capture.normalize import PASSES
from autopar.capture.normalize.clean import inline_constants
from autopar.capture.normalize.random_draws import next_state, number_draws, replace_random
from autopar.capture.normalize.tangents import add_tangents_last
from autopar.capture.precision import (
    absorb_casts,
    before_cast,
    cast_input,
    settle_dtypes,
    widen_gradient,
)
from autopar.capture.python_attributes import (
    tell_of_known,
    tell_of_prints,
    tell_of_raises,
    tell_of_unkept,
)
from autopar.capture.refused_ops import refuse_float8, refuse_random, refuse_sparse
from autopar.capture.tensor_kinds import refuse_state_and_inputs
from autopar.capture.trace import (
    Folding,
    Input,
    KnownBuffer,
    Output,
    Parameter,
    Trace,
    assign_keys,
    label,
)
from autopar.capture.trees import flatten_call, refuse_overlaps
from autopar.core.garbage import collected_seldom
from autopar.errors import CaptureError, Where
from autopar.ops import random

# --------------------------------------------------------------------------------------------------
# Placeholders and results of a captured graph: torch's description of them is converted to that of
# a trace.


class Border:
    """The placeholders and results of a graph, recorded before the passes, which keep their order.

    A tied parameter or buffer has one placeholder and one gradient, under its first name.
    """

    def __init__(self, raw: RawJoint, call: Prepared) -> None:
        self.raw, self.aliases, self.graph, self.stored = (
            raw,
            dict(call.aliases),
            raw.graph,
            dict(call.stored),
        )
        self.inference = call.inference
        self.first = {
            name: first for first, others in call.aliases.items() for name in (first, *others)
        }
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.nodes: dict[tuple[str, Any], fx.Node] = {}
        for node, (kind, name) in zip(placeholders, raw.placeholders, strict=True):
            self._enter(node, (kind, self.first.get(name, name)))
        self.results = self._results()

    def narrow(self) -> None:
        """Set the placeholders of inputs to the dtypes of the batch, and those of parameters to a
        narrower dtype if the graph reads only that dtype; gradients of these parameters then have
        the narrower dtype."""
        for (kind, name), node in self.nodes.items():
            if kind == "input" and self.raw.in_leaves[name][1].dtype != dtype_of(node):
                cast_input(self.graph, node, self.raw.in_leaves[name][1].dtype)
            elif kind == "parameter":
                self.stored.setdefault(name, dtype_of(node))
                absorb_casts(self.graph, node)
        narrow = {
            name
            for (kind, name), node in self.nodes.items()
            if kind == "parameter" and dtype_of(node) != self.stored[name]
        }
        self.results = [
            ((kind, name), before_cast(node) if kind == "gradient" and name in narrow else node)
            for (kind, name), node in self.results
        ]
        self._output.args = (tuple(node for _, node in self.results),)

    def widen(self) -> None:
        """Cast gradients to the stored dtype of their parameters or the dtype of their inputs; must
        run after the passes, which match the ops that compute gradients."""
        results = list(self._output.args[0])
        for position, ((kind, name), _) in enumerate(self.results):
            if kind == "gradient":
                results[position] = widen_gradient(results[position], self.stored[name])
            elif kind == "input gradient":
                results[position] = widen_gradient(
                    results[position], self.raw.in_leaves[name][1].dtype
                )
        self._output.args = (tuple(results),)
        sweep(self.graph)

    def state_placeholders(self) -> list[fx.Node]:
        """Return the placeholders of parameters and buffers."""
        return [node for (kind, _), node in self.nodes.items() if kind in ("parameter", "buffer")]

    @property
    def _output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def add_random_state(self, state: fx.Node) -> None:
        """Add the random state as a buffer that every step updates."""
        entry = ("buffer", random.STATE)
        self.nodes[entry], self.aliases[random.STATE] = state, ()
        now = zip(
            (kind for kind, _ in self.results), self._output.args[0], strict=True
        )  # the node of a gradient may be the backward of a draw, which was replaced
        self.results = [*now, (("mutation", random.STATE), next_state(self.graph, state))]
        self._output.args = (tuple(node for _, node in self.results),)
        buffers = [node for node in self.state_placeholders() if node is not state]
        if buffers:
            buffers[-1].append(state)

    def _enter(self, node: fx.Node, kind: tuple[str, Any]) -> None:
        if kind in self.nodes:
            node.replace_all_uses_with(self.nodes[kind])
        if kind in self.nodes or not is_tensor(node):
            assert not node.users, f"{kind} is not a tensor, but the graph of torch reads it"
            self.graph.erase_node(node)
            return
        self.nodes[kind] = node
        if kind[0] in ("parameter", "buffer"):
            node.meta["module"] = kind[1]

    def _results(self) -> list[tuple[tuple[str, Any], fx.Node]]:
        output = self._output
        sums: dict[tuple[str, Any], fx.Node] = {}
        for (kind, name), node in zip(self.raw.results, output.args[0], strict=True):
            entry = (kind, self.first.get(name, name))
            if node is None:
                continue
            if entry in sums:
                with self.graph.inserting_before(output):
                    node = emit(
                        node, torch.ops.aten.add.Tensor, (sums[entry], node), shape_of(node)
                    )
            sums[entry] = node
        # Sort gradients in the order of the parameters. The gradient of a tied parameter would
        # otherwise be at the position of its last name, which folding does not preserve.
        ranks = {name: rank for rank, (_, name) in enumerate(self.nodes)}
        groups = {group: [entry for entry in sums if entry[0] == group] for group in _GROUPS}
        groups["gradient"].sort(key=lambda entry: ranks[entry[1]])
        results = [(entry, sums[entry]) for group in groups.values() for entry in group]
        output.args = (tuple(node for _, node in results),)
        return results

    def repeat(self, runs: Iterable[Run], model: nn.Module) -> None:
        """Repeat the layers of the runs in the finished graph of the shortened model, which becomes
        the graph of `model`.

        Raises:
            NotFoldable: the layers differ.
        """
        results = dict(zip((kind for kind, _ in self.results), self._output.args[0], strict=True))
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        ranks = {self.first.get(name, name): rank for rank, (name, _) in enumerate(named)}
        for run in runs:
            self.nodes, results = repeat(run, self.graph, self.nodes, results, ranks)
        self.results = list(results.items())

    def add_tangents_last(self) -> None:
        """If the model returns no loss, reorder sums of gradients so that tangents are added
        last."""
        if self.raw.loss is None:
            add_tangents_last(
                self.graph, [node for (kind, _), node in self.nodes.items() if kind == "tangent"]
            )

    def trace(self, model: nn.Module) -> Trace:
        """Return the trace of the finished graph."""
        positions = {kind: position for position, (kind, _) in enumerate(self.results)}
        final = self._output.args[0]
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        tensors |= {
            name: node.meta["val"]
            for (kind, name), node in self.nodes.items()
            if kind == "buffer" and name == random.STATE
        }
        entries = {
            group: self._parameters(group, tensors, positions) for group in ("parameter", "buffer")
        }
        paths = dict(enumerate(path for path, _ in self.raw.in_leaves))
        inputs = tuple(
            Input(
                paths[kind[1]],
                *_describe_node(node),
                gradient=positions.get(("input gradient", kind[1])),
                requires_grad=self.raw.in_leaves[kind[1]][1].requires_grad and not self.inference,
            )
            for kind, node in self.nodes.items()
            if kind[0] == "input"
        )
        leaves = self.raw.out_leaves
        tangents = {
            name: node.name for (kind, name), node in self.nodes.items() if kind == "tangent"
        }
        outputs = tuple(
            Output(
                leaves[kind[1]][0],
                *_describe_node(final[position]),
                kind[1] == self.raw.loss,
                tangents.get(kind[1], ""),
                requires_grad=leaves[kind[1]][1].requires_grad,
            )
            for kind, position in positions.items()
            if kind[0] == "output"
        )
        return Trace(
            graph=self.graph,
            parameters=entries["parameter"],
            buffers=entries["buffer"],
            inputs=inputs,
            outputs=outputs,
            mutated={
                kind[1]: position for kind, position in positions.items() if kind[0] == "mutation"
            },
            in_spec=self.raw.in_spec,
            out_spec=self.raw.out_spec,
            constants={
                position: leaf
                for position, (_, leaf) in enumerate(leaves)
                if not isinstance(leaf, torch.Tensor)
            },
            settings={
                position: leaf
                for position, (_, leaf) in enumerate(self.raw.in_leaves)
                if not isinstance(leaf, torch.Tensor)
            }
            | {
                position: value
                for position, value in self.raw.known.items()
                if isinstance(position, int)
            },
            fingerprint=_fingerprint(
                self.graph, entries["parameter"] + entries["buffer"], self.raw.known
            ),
            attributes=(
                *self.raw.attributes,
                *self.raw.outside,
                *self._known_buffers({kind[1] for kind in positions if kind[0] == "mutation"}),
            ),
            code=self.raw.code,
        )

    def _known_buffers(self, mutated: Collection[str]) -> Iterator[KnownBuffer]:
        """Yield the buffers whose values forward reads.

        Raises:
            CaptureError: forward also changes one of them.
        """
        for name, value in self.raw.known.items():
            if isinstance(name, int):
                continue
            if name in mutated:
                raise CaptureError(
                    f"forward changes the buffer {name!r}, and its values determine a branch or a"
                    " shape",
                    where=Where(module=name.rpartition(".")[0]),
                    remedy=(
                        "count in the training loop and pass the number as a plain argument (one"
                        " program is compiled per value); or compute with the buffer as a tensor"
                        " (torch.where)"
                    ),
                )
            yield KnownBuffer(name, value)

    def _parameters(
        self,
        group: str,
        tensors: Mapping[str, torch.Tensor],
        positions: Mapping[tuple[str, Any], int],
    ) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(
                name=name,
                aliases=self.aliases[name],
                node=node.name,
                shape=tuple(tensors[name].shape),
                view=shape_of(node),
                dtype=self.stored.get(name, tensors[name].dtype),
                requires_grad=tensors[name].requires_grad and not self.inference,
                gradient=positions.get(("gradient", name)),
                compute_dtype=node.meta["val"].dtype,
            )
            for (kind, name), node in self.nodes.items()
            if kind == group
        )


_GROUPS = ("output", "gradient", "mutation", "input gradient")  # order of results


def _describe_node(node: fx.Node) -> tuple[str, tuple[int, ...], torch.dtype]:
    return node.name, shape_of(node), node.meta["val"].dtype


def _fingerprint(
    graph: fx.Graph, parameters: tuple[Parameter, ...], known: Mapping[int | str, torch.Tensor]
) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(known.items(), key=lambda entry: str(entry[0])):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)} ".encode() + content)
    for entry in parameters:
        read = f" read as {entry.compute_dtype}" if entry.is_narrowed else ""
        digest.update(
            f"{entry.name} {entry.shape} {entry.dtype}{read} {entry.requires_grad}\n".encode()
        )
    for node in graph.nodes:
        value = node.meta.get("val")
        shapes = [
            tuple(item.shape)
            for item in (value if isinstance(value, (tuple, list)) else [value])
            if isinstance(item, torch.Tensor)
        ]
        arguments = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["key"])
        digest.update(f"{node.meta['key']} {shapes} {arguments}\n".encode())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# The capture.

_MOST_REPLACED = 4  # runs that may turn out to differ before a model is captured in full


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    fold: bool = True,
    precision: torch.dtype | None = None,
    inference: bool = False,
) -> Trace:
    """Capture the joint forward and backward graph of `model(*args, **kwargs)` in normal form, or
    only the forward graph if no result requires a gradient.

    The model may be on any device, including ``meta``, and is not changed. Only shapes and dtypes
    of the batch are used, except for values that determine shapes or branches.

    Args:
        model: the model.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        fold: whether to capture a few of several equal layers and repeat them in the graph, which
            gives the same trace. If this is not possible, the model is captured in full, and
            `Trace.folding` gives the reason.
        precision: dtype in which wider floating parameters and inputs are read
            (`autopar.capture.precision`).
        inference: whether to capture only the forward graph even if parameters require gradients.

    Returns:
        The trace.

    Raises:
        CallError: the model does not accept the call.
        CaptureError: the model cannot be captured as one graph, or draws random numbers that
            autopar cannot draw; the error names the user's line.
    """
    refuse_unseen(model)
    signature = inspect.signature(model.forward)
    check_call(signature, args, kwargs or {})
    refuse_caches(model, bind_arguments(signature, args, kwargs or {}))
    leaves, _ = flatten_call(args, dict(kwargs or {}))
    named = [(argument_of(path, model), leaf) for path, leaf in leaves]
    refuse_state_and_inputs(model, named)
    refuse_other_objects(named)
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
    """Capture with the branches that a transformers model takes under tracing; if that fails, try
    the branches for finite values, then those of eager mode."""
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
    """Capture without key/value caches, or with empty caches if the result depends on whether there
    is a cache."""
    try:
        with without_caches(model):
            trace = _capture_with_known_inputs(model, call, fold)
            return replace(trace, attributes=without_use_of_caches(trace.attributes, model))
    except CaptureError as refusal:
        if not asks_for_documents(refusal):
            raise
    with empty_caches(model):
        return _capture_with_known_inputs(model, call, fold)


def _capture_with_known_inputs(model: nn.Module, call: Prepared, fold: bool) -> Trace:
    """Capture with the values of the inputs that forward reads."""
    reads = dict[int, Where]()
    while True:
        try:
            return replace(_capture_once(model, call, fold), value_reads=reads)
        except ReadsInputs as refusal:
            call = call.with_known(refusal.keys)
            if isinstance(refusal.where, Where):
                reads |= {key: refusal.where for key in refusal.keys if isinstance(key, int)}


def _capture_once(model: nn.Module, call: Prepared, fold: bool) -> Trace:
    refusal, replaced = "" if fold else "folding is disabled", dict[Run, tuple[Run, ...]]()
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

    The layers of a shortened model are repeated after the passes and before draws and nodes are
    numbered.

    Raises:
        NotFoldable: the layers cannot be repeated.
    """
    graph = raw.graph
    tell_of_unkept(raw.unkept)
    kinds = zip(
        (node for node in graph.nodes if node.op == "placeholder"), raw.placeholders, strict=True
    )
    label(graph, [node for node, (kind, _) in kinds if kind == "tangent"], raw.held_elsewhere)
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
