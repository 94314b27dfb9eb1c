"""Inputs that describe the structure of a batch, for example sizes. If forward reads their values,
the graph is for these values. Values of data are not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError

SIZES = [[2, 2], [2, 4]]
OTHERS = [[1, 2], [2, 5]]


class Layer(nn.Module):
    """A layer that splits its result by sizes, centers each part and concatenates the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([part - part.mean(0) for part in self.linear(x).split(counts.tolist())])


class Net(nn.Module):
    def __init__(self, does: Callable[..., Tensor], num_layers: int = 1) -> None:
        super().__init__()
        self.layers, self.does = nn.ModuleList(Layer() for _ in range(num_layers)), does

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.does(self.layers, x, sizes)


def splits(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, sizes[:, 0] * sizes[:, 1])
    return x.square().mean()


def splits_by_tensors(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
    parts = layers[0].linear(x).split([rows * columns for rows, columns in sizes])
    return torch.stack([part[: sizes[0, 0]].std() for part in parts]).sum()


def branches(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
    y = layers[0].linear(x)
    if (sizes.prod(-1) > 7).any():
        y = y * 3
    return y.square().mean()


def numbers(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
    counts = sizes.prod(-1)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    within = torch.arange(counts.sum()) - starts
    return (layers[0].linear(x[: len(within)]) * within[:, None]).square().mean()


def batch(sizes: list[list[int]] = SIZES) -> tuple[Tensor, Tensor]:
    return torch.randn(
        12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ), torch.tensor(sizes)


def net(does: Callable[..., Tensor], num_layers: int = 1) -> Net:
    torch.manual_seed(0)
    return Net(does, num_layers).double()


@pytest.mark.parametrize("does", [splits, splits_by_tensors, branches, numbers])
def test_shapes_and_branches_may_depend_on_an_input_of_sizes(does: Callable[..., Tensor]) -> None:
    model = net(does)
    plan = autopar.plan(
        model,
        2,
        example_inputs=batch(),
        hardware="cpu-gloo",
        constraints=[autopar.constraints.fsdp()],
    )
    assert autopar.verify(plan, model, batch()).ok


@pytest.mark.slow
def test_equal_layers_that_read_sizes_are_folded() -> None:
    model = net(splits, num_layers=8)
    folded, full = (capture(model, batch(), fold=fold) for fold in (True, False))
    assert str(folded.folding).startswith("folded")
    assert folded.fingerprint == full.fingerprint


def test_each_set_of_sizes_has_its_own_program() -> None:
    model = net(splits)
    pm = autopar.compile(model, example_inputs=batch(), hardware="cpu-gloo")
    for sizes in (SIZES, OTHERS, SIZES):
        torch.testing.assert_close(pm(*batch(sizes)), model(*batch(sizes)))


def test_a_plan_is_refused_for_other_sizes_even_if_the_graph_is_the_same() -> None:
    model, others = net(splits), batch([[1, 4], [4, 2]])
    plan = autopar.plan(model, 2, example_inputs=batch(), hardware="cpu-gloo")
    with pytest.raises(autopar.errors.PlanError):
        autopar.verify(plan, model, others)


@pytest.mark.parametrize(
    "sizes",
    [
        torch.tensor([[4.0, 8.0]]),
        torch.tensor([[4, 8, 1, 1, 1]] * 3),
        torch.tensor([[4, 8]], device="meta"),
    ],
    ids=["floats", "tokens", "without values"],
)
def test_values_of_other_inputs_are_not_read(sizes: Tensor) -> None:
    def splits_first(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
        return torch.stack(
            [part.std() for part in layers[0].linear(x).split(sizes.reshape(-1)[:2].int().tolist())]
        ).sum()

    with pytest.raises(CaptureError, match="reads the value"):
        capture(net(splits_first), (batch()[0], sizes))


def test_values_that_depend_on_weights_are_not_read() -> None:
    def picks_by_weights(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
        return x[: (sizes[0, 0] + (layers[0].linear.weight[0, 0] > 0)).item()].std()

    with pytest.raises(CaptureError):
        capture(net(picks_by_weights), batch())


def test_masks_of_data_are_not_read() -> None:
    def picks(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
        return layers[0].linear(x)[sizes[:, 0] > 1].cumsum(0).sum()

    with pytest.raises(CaptureError, match="shape of a result"):
        capture(
            net(picks),
            (torch.randn(3, 4, dtype=torch.float64), torch.ones(3, 5, dtype=torch.int64)),
        )


def test_sizes_that_no_shape_depends_on_stay_data() -> None:
    def computes(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
        return (layers[0].linear(x) * sizes.sum()).square().mean()

    model = net(computes)
    assert not capture(model, batch()).settings


@pytest.mark.parametrize("options", [{"batch": "local"}, {"num_microbatches": 2}])
def test_sizes_are_refused_for_a_split_batch(options: dict[str, Any]) -> None:
    with pytest.raises(AutoparError, match="forward reads the values of '1'") as refused:
        autopar.plan(net(splits), 2, example_inputs=batch(), hardware="cpu-gloo", **options)
    assert refused.value.where is not None and refused.value.where.module == "layers.0"
    assert "split(counts.tolist())" in refused.value.where.source


def test_the_error_names_the_inputs_that_the_value_depends_on() -> None:
    def reads_tokens(layers: Any, x: Tensor, sizes: Tensor) -> Tensor:
        y = layers[0].linear(x)
        return y * 2 if (sizes > 3).any() else y

    with pytest.raises(
        CaptureError, match="branching; it depends only on the values of 'sizes'"
    ) as refused:
        capture(net(reads_tokens), (batch()[0], torch.arange(15).view(3, 5)))
    assert refused.value.remedy.endswith(
        "or pass the value that forward computes from 'sizes' as an argument"
    )
