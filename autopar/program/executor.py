"""Execution of a program on one rank: shard the inputs, run the forward graph, gather the outputs,
and run the backward graph.

The same executor runs on real tensors with process groups and on fake tensors with fake groups, so
that a trace of its memory is a prediction. To save memory, a graph takes its operands in one list,
empties the list, and frees every value after its last use. The executor keeps no reference to a
value that was passed to a graph.
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
# The backward graph of a call if the loss does not depend on some of its outputs.
#
# A backward graph is linear in its tangents. Values that depend only on absent tangents are not
# computed. Parameters that affect no other output therefore have no gradient, as in the plain
# model, and infinite derivatives cause no NaN (0 · ∞ is NaN). If one term of a sum depends only on
# absent tangents, the sum is replaced by the other term. If any other op combines values of absent
# and other tangents, the absent ones are zeros.

_aten = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.add.out)


def without(source: fx.Graph, tangents: Collection[str], absent: Collection[str]) -> fx.Graph:
    """Return a copy of a backward graph that does not compute results that depend only on absent
    tangents. The copy takes the same operands and returns None for these results.

    Args:
        source: the backward graph.
        tangents: the names of the placeholders of all tangents.
        absent: the names of those whose outputs do not affect the loss.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(source, {}))
    dependence = _TangentDependence.of(graph, tangents, absent)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SUMS and node not in dependence.gone:
            _keep_one_term(node, dependence.gone)
    end = next(iter(reversed(graph.nodes)))
    end.args = (tuple(None if result in dependence.gone else result for result in end.args[0]),)
    # fx never removes nodes that write into an operand, so unused nodes are removed here
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return graph


@dataclass(frozen=True, slots=True)
class UnusedGradients:
    """The part of a pipeline's backward that depends only on absent tangents. It is neither
    computed nor sent.

    Attributes:
        parameters: the parameters without a gradient.
        tangents: for each stage, the outputs without a tangent, including those that are sent to
            the next stage.
        gradients: for each stage, the inputs from the previous stage without a gradient.
    """

    parameters: frozenset[str]
    tangents: tuple[frozenset[str], ...]
    gradients: tuple[frozenset[str], ...]

    @staticmethod
    def of(program: Program, absent: Collection[str]) -> UnusedGradients:
        """Find the unused part if the loss does not depend on the outputs `absent`."""
        trace = program.trace
        ends = {o.tangent: o.path for o in trace.differentiable}
        dependence = _TangentDependence.of(
            trace.graph, ends, [tangent for tangent, path in ends.items() if path in absent]
        )
        names = {node.name for node in dependence.gone}
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
        return UnusedGradients(
            frozenset(name for name, node in trained.items() if node in dependence.gone),
            tangents,
            gradients,
        )


def tangent_names(program: StageProgram) -> list[tuple[str, str]]:
    """Return pairs of an output that has a tangent and the tangent's name in the trace, in the
    order of the backward graph's operands."""
    tangents = [
        str(node.target) for node in program.backward.graph.nodes if node.op == "placeholder"
    ][program.num_saved :]
    return list(zip((t.name for t in program.outputs if t.has_gradient), tangents, strict=False))


@dataclass(slots=True)
class _TangentDependence:
    """A classification of nodes by the tangents that they depend on.

    Attributes:
        following: the nodes that depend on a tangent.
        gone: the nodes that depend only on absent tangents.
        parts: for each bucket, which of its tensors depend only on absent tangents.
    """

    following: set[fx.Node] = field(default_factory=set)
    gone: set[fx.Node] = field(default_factory=set)
    parts: dict[fx.Node, tuple[bool, ...]] = field(default_factory=dict)

    @staticmethod
    def of(
        graph: fx.Graph, tangents: Collection[str], absent: Collection[str]
    ) -> _TangentDependence:
        """Classify the nodes of a graph.

        Args:
            graph: a backward graph, or the graph of a trace.
            tangents, absent: see `without`.
        """
        dependence = _TangentDependence()
        for node in graph.nodes:
            if node.op == "placeholder" and node.target in tangents:
                dependence.following.add(node)
                if node.target in absent:
                    dependence.gone.add(node)
            elif node.op == "call_function":
                dependence._follow(node)
        return dependence

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
    """Replace a sum by a copy of one term if the other term depends only on absent tangents. Later
    nodes may write into the copy."""
    terms = [term for term in node.args[:2] if isinstance(term, fx.Node)]
    needed = [term for term in terms if term not in gone]
    if (len(terms), len(needed)) != (2, 1) or node.kwargs.get("alpha", 1) != 1:
        return
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(
            _aten.clone.default, (needed[0],), {"memory_format": torch.contiguous_format}
        )
    copy.meta.update(node.meta)
    node.replace_all_uses_with(copy)


_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
Boxed = Callable[[list[Any]], Any]


class Executor:
    """Runs the program of a stage on one rank.

    Args:
        program: the program of the stage.
        groups: the process group, size and coordinate of this rank along each mesh axis.
        backend: ``"inductor"`` compiles the graphs at their first run. Without a C++ compiler, it
            warns and runs eagerly.
        batch: ``"global"`` if inputs are full tensors, ``"local"`` if they are this rank's shards.
        outputs: ``"full"`` gathers outputs; otherwise they stay local. The loss is always full.
        device: the type of the devices, for tensors that the graphs create.
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
            message = (
                'the plan stores tensors in host memory, but backend "inductor" does not support'
                " host copies"
            )
            raise RuntimeStateError(message, remedy='use backend="eager", or plan without offload')
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
            parameters, buffers: local tensors in the shapes of the graph.
            inputs: full or local tensors; see `batch`.
            keep: whether backward follows.

        Returns:
            The outputs and the saved values for backward. Without `keep` there are no saved values.
        """
        # A saved value may share memory with a buffer, which is written below.
        buffers_in = [b.clone() if i in self._mutated else b for i, b in enumerate(buffers)]
        operands = [*parameters, *buffers_in, *map(self._localize, inputs, range(len(inputs)))]
        del buffers_in
        results = list(self._graph("forward" if keep else "inference")(operands))
        if not keep:
            self._await_fetches()
        num_outputs, num_mutated = len(self.program.outputs), len(self._mutated)
        saved = results[num_outputs + num_mutated :]
        for position, value in zip(
            self._mutated, results[num_outputs : num_outputs + num_mutated], strict=True
        ):
            buffers[position].copy_(value)
        del results[num_outputs:]
        for position, border in enumerate(self.program.outputs):
            # Outputs are detached: a saved output must not refer to the autograd graph, which holds
            # the saved values.
            local = results[position].detach()
            is_gathered = border.is_loss or (self.outputs == "full" and not border.crosses)
            results[position] = (
                gather(local, border.layout, self.groups, border.view) if is_gathered else local
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
            saved: the saved values. The list is emptied.
            tangents: one per output that has a tangent. The list is emptied.
            sums: if the program accumulates gradients, one sum per trained parameter. Gradients are
                added to the sums, which are returned as the gradients.
            first: whether `sums` are uninitialized, so that they are overwritten.
            absent: the positions of absent tangents, for which zeros are passed. Gradients that
                depend only on these are None.

        Returns:
            The local gradients of trained parameters, then those of inputs that have a gradient.
        """
        # without these conditions, some sums might stay unwritten, or Inductor would compile twice
        if first and (absent or self._backend != "eager"):
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
        """Convert local parameters from their storage layouts to the operands of `forward`, before
        the first microbatch."""
        return (
            list(parameters)
            if self.program.begin is None
            else list(self._graph("begin")([*parameters]))
        )

    def new_sums(self) -> list[Tensor]:
        """Return uninitialized tensors for the sums of gradients; none if the program does not
        accumulate gradients."""
        sizes, place = [g.size for g in self.groups], [g.coordinate for g in self.groups]
        shapes = [local_shape(t.view, t.layout, sizes, place) for t in self.program.sums]
        return [
            torch.empty(shape, dtype=t.dtype, device=self.device)
            for shape, t in zip(shapes, self.program.sums, strict=True)
        ]

    def end(self, sums: list[Tensor]) -> list[Tensor]:
        """Convert sums to gradients in the storage layouts of parameters, after the last
        microbatch. `sums` is emptied."""
        assert self.program.end is not None, "the program accumulates"
        return self._await_gradients(list(self._graph("end")(sums)))

    def _await_fetches(self) -> None:
        """Wait until a GPU has fetched the parameters that are on the host, since the user may then
        change them. If backward follows, waiting for its gradients is sufficient."""
        if self.device.type == "cuda" and any(t.layout.host for t in self.program.parameters):
            torch.cuda.current_stream(self.device).synchronize()

    def _await_gradients(self, gradients: list[Tensor]) -> list[Tensor]:
        """Wait until gradients that a GPU stores on the host have been copied."""
        if self.device.type == "cuda" and any(x is not None and not x.is_cuda for x in gradients):
            torch.cuda.current_stream(self.device).synchronize()
        return gradients

    def as_given(self, gradient: Tensor | None, border: ProgramTensor) -> Tensor | None:
        """Return the gradient of an input of the batch in the form of the input: full, or this
        rank's shard."""
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
        assert not self.program.orders, "orders must be written into the graphs before they run"
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
            assert phase == "backward", "with absent tangents, sums are zeroed first"
            tangents = [name for _, name in tangent_names(program)]
            return LazyGraphModule(
                program.backward,
                without(program.backward.graph, tangents, [tangents[place] for place in absent]),
            )
        if phase == "first":
            return _write_sums(program.backward)
        source = {"backward": program.backward, "begin": program.begin, "end": program.end}.get(
            phase, program.forward
        )
        assert source is not None, "a program that accumulates gradients has begin and end graphs"
        return source


def gather(local: Tensor, layout: Layout, groups: Groups, shape: Sequence[int]) -> Tensor:
    """Return the full tensor on every rank. Partial sums are reduced first, then the shards of each
    dim are gathered from the innermost axis outwards.

    Args:
        local: this rank's shard.
        layout: the layout of the tensor.
        groups: this rank's group along each mesh axis.
        shape: the shape of the full tensor.
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
    """Return the backend, or eager with a warning if Inductor has no C++ compiler."""
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
    """Generates code that takes its operands as one list and empties the list, so that no caller
    keeps them alive."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """Return the first lines of the generated function."""
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = boxed" if names else ""
        return f"def forward(self, boxed){maybe_return_annotation}:{unpack}\n    boxed.clear()"


def box_module(graph_module: fx.GraphModule) -> Boxed:
    """Return the graph module as a function of one list of operands, which it empties."""
    graph_module.graph.set_codegen(_BoxedCode())
    graph_module.recompile()
    return graph_module


def use_private_cache() -> None:
    """Set the cache folder of Inductor to a folder that only the current user can write to.

    Inductor executes code from this folder. Its default is a known name in the system's temporary
    folder, which another user may have created first.

    Raises:
        RuntimeStateError: if the folder cannot be created.
    """
    named = os.environ.get(_INDUCTOR_CACHE)
    path = Path(
        named
        or Path(tempfile.gettempdir()) / f"autopar-inductor-{getattr(os, 'getuid', os.getpid)()}"
    )
    try:
        folder = private_folder(
            path,
            "code that Inductor compiles",
            f"choose a private folder: {_INDUCTOR_CACHE}=FOLDER",
        )
    except OSError as error:
        message, remedy = (
            f"Inductor's cache cannot be written: {error}",
            f"choose another folder: {_INDUCTOR_CACHE}=FOLDER",
        )
        raise RuntimeStateError(message, where=str(path), remedy=remedy) from error
    os.environ[_INDUCTOR_CACHE] = str(folder)


def _compile_module(graph_module: fx.GraphModule) -> Boxed:
    use_private_cache()
    compiled: Any = torch.compile(
        _functional(graph_module), backend="inductor", fullgraph=True, dynamic=False
    )

    def run(operands: list[Any]) -> Any:
        """Empty the list, and call the compiled function."""
        values = tuple(operands)
        operands.clear()
        return compiled(*values)

    return run


def _functional(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy without ``out=`` arguments and in-place reductions. Dynamo refuses ``out=`` for
    some strides, and Inductor plans in-place writes."""
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
    """Return a copy of a backward graph that overwrites the sums instead of adding to them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(source.graph, {}))
    for node in graph.nodes:
        node.target = FIRST.get(node.target, node.target)
    return LazyGraphModule(source, graph)


def without_saved(source: fx.Graph, num_saved: int) -> fx.Graph:
    """Return a copy of a forward graph for inference. It computes only outputs and new buffer
    values."""
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
# Outputs that a call of several stages returns on every rank, and tangents of a loss that is
# computed outside the model.


@dataclass(frozen=True, slots=True)
class ReturnedOutputs:
    """The outputs that a call of a pipeline returns.

    Attributes:
        outputs: the returned outputs of the batch.
        how: the microbatches, which define how their outputs are joined.
        waits: whether forward of all microbatches runs first, because the user computes the loss or
            backward does not run.
    """

    outputs: tuple[ProgramTensor, ...]
    how: Microbatches
    waits: bool

    @property
    def handed_bytes(self) -> int:
        """The bytes of outputs that stages broadcast to all other stages once per step, except the
        loss."""
        return sum(_bytes(t) for t in self.outputs if not t.is_loss)


def is_returned(output: ProgramTensor, outputs: Outputs) -> bool:
    """Return whether a call with several stages or microbatches returns an output: any output with
    ``"full"``, otherwise only the loss."""
    return outputs == "full" or output.is_loss


def parts_of(tangents: Mapping[str, Tensor], how: Microbatches) -> list[dict[str, Tensor]]:
    """Return the tangents of each microbatch, by output path.

    Args:
        tangents: the tangents of the batch's outputs, by path.
        how: the microbatches.
    """
    tangents_of_parts: list[dict[str, Tensor]] = [{} for _ in range(how.num)]
    for path, tangent in tangents.items():
        for mine, value in zip(tangents_of_parts, how.tangents(path, tangent), strict=True):
            mine[path] = value
    return tangents_of_parts


def _bytes(tensor: ProgramTensor) -> int:
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size
