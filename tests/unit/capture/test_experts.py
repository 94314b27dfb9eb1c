"""Expert layers under capture: which functions of transformers are replaced by one op, and which
are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation

from autopar import ops
from autopar.capture import capture
from autopar.capture.hugging_face import _experts_as_one_op

E, H, F, T, K = 4, 6, 5, 7, 2
CONFIG = SimpleNamespace(_experts_implementation="batched_mm")


def experts(*, act: str = "SiLU", odd_gate: bool = False, **how: bool) -> nn.Module:
    """Return an expert layer as the models of transformers build it."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = E, getattr(nn, act)()
            shapes = (E, H, 2 * F), (E, F, H)
            up, down = (
                torch.randn(s if how.get("is_transposed") else (s[0], s[2], s[1])) for s in shapes
            )
            if how.get("has_gate", True):
                self.gate_up_proj = nn.Parameter(up)
            else:
                self.up_proj = nn.Parameter(up)
            self.down_proj = nn.Parameter(down)
            if how.get("has_bias"):
                self.gate_up_proj_bias, self.down_proj_bias = (
                    nn.Parameter(torch.randn(E, 2 * F)),
                    nn.Parameter(torch.randn(E, H)),
                )

        def forward(
            self, hidden: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor
        ) -> torch.Tensor:
            raise NotImplementedError

    if odd_gate:
        Experts._apply_gate = lambda self, x: x[..., :F].tanh() + x[..., F:]  # type: ignore[attr-defined]
    torch.manual_seed(0)
    made: nn.Module = use_experts_implementation(Experts, **how)(CONFIG)
    return made


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(T, H), torch.rand(T, E).topk(K).indices, torch.rand(T, K)


COMMON: dict[str, dict[str, Any]] = {
    "gated": {},
    "transposed": {"is_transposed": True},
    "ungated": {"has_gate": False},
    "transposed relu": {"is_transposed": True, "act": "ReLU"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "biases": {"has_bias": True},
    "a gate of its own": {"odd_gate": True},
    "another activation": {"act": "Tanh"},
    "interleaved": {"is_concatenated": False},
}


@pytest.mark.parametrize("kind", COMMON)
def test_supported_experts_run_as_one_op_with_the_result_of_transformers(kind: str) -> None:
    layer = experts(**COMMON[kind])
    before = type(layer).forward
    if kind == "ungated":  # without a gate, up returns 2 F features, and down reads them
        layer.down_proj = nn.Parameter(torch.randn(E, H, 2 * F))
    with _experts_as_one_op(layer):
        assert type(layer).forward is not before
        found = layer(*batch())
    assert type(layer).forward is before
    torch.testing.assert_close(found, batched_mm_experts_forward(layer, *batch()))


@pytest.mark.parametrize("kind", OTHERS)
def test_unsupported_experts_are_not_replaced(kind: str) -> None:
    layer = experts(**OTHERS[kind])
    before = type(layer).forward
    with _experts_as_one_op(layer):
        assert type(layer).forward is before


class Loss(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.router, self.layer = nn.Linear(H, E), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, ids = self.router(x).softmax(-1).topk(K)
        return self.layer(x, ids, gates).pow(2).mean()


def test_a_gated_weight_has_a_view_with_a_dim_for_its_two_parts() -> None:
    trace = capture(Loss(experts()), (torch.randn(T, H),))
    views = {p.name: (p.shape, p.view) for p in trace.parameters}
    assert views["layer.gate_up_proj"] == ((E, 2 * F, H), (E, 2, F, H))
    assert views["layer.down_proj"] == ((E, H, F), (E, H, F))
    assert [
        n.target for n in trace.graph.nodes if n.target in (ops.experts, ops.experts_backward)
    ] == [ops.experts, ops.experts_backward]


def test_a_gated_weight_with_another_reader_keeps_its_shape() -> None:
    class Both(Loss):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.layer.gate_up_proj.square().mean()  # type: ignore[operator, union-attr]

    trace = capture(Both(experts()), (torch.randn(T, H),))
    assert {p.name: p.view for p in trace.parameters}["layer.gate_up_proj"] == (E, 2 * F, H)
