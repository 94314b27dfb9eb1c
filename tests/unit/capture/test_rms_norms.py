"""RMS norms written as formulas are decomposed into ops. Similar formulas stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export

import autopar
from autopar import ops
from autopar.capture import Trace, capture
from autopar.capture.formulas import join_norms
from autopar.ops import blocks, norms

WIDTH, EPS = 10, 1e-5
Function = Callable[[Tensor, Tensor], Tensor]
PIECES = (ops.square_sum, ops.rms_norm, ops.rms_product, ops.rms_norm_backward)


class Model(nn.Module):
    """A model with a norm between two layers."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(6, WIDTH, dtype=dtype), nn.Linear(WIDTH, 6, dtype=dtype)
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=dtype) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x), self.weight)).square().sum()


def llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def t5(x: Tensor, weight: Tensor) -> Tensor:
    x = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + EPS)
    return weight * (x.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else x)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (
        wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + weight.float())
    ).type_as(x)


def _without_gradient(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return x * scale * weight


def _used_between(x: Tensor, weight: Tensor) -> Tensor:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return normed * weight + normed.tanh()


WRITTEN_OUT: dict[str, Function] = {
    "llama": llama,
    "t5": t5,
    "gemma": gemma,
    "a method and a square": lambda x, w: x.mul(
        x.square().mean(dim=-1, keepdim=True).add(EPS).rsqrt()
    ).mul(w),
    "a product with itself": lambda x, w: w * (torch.rsqrt(EPS + (x * x).mean(1, True)) * x),
    "divided by a root": lambda x, w: (
        x / torch.sqrt(torch.mean(x**2, dim=[-1], keepdim=True) + EPS) * w
    ),
    "a power of minus one half": lambda x, w: (
        x * torch.pow(x.pow(2).mean(-1, keepdim=True) + EPS, -0.5) * w
    ),
    "torch's own": lambda x, w: nn.functional.rms_norm(x, (WIDTH,), w, EPS),
    "torch's own, without a weight": lambda x, w: nn.functional.rms_norm(x, (WIDTH,), eps=EPS) + w,
    "no weight": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) + w,
    "used between": _used_between,
    "of what is transposed": lambda x, w: llama(x.t().contiguous().t(), w),
}
OTHERWISE: dict[str, Function] = {
    "a mean over rows": lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS) * w,
    "a sum": lambda x, w: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPS) * w,
    "a cube": lambda x, w: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + EPS) * w,
    "of another tensor": lambda x, w: (
        (x + 1.0) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w
    ),
    "two epsilons": lambda x, w: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[:1].square()) * w
    ),
    "multiplied by a root": lambda x, w: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w,
    "the root divided": lambda x, w: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) / x * w,
    "without gradient of its scale": _without_gradient,
    "a detached scale": lambda x, w: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS).detach() * w
    ),
    "epsilon of torch's own unknown": lambda x, w: nn.functional.rms_norm(x, (WIDTH,), w),
}


def traced(function: Function, dtype: torch.dtype = torch.float64) -> tuple[Model, Tensor, Trace]:
    torch.manual_seed(0)
    model, x = Model(function, dtype), torch.randn(8, 6, dtype=dtype)
    return model, x, capture(model, (x,))


def targets(trace: Trace) -> list[object]:
    return [node.target for node in trace.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("how", WRITTEN_OUT)
def test_an_rms_norm_formula_is_decomposed_with_the_same_result(how: str) -> None:
    model, x, trace = traced(
        WRITTEN_OUT[how], torch.float32 if how == "t5" else torch.float64
    )  # in float64, t5 rounds only the scale
    found = targets(trace)
    assert all(found.count(piece) == 1 for piece in PIECES)
    assert (ops.rms_weight_gradient in found) == (
        how not in ("no weight", "torch's own, without a weight", "used between")
    )
    assert not any(
        str(target).startswith(("aten.rsqrt", "aten.sqrt", "aten.mean")) for target in found
    )
    plan = autopar.plan(model, 2, example_inputs=(x,))
    assert autopar.verify(plan, model, (x,)).ok


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_similar_formula_stays_unchanged(how: str) -> None:
    model, x, trace = traced(OTHERWISE[how])
    assert not set(targets(trace)) & set(PIECES)
    plan = autopar.plan(model, 2, example_inputs=(x,))
    assert autopar.verify(plan, model, (x,)).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["llama", "t5", "gemma"])
def test_the_ops_round_where_the_model_rounds(how: str, dtype: torch.dtype) -> None:
    """In 16 bits, forward is bitwise equal to the formula. The gradients are rounded only once, so
    they are closer to the exact ones than those of the formula."""
    torch.manual_seed(1)
    function, shape = WRITTEN_OUT[how], (5, 7, WIDTH)
    x, weight, grad = ((3 * torch.randn(size)).to(dtype) for size in (shape, (WIDTH,), shape))
    (both,) = (node for node in joined(function, dtype).nodes if node.target is ops.normed)
    given = 1.0 + weight.float() if how == "gemma" else weight
    operands = [x.clone().requires_grad_(), given.clone().requires_grad_()]
    result, _ = ops.normed(*operands, *both.args[2:])

    written = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    formula = function(*written)
    assert (
        torch.equal(result, formula)
        if dtype.itemsize == 2
        else torch.allclose(result, formula, rtol=1e-6, atol=0)
    )
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    same = (
        exact[0]
        * torch.rsqrt(exact[0].pow(2).mean(-1, keepdim=True) + EPS)
        * (exact[1] + (how == "gemma"))
    )
    for each in (result, formula, same):
        each.backward(grad.to(each.dtype))
    for ours, theirs, best in zip(operands, written, exact, strict=True):
        error, allowed = ((g.grad.double() - best.grad).abs().max() for g in (ours, theirs))
        assert error <= 1.01 * allowed + (1e-5 if dtype.itemsize == 4 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: llama(x.float(), w.float()).bfloat16().float(),
        lambda x, w: (
            (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS))
            .bfloat16()
            .float()
            * w.float()
        ),
        lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).float() * w.float(),
    ],
    ids=["behind the weight", "before it", "computed so"],
)
def test_a_result_rounded_and_cast_back_stays_rounded(
    function: Function, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    x, weight = (3 * torch.randn(5, 7, WIDTH)).to(dtype), torch.randn(WIDTH).to(dtype)
    module = captured(function, x, weight)
    join_norms(module.graph)
    assert any(node.target is ops.normed for node in module.graph.nodes)
    module.recompile()
    ours, theirs = module(x, weight), function(x, weight)
    assert ours.dtype == theirs.dtype and torch.allclose(
        ours, theirs, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0
    )
    assert torch.equal(ours.bfloat16().float(), ours) == torch.equal(
        theirs.bfloat16().float(), theirs
    )


def captured(function: Function, x: Tensor, weight: Tensor) -> torch.fx.GraphModule:
    """Return the graph of torch functions of a norm."""

    class Norm(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return function(x, weight)

    return dynamo_graph_capture_for_export(Norm())(x, weight)


def joined(function: Function, dtype: torch.dtype) -> torch.fx.Graph:
    """Return the graph of torch functions of a norm after `join_norms`."""
    module = captured(function, torch.randn(5, 7, WIDTH).to(dtype), torch.randn(WIDTH).to(dtype))
    join_norms(module.graph)
    return module.graph


def test_a_norm_of_a_transposed_tensor_has_the_strides_of_the_graph() -> None:
    """The readers of the norm were captured for a contiguous tensor."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.weight = nn.Linear(8, 24), nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            heads = llama(self.up(x).view(3, 5, 4, 6).transpose(1, 2), self.weight)
            return (
                heads.reshape(3, 4, 30).square().mean()
                + heads.transpose(1, 2).reshape(15, 24).sum()
            )

    model, x = Heads(), torch.randn(3, 5, 8)
    plan = autopar.plan(model, 2, example_inputs=(x,))
    assert autopar.verify(plan, model, (x,)).ok


def test_a_norm_in_many_row_blocks_equals_that_in_one_block() -> None:
    x, grad = torch.randn(37, 3, 6, dtype=torch.float64), torch.randn(37, 3, 6, dtype=torch.float64)
    weight, settings = torch.rand(6, dtype=torch.float64), (6, EPS, torch.float64)

    def all_pieces() -> list[Tensor]:
        squares, product = (
            ops.square_sum(x, torch.float64),
            ops.rms_product(grad, x, weight, torch.float64),
        )
        normed = ops.rms_norm(x, squares, weight, *settings, torch.float64, torch.float64)
        d_x = ops.rms_norm_backward(grad, x, squares, product, weight, *settings)
        return [squares, product, normed, d_x, ops.rms_weight_gradient(grad, x, squares, *settings)]

    many = all_pieces()
    with mock.patch.object(norms, "row_blocks", lambda x: [slice(None)]):
        for some, whole in zip(many, all_pieces(), strict=True):
            assert torch.allclose(some, whole, rtol=1e-14, atol=1e-14)
    with mock.patch.object(blocks, "_BLOCK", 12), mock.patch.object(blocks, "_MOST_BLOCKS", 1000):
        for some, whole in zip(all_pieces(), many, strict=True):
            assert torch.allclose(some, whole, rtol=1e-14, atol=1e-14)


def test_the_operator_passes_opcheck() -> None:
    x, weight = torch.randn(3, 4, 6, requires_grad=True), torch.rand(6, requires_grad=True)
    settings = EPS, torch.float32, torch.float32, torch.float32
    torch.library.opcheck(ops.normed, (x, weight, *settings))
    torch.library.opcheck(ops.normed, (x, None, *settings))
