"""A small model and the same model as a handwritten distributed `Program`, for tests of the
runtime.

The mesh has the axes data and tensor. `first.weight` is sharded over both axes in reverse order,
`second.weight` over both dims, `fused.weight` is viewed as [d, 3, e] and sharded along e, `scale`
is frozen, and `tied.weight` is another name of `first.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.capture import Trace
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.kernels.collectives import all_gather, all_reduce, reduce_scatter
from autopar.program.program import Program, ProgramTensor, StageProgram

BATCH, WIDTH, HIDDEN, FUSED = 8, 8, 16, 4
aten = torch.ops.aten
DATA, TENSOR = 0, 1


class Weight(nn.Module):
    def __init__(self, *shape: int, bias: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / 3)
        if bias:
            self.bias = nn.Parameter(torch.randn(bias))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = Weight(WIDTH, 3 * FUSED)
        self.first = Weight(WIDTH, HIDDEN)
        self.second = Weight(HIDDEN, WIDTH, bias=WIDTH)
        self.tied = self.first
        self.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("offset", torch.randn(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, *, target: torch.Tensor) -> dict[str, Any]:
        y = torch.relu(x @ self.first.weight) @ self.second.weight + self.second.bias + self.offset
        u = (x @ self.fused.weight).view(-1, 3, FUSED)
        v = u[:, 0] * u[:, 1] + u[:, 2]
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        loss = (y - target).square().sum() / BATCH + self.scale * v.square().sum() / BATCH
        return {"loss": loss, "logits": y, "note": "text"}


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(BATCH, WIDTH, generator=generator),
        "target": torch.randn(BATCH, WIDTH, generator=generator),
    }


class _Builder:
    """A builder of graphs that adds ATen and step nodes by name."""

    def __init__(self, *placeholders: str) -> None:
        self.graph = fx.Graph()
        self.nodes = [self.graph.placeholder(name) for name in placeholders]

    def call(self, target: Any, *args: Any, **meta: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(meta)
        return node

    def product(self, factors: fx.Node, which: tuple[int, int]) -> fx.Node:
        return self.call(
            aten.mul.Tensor, *(self.call(aten.select.int, factors, 1, i) for i in which)
        )

    def module(self, results: list[fx.Node]) -> fx.GraphModule:
        self.graph.output(tuple(results))
        return fx.GraphModule(nn.Module(), self.graph)


def _mix(b: _Builder, u: fx.Node) -> fx.Node:
    return b.call(aten.add.Tensor, b.product(u, (0, 1)), b.call(aten.select.int, u, 1, 2))


def _forward(drop: str) -> fx.GraphModule:
    b = _Builder("fused", "first", "second", "bias", "scale", "mean", "offset", "x", "target")
    fused, first, second, bias, scale, mean, offset, x, target = b.nodes
    features = b.call(
        aten.relu.default, b.call(aten.mm.default, x, b.call(all_gather, first, 1, DATA))
    )
    partial = b.call(
        aten.mm.default,
        features,
        b.call(all_gather, second, 1, DATA),
        key="second/mm",
        module="second",
    )
    y = partial if drop == "logits" else b.call(all_reduce, partial, "sum", TENSOR)
    y = b.call(
        aten.add.Tensor, y, b.call(aten.add.Tensor, b.call(all_gather, bias, 0, DATA), offset)
    )
    u = b.call(aten.einsum.default, "bd,dke->bke", [x, b.call(all_gather, fused, 0, DATA)])
    v = _mix(b, u)
    mean_x = b.call(
        all_reduce,
        b.call(aten.div.Tensor, b.call(aten.sum.dim_IntList, x, [0]), BATCH),
        "sum",
        DATA,
    )
    new_mean = b.call(
        aten.add.Tensor, b.call(aten.mul.Tensor, mean, 0.9), b.call(aten.mul.Tensor, mean_x, 0.1)
    )
    diff = b.call(aten.sub.Tensor, y, target)
    near = b.call(aten.sum.default, b.call(aten.mul.Tensor, diff, diff))
    far = b.call(all_reduce, b.call(aten.sum.default, b.call(aten.mul.Tensor, v, v)), "sum", TENSOR)
    total = b.call(aten.add.Tensor, near, b.call(aten.mul.Tensor, far, scale))
    total = total if drop == "loss" else b.call(all_reduce, total, "sum", DATA)
    loss = b.call(aten.div.Tensor, total, BATCH, key="head/div", module="head")
    return b.module([loss, y, new_mean, x, features, diff, u, second, scale])


def _backward() -> fx.GraphModule:
    b = _Builder("x", "hidden", "diff", "u", "second", "scale", "tangent")
    x, features, diff, u, second, scale, tangent = b.nodes
    unit = b.call(aten.mul.Tensor, tangent, 2 / BATCH)
    v = _mix(b, u)
    gv = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, v, scale), unit)
    pair = [b.call(aten.mul.Tensor, gv, b.call(aten.select.int, u, 1, i)) for i in (1, 0)]
    gu = b.call(aten.stack.default, [*pair, gv], 1)
    g_fused = b.call(
        reduce_scatter, b.call(aten.einsum.default, "bd,bke->dke", [x, gu]), 0, "sum", DATA
    )
    gy = b.call(aten.mul.Tensor, diff, unit)
    g_bias = b.call(reduce_scatter, b.call(aten.sum.dim_IntList, gy, [0]), 0, "sum", DATA)
    g_second = b.call(
        reduce_scatter,
        b.call(aten.mm.default, b.call(aten.t.default, features), gy),
        1,
        "sum",
        DATA,
    )
    gh = b.call(aten.mm.default, gy, b.call(aten.t.default, b.call(all_gather, second, 1, DATA)))
    gh = b.call(aten.mul.Tensor, gh, b.call(aten.gt.Scalar, features, 0))
    g_first = b.call(
        reduce_scatter, b.call(aten.mm.default, b.call(aten.t.default, x), gh), 1, "sum", DATA
    )
    return b.module([g_fused, g_first, g_second, g_bias])


def _tensor(
    name: str,
    shape: tuple[int, ...],
    layout: str,
    view: tuple[int, ...] | None = None,
    **facts: Any,
) -> ProgramTensor:
    return ProgramTensor(name, shape, view or shape, torch.float32, Layout.parse(layout), **facts)


def program_of_stage(
    stage: StageProgram,
    *,
    in_spec: Any = None,
    out_spec: Any = None,
    constants: Mapping[int, Any] = MappingProxyType({}),
    plan_hash: str = "",
) -> Program:
    """Return a handwritten stage as a program, with a trace that has no graph."""
    trace = Trace(fx.Graph(), (), (), (), (), {}, in_spec, out_spec, constants, {}, "")
    return Program.of_one_stage(trace, stage, plan_hash)


def program(
    data: int = 2, tensor: int = 2, *, drop: str = "", plan_hash: str = "handwritten"
) -> Program:
    """Return the program of `Toy` on a data × tensor mesh. `drop` omits the reduction of
    ``"logits"`` or ``"loss"``."""
    trained: dict[str, Any] = {"requires_grad": True, "has_gradient": True}
    example = batch()
    _, in_spec = pytree.tree_flatten(((example["x"],), {"target": example["target"]}))
    _, out_spec = pytree.tree_flatten({"loss": 0, "logits": 0, "note": 0})
    stage = StageProgram(
        mesh=Mesh({"data": data, "tensor": tensor}),
        forward=_forward(drop),
        backward=_backward(),
        parameters=(
            _tensor("fused.weight", (WIDTH, 3 * FUSED), "S(0) S(2)", (WIDTH, 3, FUSED), **trained),
            _tensor(
                "first.weight",
                (WIDTH, HIDDEN),
                "S(1)#1 S(1)#0",
                aliases=("tied.weight",),
                **trained,
            ),
            _tensor("second.weight", (HIDDEN, WIDTH), "S(1) S(0)", **trained),
            _tensor("second.bias", (WIDTH,), "S(0) R", **trained),
            _tensor("scale", (), "R R"),
        ),
        buffers=(_tensor("mean", (WIDTH,), "R R"), _tensor("offset", (WIDTH,), "R R")),
        inputs=(
            _tensor("0", (BATCH, WIDTH), "S(0) R"),
            _tensor("target", (BATCH, WIDTH), "S(0) R"),
        ),
        outputs=(
            _tensor("loss", (), "R R", is_loss=True, has_gradient=True),
            _tensor("logits", (BATCH, WIDTH), "S(0) R"),
        ),
        num_saved=6,
        mutated=("mean",),
        collectives=(),
    )
    return program_of_stage(
        stage, in_spec=in_spec, out_spec=out_spec, constants={2: "text"}, plan_hash=plan_hash
    )


def reference(
    model: Toy, *, seed: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the outputs and gradients of the plain model."""
    model = model.to(dtype)
    values = {name: value.to(dtype) for name, value in batch(seed).items()}
    outputs = model(values["x"], target=values["target"])
    outputs["loss"].backward()
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
