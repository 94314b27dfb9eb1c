"""Losses that are scaled after a call that already ran backward: one stage with two microbatches
on one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError
from autopar.runtime.loss_scaling import (
    Backwards,
    LossScale,
    describe_factor,
    may_be_multiplied,
)
from autopar.runtime.pipeline_runtime import StageCalls

TINY, SCALE = 1e-7, 2.0**24


class Net(nn.Module):
    def __init__(self, factor: float, noise: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(noise)
        self.factor, self.dtype = factor, dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=self.dtype == torch.float16):
            x = self.down(self.drop(torch.relu(self.up(x))))
        return ((x.float() - y) ** 2).mean() * self.factor


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 16, generator=generator)


def pair(
    *, factor: float = TINY, noise: float = 0.0, dtype: torch.dtype = torch.float16
) -> tuple[Any, Any]:
    """Return the plain and the compiled model. With `noise`, return two compiled models; the loss
    scale of the first is set before the call."""
    torch.manual_seed(0)
    plain = Net(factor, noise, dtype)
    made = [
        autopar.compile(
            copy.deepcopy(plain),
            {"gpu": 1},
            example_inputs=batch(),
            hardware="h100-sxm",
            num_microbatches=2,
        )
        for _ in range(1 + bool(noise))
    ]
    for module in made:
        module.manual_seed(3)
    if noise:
        made[0].loss_scale = SCALE
    return (made[0], made[1]) if noise else (plain, made[0])


def gradients(module: Any) -> list[Tensor]:
    found = [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in module.parameters()
    ]
    module.zero_grad()
    return found


def apart(wanted: list[Tensor], found: list[Tensor]) -> float:
    return max(
        float((x - y).abs().max() / x.abs().max().clamp(min=1e-30))
        for x, y in zip(wanted, found, strict=True)
    )


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A function that returns how many schedules ran since its last call."""
    count, step = [0], StageCalls.step

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return step(*args, **kwargs)

    def taken() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(StageCalls, "step", counting)
    yield taken


def test_a_step_runs_again_only_when_the_loss_factor_changes(
    num_steps: Callable[[], int],
) -> None:
    plain, module = pair()
    for factor, wanted in ((SCALE, 2), (SCALE, 1), (SCALE / 2, 2), (SCALE / 2, 1)):
        for model in (plain, module):
            (model(*batch()) * factor).backward()
        assert num_steps() == wanted
        assert apart(*map(gradients, (plain, module))) < 2e-3


def test_without_a_scaler_no_step_runs_again(num_steps: Callable[[], int]) -> None:
    for dtype in (torch.float16, torch.float32):
        plain, module = pair(factor=1.0, dtype=dtype)
        for model in (plain, module):
            model(*batch()).backward()
        assert num_steps() == 1 and apart(*map(gradients, (plain, module))) < 2e-3
    for factor in (0.25, 2.0**16, 0.0):  # in float32
        for model in (plain, module):
            (model(*batch()) * factor).backward()
        assert num_steps() == 1
        assert apart(*map(gradients, (plain, module))) < 1e-5


def test_a_repeated_step_uses_the_random_numbers_and_buffers_of_one_run(
    num_steps: Callable[[], int],
) -> None:
    told, untold = pair(noise=0.5)
    for module, steps in ((told, 1), (untold, 2)):
        first, second = module(*batch(1)), module(*batch(2))
        num_steps()
        (second * SCALE).backward()
        (first * SCALE).backward()
        assert num_steps() == (steps - 1) * 2
    assert told.random_state == untold.random_state
    assert apart(*map(gradients, (told, untold))) == 0.0


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 0.0])
def test_an_infinite_or_nan_loss_gives_such_gradients_and_does_not_change_the_scale(
    factor: float,
) -> None:
    plain, module = pair(factor=1.0)
    for step, each in enumerate((2.0**10, factor, 2.0**10)):
        for model in (plain, module):
            (model(*batch(step)) * each).backward()
        wanted, found = gradients(plain), gradients(module)
        assert [bool(x.isfinite().all()) for x in found] == [
            bool(x.isfinite().all()) for x in wanted
        ]
    assert apart(wanted, found) < 2e-3


def refusal(do: Callable[[], Any]) -> RuntimeStateError:
    with pytest.raises(RuntimeStateError) as caught:
        do()
    return caught.value


def test_a_step_that_cannot_be_repeated_is_refused_and_the_remedy_works() -> None:
    plain, module = pair()
    loss = module(*batch())
    with torch.no_grad():
        module.get_parameter("down.weight").mul_(1.5)
    assert "parameter 'down.weight' was changed" in refusal((loss * SCALE).backward).what
    x, y = batch()
    loss = module(x, y)
    x.add_(1.0)
    said = refusal((loss * SCALE).backward)
    assert (
        "input" in said.what
        and "set pm.loss_scale to the factor of the loss before the call" in said.remedy
    )
    with torch.inference_mode():
        made = batch()
    assert "torch.inference_mode" in refusal((module(*made) * SCALE).backward).what
    module.loss_scale = SCALE
    module.load_state_dict(plain.state_dict())
    x, y = batch()
    loss = module(x, y)
    x.add_(1.0)
    (loss * SCALE).backward()
    (plain(*batch()) * SCALE).backward()
    assert apart(*map(gradients, (plain, module))) < 2e-3


def test_an_unexpected_scale_after_buffers_changed_is_refused_and_the_remedy_works() -> None:
    """In float32 only a factor beyond the range of a scaler makes a step run again."""
    torch.manual_seed(0)
    module: Any = autopar.compile(
        Net(1.0, 0.5, torch.float32),
        {"gpu": 1},
        example_inputs=batch(),
        hardware="h100-sxm",
        num_microbatches=2,
    )
    said = refusal((module(*batch()) * 2.0**100).backward)
    assert (
        "buffers changed meanwhile" in said.what
        and said.remedy == "set pm.loss_scale = scaler.get_scale() before the first call"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    module.loss_scale = scaler.get_scale()
    for _ in range(2):
        scaler.scale(module(*batch())).backward()
    assert all(bool(x.isfinite().all()) for x in gradients(module))


def test_a_factor_that_changes_every_step_warns_once_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, module = pair()
    with caplog.at_level(logging.WARNING, "autopar"):
        for step in range(24):
            (module(*batch()) * (step + 2.0)).backward()
    assert (
        sum(
            "set pm.loss_scale to the whole factor" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )


def test_gradients_are_rescaled_only_if_that_is_exact() -> None:
    assert may_be_multiplied(1.0, 2.0**24, is_fp16=False) and not may_be_multiplied(
        1.0, 2.0**24, is_fp16=True
    )
    assert not may_be_multiplied(1.0, 2.0**100, is_fp16=False) and may_be_multiplied(
        0.3, 0.3000001, is_fp16=True
    )
    for value in (0.0, -1.0, float("nan"), float("inf"), "2"):
        with pytest.raises(RuntimeStateError, match="not a loss factor"):
            LossScale().user_factor = value  # type: ignore[assignment]


def test_the_factor_of_the_loss_is_described_but_a_gpu_is_read_only_in_some_backwards() -> None:
    backwards = Backwards()
    assert [backwards.begin() for _ in range(9)] == [n in (1, 2, 4, 8) for n in range(1, 10)]
    on_gpu = torch.empty((), device="meta")  # cannot be read
    assert describe_factor(on_gpu, is_turn=False) == ""
    with pytest.raises(RuntimeError):
        describe_factor(on_gpu, is_turn=True)
    assert (
        describe_factor(None, is_turn=True) == describe_factor(torch.ones(()), is_turn=True) == ""
    )
    for is_turn in (True, False):
        described = describe_factor(torch.tensor(2.5), is_turn=is_turn)
        assert described == " of the loss multiplied by 2.5"
