"""What the emission of one plan works on: the trace, the mesh and the plan by keys, and what was emitted so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.capture.trace import Trace
from autopar.collective import Collective
from autopar.emit.choices import PlanIndex, TensorKey
from autopar.mesh import Mesh

Ref = tuple[str, int]  # trace node name, result index
CAST = "/cast"
"""Ends the key of the node that casts a parameter to the dtype in which it is read."""


def rests(node: fx.Node) -> bool:
    """Whether a node of a program is there from the start of its phase: what the graph is given, and casts of it."""
    return node.op == "placeholder" or node.meta.get("key", "").endswith(CAST)


@dataclass
class Job:
    """What both phases share."""

    trace: Trace
    mesh: Mesh
    index: PlanIndex
    placeholder_keys: dict[str, str]
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    output: fx.Node | None = None
    emitted: list[tuple[str, str, Collective]] = field(default_factory=list)
    crossing: frozenset[str] = field(init=False)  # the inputs that come from another stage

    def __post_init__(self) -> None:
        self.crossing = frozenset(i.node for i in self.trace.inputs if i.crosses)
        for node in self.trace.graph.nodes:
            self.nodes[node.name] = node
            if node.op == "output":
                self.output = node

    def results(self) -> list[fx.Node]:
        assert self.output is not None
        return list(self.output.args[0])  # type: ignore[arg-type]

    def value(self, ref: Ref) -> torch.Tensor:
        """The traced value, a fake tensor."""
        value = self.nodes[ref[0]].meta["val"]
        return value[ref[1]] if isinstance(value, tuple | list) else value

    def dtype(self, ref: Ref) -> torch.dtype:
        return self.value(ref).dtype

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return tuple(self.value(ref).shape)

    def key(self, ref: Ref) -> TensorKey:
        name, result = ref
        return self.placeholder_keys.get(name) or self.nodes[name].meta["key"], result
