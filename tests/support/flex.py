"""Models with flex attention of torch, one for each way in which its functions read tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

from autopar.capture.dynamo.flex_attention import SCALARS, text_of

BATCH, LENGTH, HEADS, KEY_HEADS, WIDTH = 4, 16, 4, 2, 8
Call = dict[str, Any]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attention(nn.Module):
    """Grouped heads with named score and mask functions. Captured tensors are parameters, buffers
    or inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query = nn.Linear(32, HEADS * WIDTH, bias=False)
        self.key, self.value = (nn.Linear(32, KEY_HEADS * WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(HEADS * WIDTH, 32)
        self.bias = nn.Parameter(torch.randn(HEADS, 2 * LENGTH))
        self.cap = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))
        self.register_buffer("windows", torch.tensor([3, 5, 8, 16]))
        self.made = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (KEY_HEADS, WIDTH)).transpose(1, 2)
            for layer in (self.key, self.value)
        )
        settings = KINDS[self.kind](self, ids)
        result = flex_attention(q, k, v, enable_gqa=True, **settings)
        out = (
            result
            if isinstance(result, Tensor)
            else result[0] * torch.sigmoid(result[1].lse).unsqueeze(-1)
        )
        return x + self.out(out.transpose(1, 2).flatten(-2))


def _masked(
    mask: Callable[..., Tensor], batch: int | None = None, heads: int | None = None
) -> Call:
    return {"block_mask": create_block_mask(mask, batch, heads, LENGTH, LENGTH, device="cpu")}


def _documents(model: Any, ids: Tensor) -> Call:
    return _masked(and_masks(causal, lambda b, h, q, k: ids[b, q] == ids[b, k]), BATCH)


KINDS: dict[str, Callable[[Any, Tensor], Call]] = {
    "nothing": lambda model, ids: {},
    "causal": lambda model, ids: _masked(causal),
    "mask of init": lambda model, ids: {"block_mask": model.made},
    "sliding window": lambda model, ids: _masked(lambda b, h, q, k: (q >= k) & (q - k < 5)),
    "window of heads": lambda model, ids: _masked(
        lambda b, h, q, k: (q - k).abs() < model.windows[h], heads=HEADS
    ),
    "documents": _documents,
    "samples that differ": lambda model, ids: _masked(lambda b, h, q, k: q + b >= k, BATCH),
    "alibi": lambda model, ids: {
        "score_mod": lambda s, b, h, q, k: s + model.slopes[h] * (k - q),
        **_masked(causal),
    },
    "soft cap": lambda model, ids: {
        "score_mod": lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
        **_documents(model, ids),
    },
    "learnt cap": lambda model, ids: {
        "score_mod": lambda s, b, h, q, k: model.cap * torch.tanh(s / model.cap)
    },
    "relative bias": lambda model, ids: {
        "score_mod": lambda s, b, h, q, k: s + model.bias[h, q - k + LENGTH],
        "scale": 0.7,
    },
    "bias of queries": lambda model, ids: {
        "score_mod": lambda s, b, h, q, k: s * model.bias[h, q + 1] + model.bias[0, k]
    },
    "sums": lambda model, ids: {"return_aux": AuxRequest(lse=True), **_documents(model, ids)},
    "nothing seen": lambda model, ids: _masked(lambda b, h, q, k: (q > 3) & (q >= k)),
}


class Model(nn.Module):
    """Layers and a loss."""

    def __init__(self, kind: str, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(kind) for _ in range(num_layers))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, ids)
        return x.square().mean()


def model_of(kind: str, num_layers: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(kind, num_layers).double()


def batch_of() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "x": torch.randn(BATCH, LENGTH, 32).double(),
        "ids": torch.randint(0, 3, (BATCH, LENGTH)).sort(-1).values,
    }


def flex_functions(
    kind: str, batch: int, heads: int, queries: int, keys: int
) -> tuple[str, str, list[Tensor]]:
    """Return the texts of a score and a mask function for the given numbers of samples, heads,
    queries and keys, and the captured tensors."""
    score, mask, tensors = FUNCTIONS[kind](batch, heads, queries, keys)
    every = dict(enumerate(tensors))
    return (
        text_of(score, SCALARS, torch.float64, every),
        text_of(mask, SCALARS[1:], torch.bool, every),
        tensors,
    )


def _plain_score(
    s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captured: Tensor
) -> Tensor:
    return s


def _everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *captured: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


def _real(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape).double() / 8


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 3, shape)


Functions = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
FUNCTIONS: dict[str, Callable[[int, int, int, int], Functions]] = {
    "nothing": lambda b, h, q, k: (_plain_score, _everything, []),
    "causal": lambda b, h, q, k: (_plain_score, lambda b, h, i, j: i >= j, []),
    "sliding window": lambda b, h, q, k: (_plain_score, lambda b, h, i, j: (i - j).abs() < 2, []),
    "documents": lambda b, h, q, k: (
        _plain_score,
        lambda b, h, i, j, own, other: own[b, i] == other[b, j],
        [_ids(b, q), _ids(b, k)],
    ),
    "one tensor of documents": lambda b, h, q, k: (
        _plain_score,
        lambda b, h, i, j, ids: ids[b, i] == ids[b, j],
        [_ids(b, max(q, k))],
    ),
    "alibi": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s + t[h] * (i - j),
        lambda b, h, i, j, t: i + 1 >= j,
        [_real(h)],
    ),
    "soft cap": lambda b, h, q, k: (
        lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0),
        _everything,
        [],
    ),
    "learnt cap": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: t * torch.tanh(s / t),
        _everything,
        [_real().abs() + 1],
    ),
    "bias of all": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s + t[b, h, i, j],
        _everything,
        [_real(b, h, q, k)],
    ),
    "bias of heads and places": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s + t[h, i - j + k],
        _everything,
        [_real(h, q + k)],
    ),
    "a dim read in two ways": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s * t[b, h] + t[0, h],
        _everything,
        [_real(b, h)],
    ),
    "heads in groups": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s + t[h // 2],
        _everything,
        [_real(h)],
    ),
    "samples that differ": lambda b, h, q, k: (
        _plain_score,
        lambda b, h, i, j: (i + b) % 3 != j % 3,
        [],
    ),
    "some see nothing": lambda b, h, q, k: (
        _plain_score,
        lambda b, h, i, j: (i > 0) & (i >= j),
        [],
    ),
    "casts": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s + t[h.long(), i.long()] * (j.double() - i),
        _everything,
        [_real(h, q)],
    ),
    "more rows than queries": lambda b, h, q, k: (
        lambda s, b, h, i, j, t: s + t[i],
        _everything,
        [_real(2 * q)],
    ),
}
FLEX_KINDS = tuple(FUNCTIONS)
