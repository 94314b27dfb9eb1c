"""Prints, logs and appends in forward, and custom functions that get one tensor twice, are
captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.execute import execute


class Net(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.up(x)).square().mean()


def prints(y: Tensor) -> Tensor:
    print("shape", y.shape, flush=True)
    print(f"mean {y.mean().item():.3f}", y.detach().amax())
    return y


def test_prints_of_forward_are_dropped_with_one_warning(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = capture(Net(prints), (torch.randn(3, 4),))
    assert not capsys.readouterr().out
    assert not any("max" in node.name for node in trace.graph.nodes)
    (record,) = caplog.records
    lines = [prints.__code__.co_firstlineno + 1, prints.__code__.co_firstlineno + 2]
    assert (
        record.getMessage()
        == f"forward prints ({', '.join(f'{__file__}:{line}' for line in lines)}); a compiled call"
        " does not"
    )


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float, c: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c)
        ctx.scale = scale
        return a * b * scale + c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b, _ = ctx.saved_tensors
        return (
            grads[0] * b * ctx.scale,
            3 * grads[0] * a * ctx.scale,
            None,
            grads[0] * 5,
        )  # all gradients differ, so that a lost one is detected


def test_a_custom_function_may_get_one_tensor_several_times() -> None:
    torch.manual_seed(0)
    model, batch = Net(lambda y: Product.apply(y, y, 2.0, y)), (torch.randn(4, 4),)  # type: ignore[no-untyped-call]
    plan = autopar.plan(
        model,
        2,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=[autopar.constraints.fsdp()],
    )
    assert autopar.verify(plan, model, batch).ok


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.seen = nn.Linear(4, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.seen.append(y.detach().mean())
        return y.square().mean()


def test_a_list_may_contain_values_of_an_earlier_call() -> None:
    model, x = Keeping(), torch.randn(3, 4)
    model(x)
    (made,), *_ = execute(capture(model, (x,)), dict(model.named_parameters()), {}, (x,))
    torch.testing.assert_close(made, model(x).detach())
