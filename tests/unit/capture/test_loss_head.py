"""A trace with a loss computed by rows matches the original trace. If a loss cannot be computed by
rows, the reason is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo_small
from torch import Tensor, nn
from torch.nn import functional

from autopar import ops
from autopar.capture import Trace, capture
from autopar.capture.chunked_loss import heads_of, loss_by_rows, with_loss_only
from autopar.capture.execute import execute
from autopar.capture.graphs import calls
from autopar.errors import CaptureError

VOCABULARY, WIDTH = 24, 8


class Head(nn.Module):
    """A model with an embedding, a linear layer, and a loss of the logits."""

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return only the loss."""
        return self.loss(self.head(self.table(ids)), labels)


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def traced(model: nn.Module, batch: dict[str, Tensor]) -> Trace:
    return capture(model, (), batch)


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :2] = -100
    return {"ids": ids, "labels": labels}


def results(
    trace: Trace,
    model: nn.Module,
    batch: dict[str, Tensor],
    dtype: torch.dtype | None = torch.float64,
) -> Any:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers()),
    }
    inputs = [batch[i.path] for i in trace.inputs]
    tangent = torch.tensor(3.0, dtype=dtype or trace.outputs[0].dtype)
    return execute(trace, tensors, tensors, inputs, tangent, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 3, 7, 1000])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_loss_and_gradients_by_rows_equal_those_of_the_whole_loss(kind: str, rows: int) -> None:
    model, batch = getattr(zoo_small, kind)()
    whole = with_loss_only(traced(model, batch))
    if kind == "bert":  # its head has a bias
        assert not heads_of(whole)[0]
        return
    by_rows = loss_by_rows(whole, rows)
    assert len(calls(by_rows.graph, ops.linear_cross_entropy)) == 1 and not calls(
        by_rows.graph, ops.sum_exp, ops.cross_entropy_backward
    )
    (loss,), gradients, _ = results(whole, model, batch)
    (ours,), mine, _ = results(by_rows, model, batch)
    torch.testing.assert_close(ours, loss, rtol=1e-13, atol=0)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-13)


WIDENED: dict[str, Callable[[Tensor], Tensor]] = {
    "flattened, then widened": lambda x: x.flatten(0, -2).float(),  # as under autocast
    "widened, then flattened": lambda x: x.float().flatten(0, -2),
    "as they are": lambda x: x.flatten(0, -2),
}


@pytest.mark.parametrize("how", WIDENED)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_the_loss_by_rows_supports_reductions_and_dtypes(
    reduction: str, how: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = Head(
        lambda x, y: functional.cross_entropy(WIDENED[how](x), y.flatten(), reduction=reduction),
        dtype=dtype,
    )
    batch = tokens()
    whole = traced(model, batch)
    (loss,), gradients, _ = results(whole, model, batch, None)
    (ours,), mine, _ = results(loss_by_rows(whole, 4), model, batch, None)
    torch.testing.assert_close(ours, loss, rtol=tolerance, atol=0)
    for name, gradient in gradients.items():
        assert mine[name].dtype == dtype
        torch.testing.assert_close(
            mine[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max())
        )


def test_the_original_trace_is_unchanged() -> None:
    model, batch = Head(plain), tokens()
    trace = traced(model, batch)
    before = str(trace.graph)
    changed = loss_by_rows(trace, 2)
    assert str(trace.graph) == before and str(changed.graph) != before
    assert changed.fingerprint == trace.fingerprint
    assert len({n.meta["key"] for n in changed.graph.nodes}) == len(list(changed.graph.nodes))


def test_loss_alone_replaces_other_outputs_by_none() -> None:
    model, batch = zoo_small.gpt2()
    trace = traced(model, batch)
    alone = with_loss_only(trace)
    assert [o.path for o in trace.outputs] == ["loss", "logits"] and [
        o.path for o in alone.outputs
    ] == ["loss"]
    assert set(alone.constants.values()) == {None} and with_loss_only(alone) is alone
    (loss, _), gradients, _ = results(trace, model, batch)
    (ours,), mine, _ = results(alone, model, batch)
    assert torch.equal(ours, loss) and all(
        torch.equal(mine[name], g) for name, g in gradients.items()
    )


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "a bias": (
        Head(plain, bias=True),
        "the linear layer that computes the logits of head has a bias",
    ),
    "capped logits": (
        Head(lambda x, y: plain(30 * torch.tanh(x / 30), y)),
        "not by a linear layer",
    ),
    "weights of rows": (
        Head(
            lambda x, y: (
                functional.cross_entropy(x.flatten(0, -2), y.flatten(), reduction="none")
                * torch.arange(10.0)
            ).mean()
        ),
        "",  # torch decomposes it differently
    ),
    "float16": (Head(plain, dtype=torch.float16), "could overflow"),
    "a second reader": (Head(lambda x, y: plain(x, y) + 1e-3 * x.square().mean()), "also read by"),
    "a penalty of the normalizer": (
        Head(lambda x, y: plain(x, y) + 1e-3 * x.logsumexp(-1).square().mean()),
        "also read by",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_computed_by_rows_gives_the_reason(name: str) -> None:
    model, why = REFUSED[name]
    trace = traced(model, tokens())
    heads, refusals = heads_of(trace)
    assert not heads and (any(why in refusal for refusal in refusals) if why else not refusals)
    with pytest.raises(CaptureError, match="no loss of the model can be computed by rows"):
        loss_by_rows(trace, 2)


def test_the_reason_for_returned_logits_names_the_option_that_drops_them() -> None:
    model, batch = zoo_small.llama()
    assert 'outputs="loss"' in heads_of(traced(model, batch))[1][0]
