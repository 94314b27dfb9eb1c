"""Embedding bags, masked rows and reassembled parts: the graph matches the model without ops that
need an unsharded dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import ops
from autopar.capture import Trace, capture, execute
from autopar.ops.formats import aten_op_of

aten = torch.ops.aten


class Model(nn.Module):
    """A model with one table and a function of the table and the batch."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        self.step = step
        self.table = nn.Parameter(torch.randn(12, 6, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.step(self.table, x, ids).pow(2).sum()


def captured(step: Callable[..., Tensor], **replaced: Tensor) -> Trace:
    """Check that outputs and gradient match the model, and return the trace."""
    torch.manual_seed(0)
    model = Model(step)
    batch = {
        "x": torch.randn(4, 3, 6, dtype=torch.float64),
        "ids": torch.randint(0, 12, (4, 3)),
        **replaced,
    }
    trace = capture(model, (), batch)
    outputs, gradients = execute(
        trace, dict(model.named_parameters()), {}, [batch[entry.path] for entry in trace.inputs]
    )[:2]
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(outputs[0], loss.detach())
    torch.testing.assert_close(gradients["table"], model.table.grad)
    return trace


def targets(trace: Trace) -> set[Any]:
    return {aten_op_of(node.target) for node in trace.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_equal_length_become_lookups_and_a_reduction(mode: str) -> None:
    found = targets(
        captured(lambda table, x, ids: F.embedding_bag(ids, table, mode=mode) * x[:, 0])
    )
    assert {ops.embedding, ops.embedding_backward} <= found
    assert not {aten._embedding_bag.default, aten._embedding_bag_backward.default} & found


@pytest.mark.parametrize(
    "settings", [{"mode": "max"}, {"padding_idx": 3}, {"mode": "sum", "scale_grad_by_freq": True}]
)
def test_unsupported_bags_stay_unchanged(settings: dict[str, Any]) -> None:
    assert aten._embedding_bag.default in targets(
        captured(lambda table, x, ids: F.embedding_bag(ids, table, **settings) * x[:, 0])
    )


def test_bags_with_offsets_from_the_batch_stay_unchanged() -> None:
    trace = captured(
        lambda table, x, ids: F.embedding_bag(
            ids.flatten(), table, x.abs().long()[:, 0, 0].cumsum(0) * 0, mode="sum"
        )
    )
    assert aten._embedding_bag.default in targets(trace)


@pytest.mark.parametrize("expanded", [False, True])
def test_rows_scattered_by_a_mask_become_lookups(expanded: bool) -> None:
    def step(table: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        mask = (ids % 2 == 0).unsqueeze(-1)
        return x.masked_scatter(mask.expand_as(x) if expanded else mask, table * 2) * x.cos()

    found = targets(captured(step, ids=torch.tensor([[1, 0, 2], [3, 5, 7], [4, 4, 4], [1, 1, 6]])))
    assert ops.embedding in found
    assert not {aten.masked_scatter.default, aten.masked_scatter_backward.default} & found


def test_elements_scattered_by_a_mask_stay_unchanged() -> None:
    trace = captured(lambda table, x, ids: x.masked_scatter(x > 0, table.repeat(2, 1)))
    assert aten.masked_scatter.default in targets(trace)


_PARTS = {
    aten.select.int,
    aten.select_backward.default,
    aten.unbind.int,
    aten.cat.default,
    aten.stack.default,
}


@pytest.mark.parametrize(
    "loop",
    [
        lambda y: torch.cat([y[i] for i in range(4)]),
        lambda y: torch.stack([y[i] for i in range(4)]),
        lambda y: torch.stack(y.unbind(1), 1),
        lambda y: torch.cat([y[:, :1], y[:, 1:2], y[:, 2:]], 1),
    ],
    ids=["entries one after the other", "entries stacked", "entries of another dim", "slices"],
)
def test_a_tensor_split_and_reassembled_is_the_tensor(loop: Callable[[Tensor], Tensor]) -> None:
    assert not _PARTS & targets(captured(lambda table, x, ids: loop(table[:4, None] * x) * 3))


def test_stacked_slices_become_a_view() -> None:
    assert aten.stack.default not in targets(
        captured(lambda table, x, ids: torch.stack([(y := table[:4, None] * x)[:2], y[2:]]) * 3)
    )


@pytest.mark.parametrize(
    "loop",
    [
        lambda y: torch.stack([y[i] for i in (0, 1, 3, 2)]),
        lambda y: torch.stack([y[i] for i in range(3)]),
        lambda y: torch.stack([y[i] for i in range(3)], 1),
        lambda y: torch.stack([y[0], y[1], y[2], y[2]]),
        lambda y: y[0] + y[1] + y[2] + y[3] + y[3],
    ],
    ids=["another order", "one is missing", "along another dim", "one twice", "a sum"],
)
def test_parts_reassembled_differently_stay_unchanged(loop: Callable[[Tensor], Tensor]) -> None:
    assert aten.select.int in targets(captured(lambda table, x, ids: loop(table[:4, None] * x) * 3))


def test_as_strided_that_reads_a_contiguous_tensor_in_order_becomes_a_view() -> None:
    found = targets(
        captured(lambda table, x, ids: (table * 2).as_strided((6, 12), (12, 1)) * x.sum())
    )
    assert aten.as_strided.default not in found and aten.view.default in found


@pytest.mark.parametrize(
    ("size", "stride"), [((6, 12), (1, 6)), ((6, 6), (6, 1)), ((10, 6), (6, 1))]
)
def test_as_strided_with_other_strides_stays_unchanged(
    size: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    trace = captured(lambda table, x, ids: (table * 2).as_strided(size, stride) * x.sum())
    assert aten.as_strided.default in targets(trace)


def test_bags_become_lookups_in_inference() -> None:
    trace = capture(
        nn.EmbeddingBag(10, 4, mode="sum"), (torch.tensor([[1, 2, 3], [0, 9, 9]]),), inference=True
    )
    targets = {node.target for node in trace.graph.nodes}
    assert ops.embedding in targets and not any(
        "embedding_bag" in str(target) for target in targets
    )
