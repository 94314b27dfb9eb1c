"""Tensor values that forward computes from plain numbers are known at capture. Reads of other
values are refused, or the values stay tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autopar
from autopar.capture import capture
from autopar.capture.dynamo import constants, python_forms
from autopar.errors import CaptureError

SIZES = [1, 2, 3]


class Net(nn.Module):
    """A model that passes the result of its layers and a plain list of sizes to `does`."""

    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers, self.does = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), does

    def forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.does(self.layers(x), sizes)


def splits(x: Tensor, sizes: Sequence[int]) -> Tensor:
    ends = nn.functional.pad(torch.tensor(sizes).cumsum(0), (1, 0))
    return torch.stack([part.std() for part in x.split((ends[1:] - ends[:-1]).tolist())]).sum()


def orders_by_windows(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Reorder rows by padded indices without the padding, as window attention does."""
    order = nn.functional.pad(torch.arange(len(x)), (0, 2), value=-100).view(2, 4).T.reshape(-1)
    return x[order[order != -100]].cumsum(0).square().mean()


def counts_in_place(x: Tensor, sizes: Sequence[int]) -> Tensor:
    counts = torch.zeros(3, dtype=torch.long)
    for number, size in enumerate(sizes):
        counts[number] = size
    counts -= 1
    return x[: counts.sum().item()].square().sum()


def branches(x: Tensor, sizes: Sequence[int]) -> Tensor:
    known = torch.tensor(sizes)
    if known.max() > 2 and not (known == 7).any():
        x = x * 3
    return x.square().mean()


def changes_what_it_picked(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Read the numbers before and after they change."""
    numbers = torch.tensor(sizes)
    rows = numbers[numbers > 1]
    before = x[rows].cumsum(0).mean()
    numbers = numbers * 2 - 1
    return before + x[numbers[numbers > 1]].cumsum(0).square().mean()


def repeats(x: Tensor, sizes: Sequence[int]) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    return x.new_zeros(3, 4).index_add(0, owner, x).square().mean()


def writes_to_what_it_picked(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Write to selected numbers. Their count stays known."""
    known = torch.tensor(sizes)
    rows = known[known > 1]
    rows += 1
    return x[rows].cumsum(0).square().sum()


@pytest.mark.parametrize(
    "does",
    [
        splits,
        orders_by_windows,
        counts_in_place,
        branches,
        changes_what_it_picked,
        repeats,
        writes_to_what_it_picked,
    ],
)
def test_shapes_and_branches_may_depend_on_tensors_of_plain_numbers(
    does: Callable[..., Tensor],
) -> None:
    torch.manual_seed(0)
    model, batch = Net(does).double(), (torch.randn(6, 4, dtype=torch.float64), SIZES)
    plan = autopar.plan(
        model,
        2,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=[autopar.constraints.fsdp()],
    )
    assert autopar.verify(plan, model, batch).ok


def writes_a_value(x: Tensor, sizes: Sequence[int]) -> Tensor:
    known = torch.tensor(sizes)
    known[0] = (x[0, 0] > 0).long()
    return x[: int(known.sum())].sum()


def writes_into_a_view(x: Tensor, sizes: Sequence[int]) -> Tensor:
    known = torch.arange(6)
    known.view(2, 3)[0].add_((x[0, :3] > 0).long())
    return x[: known[0].item()].sum()


@pytest.mark.parametrize("does", [writes_a_value, writes_into_a_view])
def test_a_tensor_with_unknown_values_written_to_it_is_no_longer_known(
    does: Callable[..., Tensor],
) -> None:
    with pytest.raises(CaptureError):
        capture(Net(does), (torch.randn(6, 4), SIZES))


def test_masks_of_very_long_sequences_are_not_evaluated_at_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "_MOST_WORK", 30)
    monkeypatch.setattr(constants, "_MOST_WORK_READ", 30)

    def masks(x: Tensor, sizes: Sequence[int]) -> Tensor:
        here = torch.arange(6)
        if (here[:, None] >= here)[0, 0]:
            x = x * 2
        return x.sum()

    with pytest.raises(CaptureError, match="branching"):
        capture(Net(masks), (torch.randn(6, 4), SIZES))
    monkeypatch.undo()
    capture(Net(masks), (torch.randn(6, 4), SIZES))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.tanh else made


MODE = Doubling()


def test_operators_under_a_torch_function_mode_are_captured_at_the_first_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def under_a_mode(x: Tensor, sizes: Sequence[int]) -> Tensor:
        with MODE:
            return (torch.tanh(x) * (x >= 0)).sum()

    monkeypatch.setattr(python_forms.builtin, "BUILTIN_TO_TENSOR_FN_MAP", {})
    monkeypatch.setattr(python_forms.builtin, "BUILTIN_TO_TENSOR_RFN_MAP", {})
    torch._dynamo.reset()
    model, batch = Net(under_a_mode), (torch.randn(6, 4), SIZES)
    plan = autopar.plan(model, 2, example_inputs=batch, hardware="cpu-gloo")
    assert autopar.verify(plan, model, batch).ok
