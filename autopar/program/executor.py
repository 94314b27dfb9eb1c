"""One rank's run of a program: slice the inputs, run the forward graph, gather the outputs; run the
backward graph.

The same executor runs on real tensors with process groups and on fake tensors with fake groups, so
that a trace of its memory is a prediction. Memory discipline: graphs take one list which they
empty, and free every value after its last use. Nothing here holds a value that was passed to a
graph.
"""

from __future__ import annotations

import operator
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard

from autopar.core.collective import HOST_KINDS
from autopar.core.layout import Layout, local_shape
from autopar.core.private_folder import private_folder
from autopar.errors import RuntimeStateError
from autopar.kernels.bind import bind
from autopar.kernels.bound_ops import IN_PLACE
from autopar.kernels.collectives import FIRST, Groups, all_gather, all_reduce, use_groups
from autopar.kernels.packing import from_bucket, into_bucket
from autopar.kernels.row_kernels import ON_GPU
from autopar.ops import linear_cross_entropy
from autopar.ops.in_place import functional_form
from autopar.program.program import (
    LazyGraphModule,
    Microbatches,
    Program,
    ProgramTensor,
    StageProgram,
)
from autopar.program.splitting import local_part
from autopar.request import Backend, Batch, Outputs

# --------------------------------------------------------------------------------------------------
# The backward graph of a call of which some outputs had no part in the loss.
#
# A backward graph is linear in its tangents. Values that follow only from absent tangents are not
# computed. So parameters that nothing else reaches have no gradient, as in the plain model, and
# infinite derivatives do no harm (0 · ∞ is NaN). A sum keeps its other term. If an op combines
# values of absent and other tangents in any other way, the absent ones are zeros.

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add.out)


def without(source: fx.Graph, tangents: Collection[str], absent: Collection[str]) -> fx.Graph:
    """Return a copy of a backward graph without results that follow only from absent tangents. The
    copy takes the same operands and returns None for these results.

    Args:
        source: the backward graph. tangents, absent: names of placeholders: of all tangents, and of
            those whose outputs have no part in the loss.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(source, {}))
    found = _Gone.of(graph, tangents, absent)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SUMS and node not in found.gone:
            _keep_one_term(node, found.gone)
    end = next(iter(reversed(graph.nodes)))
    end.args = (tuple(None if result in found.gone else result for result in end.args[0]),)
    for node in reversed(
        list(graph.nodes)
    ):  # not by fx's own rule, to which what writes into its operand is never dead
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return graph


@dataclass(frozen=True, slots=True)
class Unused:
    """The part of a pipeline's backward that follows only from absent tangents, so that it is
    neither computed nor sent.

    Attributes:
        parameters: the ones without a gradient. tangents: per stage the outputs without a tangent,
            including those that cross to the next stage.
        gradients: per stage the inputs from the stage before that get no gradient.
    """

    parameters: frozenset[str]
    tangents: tuple[frozenset[str], ...]
    gradients: tuple[frozenset[str], ...]

    @staticmethod
    def of(program: Program, absent: Collection[str]) -> Unused:
        """Find the unused part if the outputs `absent` have no part in the loss."""
        trace = program.trace
        ends = {o.tangent: o.path for o in trace.differentiable}
        found = _Gone.of(
            trace.graph, ends, [tangent for tangent, path in ends.items() if path in absent]
        )
        names = {node.name for node in found.gone}
        results = next(iter(reversed(trace.graph.nodes))).args[0]
        trained = {p.name: results[p.gradient] for p in trace.parameters if p.gradient is not None}
        tangents = tuple(
            frozenset(path for path, name in tangent_names(stage) if name in names)
            for stage in program.stages
        )
        arrived = [frozenset(t.name for t in stage.inputs if t.crosses) for stage in program.stages]
        gradients = tuple(
            here & before
            for here, before in zip(arrived, (frozenset[str](), *tangents), strict=False)
        )
        return Unused(
            frozenset(name for name, node in trained.items() if node in found.gone),
            tangents,
            gradients,
        )


def tangent_names(program: StageProgram) -> list[tuple[str, str]]:
    """Return the outputs that have a tangent, each with the tangent's name in the trace, in the
    order in which the backward graph takes them after the saved values."""
    given = [str(node.target) for node in program.backward.graph.nodes if node.op == "placeholder"][
        program.num_saved :
    ]
    return list(zip((t.name for t in program.outputs if t.has_gradient), given, strict=False))


@dataclass(slots=True)
class _Gone:
    """Nodes by the tangents that they follow from.

    Attributes:
        following: from some tangent. gone: only from absent tangents. parts: for a bucket, which of
            its tensors are gone.
    """

    following: set[fx.Node] = field(default_factory=set)
    gone: set[fx.Node] = field(default_factory=set)
    parts: dict[fx.Node, tuple[bool, ...]] = field(default_factory=dict)

    @staticmethod
    def of(graph: fx.Graph, tangents: Collection[str], absent: Collection[str]) -> _Gone:
        """Classify the nodes of a graph.

        Args:
            graph: a backward graph, or a trace's. tangents, absent: see `without`.
        """
        found = _Gone()
        for node in graph.nodes:
            if node.op == "placeholder" and node.target in tangents:
                found.following.add(node)
                if node.target in absent:
                    found.gone.add(node)
            elif node.op == "call_function":
                found._follow(node)
        return found

    def _follow(self, node: fx.Node) -> None:
        reads = [operand for operand in node.all_input_nodes if operand in self.following]
        if not reads:
            return
        self.following.add(node)
        if all(operand in self.gone for operand in reads) or self._is_part(node, reads[0]):
            self.gone.add(node)
        elif node.target is into_bucket:
            self.parts[node] = tuple(tensor in self.gone for tensor in node.args[0])
        elif len(reads) == 1 and reads[0] in self.parts and node.target is not operator.getitem:
            self.parts[node] = self.parts[reads[0]]

    def _is_part(self, node: fx.Node, bucket: fx.Node) -> bool:
        is_taken = node.target is operator.getitem and bucket.target is from_bucket
        return is_taken and bucket in self.parts and self.parts[bucket][int(node.args[1])]


def _keep_one_term(node: fx.Node, gone: Collection[fx.Node]) -> None:
    """Replace a sum of which one term is gone by the other term, in new memory, since later nodes
    may write into it."""
    terms = [term for term in node.args[:2] if isinstance(term, fx.Node)]
    left = [term for term in terms if term not in gone]
    if (len(terms), len(left)) != (2, 1) or node.kwargs.get("alpha", 1) != 1:
        return
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(
            _aten.clone.default, (left[0],), {"memory_format": torch.contiguous_format}
        )
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy)


_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
Boxed = Callable[[list[Any]], Any]


class Executor:
    """Runs `program` at the place in the mesh that `groups` describes.

    Args:
        backend: ``"inductor"`` compiles the graphs at their first run; without a C++ compiler it
            warns and runs eagerly.
        batch: whether inputs come whole (``"global"``) or as this rank's part (``"local"``).
        outputs: whether outputs are gathered (``"full"``) or stay local; the loss is always whole.
        device: type of the device that the tensors are on, for those that the graphs make
            themselves.
    """

    def __init__(
        self,
        program: StageProgram,
        groups: Groups,
        *,
        backend: Backend = "eager",
        batch: Batch = "global",
        outputs: Outputs = "full",
        device: str = "cpu",
    ) -> None:
        self.program, self.groups, self.batch, self.outputs = program, groups, batch, outputs
        self.device = torch.device(
            device, torch.cuda.current_device() if device == "cuda" else None
        )
        self._backend = usable_backend(backend)
        if self._backend == "inductor" and any(
            c.kind in HOST_KINDS for _, _, c in program.collectives
        ):
            what = (
                'the plan stores tensors in host memory, but backend "inductor" does not support'
                " host copies"
            )
            raise RuntimeStateError(what, remedy='use backend="eager", or plan without offload')
        self._graphs: dict[str, Boxed] = {}
        index = {tensor.name: position for position, tensor in enumerate(program.buffers)}
        self._mutated = [index[name] for name in program.mutated]

    def forward(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *,
        keep: bool,
    ) -> tuple[list[Tensor], list[Any]]:
        """Run the forward graph. Mutated buffers are updated in place.

        Args:
            parameters, buffers: local tensors as the graph sees them. inputs: whole or local, as
                `batch` says.
            keep: whether backward follows.

        Returns:
            The outputs, and what backward needs; nothing for backward unless `keep`.
        """
        # A value that backward needs may share memory with the buffer that is written below.
        buffers_in = [b.clone() if i in self._mutated else b for i, b in enumerate(buffers)]
        operands = [*parameters, *buffers_in, *map(self._localize, inputs, range(len(inputs)))]
        del buffers_in
        results = list(self._graph("forward" if keep else "inference")(operands))
        if not keep:
            self._let_hosts_write()
        num_outputs, num_mutated = len(self.program.outputs), len(self._mutated)
        saved = results[num_outputs + num_mutated :]
        for position, value in zip(
            self._mutated, results[num_outputs : num_outputs + num_mutated], strict=True
        ):
            buffers[position].copy_(value)
        del results[num_outputs:]
        for position, border in enumerate(self.program.outputs):
            # Detached: an output that backward needs must not lead from the saved values back to
            # the graph that holds them.
            local = results[position].detach()
            whole = border.is_loss or (self.outputs == "full" and not border.crosses)
            results[position] = (
                gather(local, border.layout, self.groups, border.view) if whole else local
            )
            del local
        return results, saved

    def backward(
        self,
        saved: list[Any],
        tangents: list[Tensor],
        sums: Sequence[Tensor] = (),
        *,
        first: bool = False,
        absent: frozenset[int] = frozenset(),
    ) -> list[Tensor]:
        """Run the backward graph.

        Args:
            saved, tangents: both are emptied. One tangent per output that has one.
            sums: if the program accumulates, one per parameter that has a gradient; added to, and
                returned as the gradients.
            first: whether `sums` hold nothing yet, so that they are written.
            absent: places of the tangents that do not exist, for which zeros are passed; gradients
                that follow only from these are None.

        Returns:
            One gradient per parameter that has one, then one per input that has one, local as the
                graph sees
            it.
        """
        if first and (
            absent or self._backend != "eager"
        ):  # not all may be written; or the graph would be compiled a second time
            for total in sums:
                total.zero_()
            first = False
        saved += tangents
        saved += sums
        tangents.clear()
        return self._await_gradients(
            list(self._graph("first" if first else "backward", absent)(saved))
        )

    def begin(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return local parameters as `forward` takes them, from those that rest, before the first
        microbatch."""
        return (
            list(parameters)
            if self.program.begin is None
            else list(self._graph("begin")([*parameters]))
        )

    def new_sums(self) -> list[Tensor]:
        """Return uninitialised tensors for the sums of gradients, if the program accumulates."""
        sizes, place = [g.size for g in self.groups], [g.coordinate for g in self.groups]
        shapes = [local_shape(t.view, t.layout, sizes, place) for t in self.program.sums]
        return [
            torch.empty(shape, dtype=t.dtype, device=self.device)
            for shape, t in zip(shapes, self.program.sums, strict=True)
        ]

    def end(self, sums: list[Tensor]) -> list[Tensor]:
        """Return gradients as parameters rest, from their sums, after the last microbatch. `sums`
        is emptied."""
        assert self.program.end is not None, "the program accumulates"
        return self._await_gradients(list(self._graph("end")(sums)))

    def _let_hosts_write(self) -> None:
        """Wait until a GPU has fetched the parameters that are on the host, which may change from
        now on. If backward follows, its gradients imply it."""
        if self.device.type == "cuda" and any(t.layout.host for t in self.program.parameters):
            torch.cuda.current_stream(self.device).synchronize()

    def _await_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Wait until gradients that a GPU stores on the host have arrived there."""
        if self.device.type == "cuda" and any(x is not None and not x.is_cuda for x in gradients):
            torch.cuda.current_stream(self.device).synchronize()
        return gradients

    def as_given(self, gradient: Tensor | None, border: ProgramTensor) -> Tensor | None:
        """Return the gradient of an input of the batch in the form of the input: whole, or this
        rank's part."""
        if gradient is None or self.batch == "global":
            return gradient
        return self._part(gradient, border)

    def _localize(self, x: Tensor, position: int) -> Tensor:
        border = self.program.inputs[position]
        return x if self.batch == "local" or border.crosses else self._part(x, border)

    def _part(self, x: Tensor, border: ProgramTensor) -> Tensor:
        sizes, coordinate = [g.size for g in self.groups], [g.coordinate for g in self.groups]
        return local_part(x, border.layout, sizes, border.view, coordinate).contiguous()

    def _graph(self, phase: str, absent: frozenset[int] = frozenset()) -> Boxed:
        assert not self.program.orders, "graphs are written in their order before they run"
        key = f"{phase} without {sorted(absent)}" if absent else phase
        if key not in self._graphs:
            bound = bind(self._source(phase, absent), self.groups, self.device.type)
            if phase == "inference":
                bound.graph = without_saved(bound.graph, self.program.num_saved)
            self._graphs[key] = (
                box_module(bound) if self._backend == "eager" else _compile_module(bound)
            )
        return self._graphs[key]

    def _source(self, phase: str, absent: frozenset[int] = frozenset()) -> fx.GraphModule:
        program = self.program
        if absent:
            assert phase == "backward", "sums are written by adding to zeros"
            given = [name for _, name in tangent_names(program)]
            return LazyGraphModule(
                program.backward,
                without(program.backward.graph, given, [given[place] for place in absent]),
            )
        if phase == "first":
            return _write_sums(program.backward)
        source = {"backward": program.backward, "begin": program.begin, "end": program.end}.get(
            phase, program.forward
        )
        assert source is not None, "graphs of the step are there where the program accumulates"
        return source


def gather(local: Tensor, layout: Layout, groups: Groups, shape: Sequence[int]) -> Tensor:
    """Return the whole tensor on every rank.

    Partial sums are reduced first, then the shards of each dim are joined from the innermost axis
    outwards.

    Args:
        local: this rank's part. layout: its layout. groups: this rank's group along each mesh axis.
            shape: of the whole tensor.
    """
    with use_groups(groups):
        for axis, placement in enumerate(layout.placements):
            if isinstance(placement, Partial):
                local = all_reduce(local, placement.reduce_op, axis)
        for axis in reversed(layout.order):
            placement = layout.placements[axis]
            if isinstance(placement, Shard):
                uneven = shape[placement.dim] % layout.num_shards(
                    placement.dim, [g.size for g in groups]
                )
                local = all_gather(
                    local, placement.dim, axis, shape[placement.dim] if uneven else None
                )
    return local


def usable_backend(backend: Backend) -> Backend:
    """Return the backend; eager, with a warning, if Inductor has no C++ compiler."""
    if backend not in ("eager", "inductor"):
        raise RuntimeStateError(f"unknown backend {backend!r}", remedy='use "eager" or "inductor"')
    if backend == "inductor" and not any(
        shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")
    ):
        warnings.warn(
            'backend="inductor" needs a C++ compiler, but none was found: running eagerly',
            stacklevel=2,
        )
        return "eager"
    return backend


class _BoxedCode(fx.graph.CodeGen):
    """Generates code that takes its placeholders as one list, and empties it, so that no caller
    keeps them alive."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """Return the head of the generated function."""
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
        return f"def forward(self, boxed){maybe_return_annotation}:{unpack}\n    boxed.clear()"


def box_module(graph_module: fx.GraphModule) -> Boxed:
    """Return the graph module as a function of one list, which it empties."""
    graph_module.graph.set_codegen(_BoxedCode())
    graph_module.recompile()
    return graph_module


def use_private_cache() -> None:
    """Have Inductor keep the code that it compiles, and loads again, in a folder that only the
    current user can write to.

    Its own default is a folder of a known name among the system's temporary files, where another
    user may have been first.

    Raises:
        RuntimeStateError: if the folder cannot be made.
    """
    named = os.environ.get(_INDUCTOR_CACHE)
    wanted = Path(
        named
        or Path(tempfile.gettempdir()) / f"autopar-inductor-{getattr(os, 'getuid', os.getpid)()}"
    )
    try:
        found = private_folder(
            wanted,
            "code that Inductor compiles",
            f"choose a private folder: {_INDUCTOR_CACHE}=FOLDER",
        )
    except OSError as error:
        what, remedy = (
            f"Inductor's cache cannot be written: {error}",
            f"choose another folder: {_INDUCTOR_CACHE}=FOLDER",
        )
        raise RuntimeStateError(what, where=str(wanted), remedy=remedy) from error
    os.environ[_INDUCTOR_CACHE] = str(found)


def _compile_module(graph_module: fx.GraphModule) -> Boxed:
    use_private_cache()
    compiled: Any = torch.compile(
        _functional(graph_module), backend="inductor", fullgraph=True, dynamic=False
    )

    def run(operands: list[Any]) -> Any:
        """Empty the list and call the compiled function."""
        values = tuple(operands)
        operands.clear()
        return compiled(*values)

    return run


def _functional(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that writes into no operand by ``out=``, which Dynamo refuses for some strides,
    nor reduces one in place. Inductor finds by itself where it may write."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    in_new_memory = {in_place: other for other, in_place in IN_PLACE.items()}
    for node in graph.nodes:
        node.target = in_new_memory.get(node.target, node.target)
        form = functional_form(node.target) if node.op == "call_function" else None
        if form is not None and form[1]:
            node.target, without = form
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != without}
    return fx.GraphModule(graph_module, graph)


def _write_sums(source: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a backward graph that writes the sums that it would add to."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(source.graph, {}))
    for node in graph.nodes:
        node.target = FIRST.get(node.target, node.target)
    return LazyGraphModule(source, graph)


def without_saved(source: fx.Graph, num_saved: int) -> fx.Graph:
    """Return a copy of a forward graph that computes only outputs and new buffers, for runs without
    backward."""
    graph = fx.Graph()
    results = graph.graph_copy(source, {})
    graph.output(tuple(results[: len(results) - num_saved]))
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.target in (linear_cross_entropy, ON_GPU[linear_cross_entropy]) and all(
            user.args[1] == 0 for user in node.users
        ):
            node.kwargs = {**node.kwargs, "gradients": False}
    return graph


# --------------------------------------------------------------------------------------------------
# What a call of stages returns on every rank, and the tangents of a loss outside of the model.


@dataclass(frozen=True, slots=True)
class Returned:
    """What a pipeline's call returns.

    Attributes:
        outputs: the returned ones, of the whole batch. how: how microbatches' outputs are put
            together.
        waits: whether all forwards run first, because backward begins with the user's own loss, or
            does not run.
    """

    outputs: tuple[ProgramTensor, ...]
    how: Microbatches
    waits: bool

    @property
    def handed_bytes(self) -> int:
        """Bytes that the stages that compute the outputs send to all others once a step. A loss is
        not counted."""
        return sum(_bytes(t) for t in self.outputs if not t.is_loss)


def is_returned(output: ProgramTensor, outputs: Outputs) -> bool:
    """Return whether several stages, or microbatches, return an output: all of them with
    ``"full"``, else the loss."""
    return outputs == "full" or output.is_loss


def parts_of(tangents: Mapping[str, Tensor], how: Microbatches) -> list[dict[str, Tensor]]:
    """Return each microbatch's tangents by output path, from those of the whole batch's outputs."""
    found: list[dict[str, Tensor]] = [{} for _ in range(how.num)]
    for path, whole in tangents.items():
        for mine, value in zip(found, how.tangents(path, whole), strict=True):
            mine[path] = value
    return found


def _bytes(tensor: ProgramTensor) -> int:
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size
