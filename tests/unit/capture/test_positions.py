"""Lookups by position: the graph matches the model with ops that can be split by samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import ops
from autopar.capture import capture, execute

aten = torch.ops.aten
N, ROWS, S, WIDTH = 4, 12, 5, 6
INDEXED = {aten.index.Tensor, aten.index_put.default}


class Model(nn.Module):
    """A model with one table and a function of the table and the batch."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        super().__init__()
        self.step = step
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.step(self.table, x, ids).sin().sum()


def targets(step: Callable[..., Tensor], **replaced: Tensor) -> set[Any]:
    """Check that outputs and gradients match the model, and return the ops of the trace."""
    torch.manual_seed(0)
    model = Model(step)
    batch = {
        "x": torch.randn(N, S, WIDTH, dtype=torch.float64),
        "ids": torch.randint(-S, S, (N,)),
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
    return {node.target for node in trace.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    "places",
    [
        lambda: torch.arange(S),
        lambda: torch.arange(S).unsqueeze(0).repeat(N, 1),
        lambda: torch.arange(2, 2 + S).expand(N, S),
        lambda: torch.arange(0, 2 * S, 2),
    ],
    ids=["each once", "repeated", "from two on", "every other"],
)
def test_table_rows_indexed_by_positions_become_lookups(places: Callable[[], Tensor]) -> None:
    found = targets(lambda table, x, ids: table[places()] * x)
    assert {ops.embedding, ops.embedding_backward} <= found and not INDEXED & found


def test_negative_positions_and_ids_of_the_batch_stay_index_ops() -> None:
    assert targets(lambda table, x, ids: table[torch.arange(-2, S - 2)] * x) >= INDEXED
    assert targets(lambda table, x, ids: table[ids].unsqueeze(1) * x) >= INDEXED


PICKS: dict[str, Callable[..., Tensor]] = {
    "a row": lambda table, x, ids: (x * table[:S])[torch.arange(N), ids],
    "an element": lambda table, x, ids: (x * table[:S]).sum(-1)[torch.arange(N), ids],
    "a matrix": lambda table, x, ids: (
        (x * table[:S]).unsqueeze(-1).expand(N, S, WIDTH, 2).cos()[torch.arange(N), ids]
    ),
    "the largest": lambda table, x, ids: (x * table[:S])[torch.arange(N), x.sum(-1).argmax(-1)],
}


@pytest.mark.parametrize("name", PICKS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_one_index_per_sample_becomes_a_gather_also_for_negative_indices(
    name: str, dtype: torch.dtype
) -> None:
    found = targets(PICKS[name], ids=torch.tensor([-1, 0, S - 1, -S], dtype=dtype))
    assert {aten.gather.default, aten.scatter_add.default} <= found and not INDEXED & found


@pytest.mark.parametrize(
    "step",
    [
        lambda table, x, ids: (x * table[:S])[torch.arange(N - 1), ids[1:]],
        lambda table, x, ids: (x * table[:S])[torch.arange(1), ids],
        lambda table, x, ids: (x * table[:S])[torch.arange(1, N), ids[1:]],
        lambda table, x, ids: (x * table[:S])[torch.arange(N).unsqueeze(1), ids],
        lambda table, x, ids: (x * table[:S])[torch.arange(N).flip(0), ids],
    ],
    ids=["of some samples", "of the first", "of others", "of all by all", "of another sample"],
)
def test_other_index_patterns_stay_index_ops(step: Callable[..., Tensor]) -> None:
    assert targets(step) >= INDEXED
