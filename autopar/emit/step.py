"""The graphs at the begin and at the end of a step of several microbatches.

``begin`` takes the local parameters as they rest and returns them as microbatches read them; ``end`` takes the sums of gradients and
returns gradients as parameters rest, in the parameters' dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.capture.trace import Parameter, Trace
from autopar.collective import Collective
from autopar.emit.calls import CALLS, Moved
from autopar.emit.choices import PlanIndex, parameter_key, storage_key
from autopar.emit.job import CAST
from autopar.errors import ChangedPlanError
from autopar.kernels.sums import sum_dtype
from autopar.layout import Layout
from autopar.plans import Communication
from autopar.run.lazy_graph import LazyGraphModule
from autopar.run.program import Program, ProgramTensor

PHASE = "step"
_cast = torch.ops.aten._to_copy.default
_Emitted = list[tuple[str, str, Collective]]


def with_step(program: Program, trace: Trace, index: PlanIndex) -> Program:
    """The program of a microbatch with what comes before the first and after the last.

    Raises:
        EmissionError: where the plan has no collectives that lead from one layout to another.
    """
    emitted: _Emitted = []
    begin, end = [], []
    for p, tensor in zip(trace.parameters, program.parameters, strict=True):
        storage, wide = index.storage(p.name), sum_dtype(p.dtype)
        begin.append(_Passing(p, 0, storage, tensor.layout))
        if p.gradient is not None:
            end.append(_Passing(p, 1, index.chosen[parameter_key(p.name)].inputs[0].plain, storage, p.dtype if wide != p.dtype else None))
    parameters = tuple(replace(t, layout=each.source) for t, each in zip(program.parameters, begin, strict=True))
    sums = tuple(ProgramTensor(e.p.name, e.p.shape, e.p.view, sum_dtype(e.p.dtype), e.source) for e in end)
    return replace(
        program, parameters=parameters, begin=_Graph(program.mesh.shape, index, emitted).module(begin),
        end=_Graph(program.mesh.shape, index, emitted).module(end), sums=sums, accumulates=True,
        collectives=(*program.collectives, *emitted),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Passing:
    """A tensor on its way: `result` 0 is a parameter, 1 the sum of its gradients. `dtype`: what it is cast to at the end, if anything."""

    p: Parameter
    result: int
    source: Layout
    target: Layout
    dtype: torch.dtype | None = None


@dataclass
class _Graph:
    """One of the two graphs while it is built."""

    mesh_shape: tuple[int, ...]
    index: PlanIndex
    emitted: _Emitted
    graph: fx.Graph = field(default_factory=fx.Graph)

    def module(self, passing: Sequence[_Passing]) -> fx.GraphModule:
        """The graph in which all of these pass on."""
        here = [self.graph.placeholder(f"sum_{each.p.node}" if each.result else each.p.node) for each in passing]
        for node, each in zip(here, passing, strict=True):
            node.meta.update(key=storage_key(each.p.name), module=each.p.name, phase=PHASE, source="")
        self.graph.output(tuple(self._passed(node, each) for node, each in zip(here, passing, strict=True)))
        return LazyGraphModule({}, self.graph)

    def _passed(self, node: fx.Node, each: _Passing) -> fx.Node:
        if each.p.is_narrowed and not each.result:
            node = self._cast(node, each.p.compute_dtype, each.p.name, CAST)
            node.meta["on_host"] = each.source.host
        for step in reversed(self._chain(each)):
            c, meta = step.collective, node.meta
            call, args = CALLS[c.kind](c, step.target)
            node = self.graph.call_function(call, (node, *args), self._length(each.p, step))
            moved = Moved(PHASE, storage_key(each.p.name), each.result, each.p.view, step.source, step.target)
            node.meta.update(meta, key=f"{storage_key(each.p.name)}/{c.kind}", collective=c, moved=moved)
            self.emitted.append((PHASE, storage_key(each.p.name), c))
        return node if each.dtype is None else self._cast(node, each.dtype, each.p.name, "/narrow")

    def _cast(self, node: fx.Node, dtype: torch.dtype, name: str, what: str) -> fx.Node:
        meta = {name: value for name, value in node.meta.items() if name not in ("collective", "moved")}
        node = self.graph.call_function(_cast, (node,), {"dtype": dtype})
        node.meta.update(meta, key=storage_key(name) + what)
        return node

    def _chain(self, each: _Passing) -> list[Communication]:
        """The plan's collectives, the last first."""
        key = storage_key(each.p.name)
        steps = self.index.steps.get((PHASE, (key, each.result)), {})
        chain: list[Communication] = []
        at = each.target
        while at != each.source:
            step = steps.get(at)
            if step is None or step in chain:
                when = "at the end" if each.result else "at the begin"
                what = f"{key} goes from {each.source} to {each.target} {when} of a step, and the plan does not say how"
                raise ChangedPlanError(what)
            chain.append(step)
            at = step.source
        return chain

    def _length(self, p: Parameter, step: Communication) -> dict[str, int]:
        """How long the dim is that a step joins, where its parts differ in length."""
        c = step.collective
        uneven = c.kind in ("all_gather", "all_to_all") and p.view[c.dim] % step.source.num_shards(c.dim, self.mesh_shape)
        return {"length": p.view[c.dim]} if uneven else {}
