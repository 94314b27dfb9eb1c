"""The peak of live tensor bytes: measured on real tensors, predicted on fake ones, by the same count.

A storage counts from the operator that first shows it until it is freed; views share their storage. Kernels' own scratch
memory, and what the allocator keeps, are not in it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.capture._torch import FakeTensorMode
from autopar.kernels.collectives import fake_groups
from autopar.layout import local_shape
from autopar.run.executor import Batch, Executor, Outputs
from autopar.run.program import Program, ProgramTensor


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages made while it is active, and of those that are registered.

    Attributes:
        live_bytes: now. peak_bytes: the largest so far (see `reset_peak`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.finalize] = {}

    def register(self, tensors: Iterable[Any]) -> None:
        """Count tensors that exist already: parameters, buffers, the batch. What is no tensor is passed over."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._see(tensor)

    def reset_peak(self) -> None:
        """Begin a new peak at what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for finalizer in self._known.values():
            finalizer.detach()
        self._known.clear()

    def _see(self, tensor: Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = weakref.finalize(storage, self._free, key, num_bytes)
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        if self._known.pop(key, None) is not None:
            self.live_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Live tensor bytes of one step on one rank, without optimizer state.

    Attributes:
        peak_bytes: from the start of forward to the end of backward.
        resident_bytes: parameters, buffers and the batch, before forward.
        kept_bytes: what lives between forward and backward beyond these, outputs included.
        final_bytes: what is left after backward beyond these: gradients and outputs.
    """

    peak_bytes: int
    resident_bytes: int
    kept_bytes: int
    final_bytes: int


def trace_peak(
    program: Program, *, batch: Batch = "global", outputs: Outputs = "full", coordinate: tuple[int, ...] | None = None, train: bool = True
) -> PeakMemory:
    """Predict the memory of a step by running it on fake tensors, as `ParallelModule` does on real ones.

    Args:
        coordinate: the rank's place in the mesh, by default the origin.
        train: whether backward runs; else the forward of ``torch.no_grad()``.
    """
    return _run(program, LiveBytes(), batch, outputs, coordinate, train)


def _run(
    program: Program, memory: LiveBytes, batch: Batch, outputs: Outputs, coordinate: tuple[int, ...] | None = None, train: bool = True
) -> PeakMemory:
    groups = fake_groups(program.mesh, coordinate)
    place = tuple(group.coordinate for group in groups)
    executor = Executor(program, groups, batch=batch, outputs=outputs)
    with FakeTensorMode(), memory, torch.no_grad():
        parameters = [_empty(t, program, place) for t in program.parameters]
        buffers = [_empty(t, program, place) for t in program.buffers]
        given = [batch == "global" and not t.crosses for t in program.inputs]
        inputs = [
            torch.empty(t.shape, dtype=t.dtype) if whole else _empty(t, program, place)
            for t, whole in zip(program.inputs, given, strict=True)
        ]
        resting = parameters  # they rest beside what is gathered of them
        parameters, sums = executor.begin(resting), executor.zero_sums()
        resident = memory.live_bytes
        memory.reset_peak()
        results, saved = executor.forward(parameters, buffers, inputs, keep=train)
        kept = memory.live_bytes - resident
        gradients = []
        if train and any(t.has_gradient for t in (*program.parameters, *program.inputs)):
            # autograd, or the schedule, holds tangents until backward ends, and so does this name
            tangents = [torch.ones_like(r) for r, t in zip(results, program.outputs, strict=True) if t.has_gradient]
            gradients = executor.backward(saved, list(tangents), sums)
            del tangents
        final = memory.live_bytes - resident
        del gradients, sums, resting
    return PeakMemory(memory.peak_bytes, resident, kept, final)


@dataclass(frozen=True, slots=True)
class NodePeak:
    """The peak of live bytes while one node of a program ran."""

    phase: str
    node: fx.Node
    peak_bytes: int


def node_peaks(program: Program, *, batch: Batch = "global", outputs: Outputs = "full") -> tuple[NodePeak, ...]:
    """The peak while each node of a step runs, in order, without optimizer state. Counted as `trace_peak` does, whose peak is
    the largest of these but for what is sliced before the graphs run and gathered after."""
    memory = LiveBytes()
    nodes: list[tuple[str, fx.Node]] = []
    peaks: list[tuple[int, int]] = []  # (node that is about to run, peak since the one before was)

    def watch(number: int) -> None:
        peaks.append((number, memory.peak_bytes))
        memory.reset_peak()

    def watched(source: fx.GraphModule, phase: str) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(source.graph, {}))
        for node, original in zip(list(graph.nodes), source.graph.nodes, strict=True):
            if node.op in ("call_function", "output"):
                with graph.inserting_before(node):
                    graph.call_function(watch, (len(nodes),))
                nodes.append((phase, original))
        return fx.GraphModule(source, graph)

    forward, backward = watched(program.forward, "forward"), watched(program.backward, "backward")
    _run(replace(program, forward=forward, backward=backward), memory, batch, outputs)
    return tuple(NodePeak(*nodes[before], peak) for (before, _), (_, peak) in itertools.pairwise(peaks))


def _empty(tensor: ProgramTensor, program: Program, coordinate: tuple[int, ...]) -> Tensor:
    return torch.empty(local_shape(tensor.view, tensor.layout, program.mesh.shape, coordinate), dtype=tensor.dtype)
