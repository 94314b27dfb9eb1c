"""Modules and functions whose captures are compared with the plain model, by memory format:
attention, embeddings and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from format_cases import IMAGE, TOKENS, VOLUME, Case, Shape, ids, module, of
from torch import Tensor, nn

QUERIES = (2, 4, 6, 8)


def attended(**how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how)


def masked(make: Callable[[Tensor], Tensor], **how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q), **how)


def _seen(shape: Shape) -> Callable[[Tensor], Tensor]:
    return lambda q: (ids(4, *shape) > 0).index_fill(-1, torch.zeros(1, dtype=torch.long), True)


_QKV = (QUERIES, QUERIES, QUERIES)
ATTENTION: Mapping[str, Case] = {
    "attention": of(attended(), *_QKV),
    "attention causal": of(attended(is_causal=True), *_QKV),
    "attention scaled": of(attended(scale=0.3), *_QKV),
    "attention of a narrow value": of(attended(), QUERIES, QUERIES, (2, 4, 6, 5)),
    "attention of other keys": of(attended(is_causal=True), QUERIES, (2, 4, 9, 8), (2, 4, 9, 8)),
    "attention grouped": of(attended(enable_gqa=True), QUERIES, (2, 2, 6, 8), (2, 2, 6, 8)),
    "attention grouped causal": of(
        attended(enable_gqa=True, is_causal=True), QUERIES, (2, 2, 6, 8), (2, 2, 6, 8)
    ),
    "attention of tokens": of(attended(), TOKENS, TOKENS, TOKENS),
    "attention of long heads": of(attended(), *((2, 2, 5, 24),) * 3),
    "attention masked": of(masked(_seen((6, 6))), *_QKV),
    "attention masked by sample": of(masked(_seen((2, 1, 1, 6))), *_QKV),
    "attention masked by head": of(masked(_seen((2, 4, 6, 6))), *_QKV),
    "attention masked expanded": of(
        masked(lambda q: _seen((2, 1, 1, 6))(q).expand(2, 4, 6, 6)), *_QKV
    ),
    "attention biased": of(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), *_QKV, (6, 6)
    ),
    "attention biased by head": of(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        *_QKV,
        (2, 4, 6, 6),
    ),
    "attention biased by row": of(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        *_QKV,
        (1, 4, 6, 1),
    ),
    "attention of a constant bias": of(
        masked(lambda q: torch.arange(36.0, dtype=q.dtype).reshape(6, 6).T / 9), *_QKV
    ),
    "multihead": module(lambda: _Multihead(), TOKENS),
    "transformer layer": module(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), TOKENS
    ),
}


class _Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class _Table(nn.Module):
    def __init__(self, inner: nn.Module, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.read = inner, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.inner, x)


def looked_up(make: Callable[[], nn.Module], read: Callable[[Any], Tensor], width: int = 8) -> Case:
    """Return a case of an embedding whose result is multiplied by another operand."""
    shape = tuple(read(make()).shape)
    return module(lambda: _Table(make(), lambda table, x: read(table) * x), shape)


TABLES: Mapping[str, Case] = {
    "embedding": looked_up(lambda: nn.Embedding(7, 8), lambda t: t(ids(7, 2, 6))),
    "embedding transposed": looked_up(lambda: nn.Embedding(7, 8), lambda t: t(ids(7, 6, 2).T)),
    "embedding padded": looked_up(
        lambda: nn.Embedding(7, 8, padding_idx=1), lambda t: t(ids(7, 2, 6))
    ),
    "embedding by frequency": looked_up(
        lambda: nn.Embedding(7, 8, scale_grad_by_freq=True), lambda t: t(ids(7, 2, 6))
    ),
    "bag mean": looked_up(lambda: nn.EmbeddingBag(7, 8, mode="mean"), lambda t: t(ids(7, 4, 3))),
    "bag sum": looked_up(lambda: nn.EmbeddingBag(7, 8, mode="sum"), lambda t: t(ids(7, 4, 3))),
    "bag max": looked_up(lambda: nn.EmbeddingBag(7, 8, mode="max"), lambda t: t(ids(7, 4, 3))),
    "table of an operand": of(lambda w: F.embedding(ids(5, 3, 4), w), (5, 8)),
    "table sum of an operand": of(lambda w: F.embedding_bag(ids(5, 3, 4), w, mode="sum"), (5, 8)),
    "table weighed": of(
        lambda w, s: F.embedding_bag(ids(5, 3, 4), w, mode="sum", per_sample_weights=s),
        (5, 8),
        (3, 4),
    ),
}


class _Recurrent(nn.Module):
    def __init__(self, kind: Any, **how: Any) -> None:
        super().__init__()
        self.inner = kind(8, 6, **how)

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        return result[0] if isinstance(result, tuple) else result


RECURRENT: Mapping[str, Case] = {
    "rnn": module(lambda: _Recurrent(nn.RNN, batch_first=True), TOKENS),
    "gru": module(lambda: _Recurrent(nn.GRU), TOKENS),
    "lstm": module(lambda: _Recurrent(nn.LSTM, batch_first=True, bidirectional=True), TOKENS),
    "rnn cell": module(lambda: _Recurrent(nn.RNNCell), (6, 8)),
    "gru cell": module(lambda: _Recurrent(nn.GRUCell), (6, 8)),
    "lstm cell": module(lambda: _Recurrent(nn.LSTMCell), (6, 8)),
}


def _classes(*shape: int) -> Tensor:
    labels = ids(4, *shape).clone()
    labels.view(-1)[0] = -100
    return labels


LOSSES: Mapping[str, Case] = {
    "cross entropy": of(lambda x: F.cross_entropy(x, _classes(6)), (6, 4)),
    "cross entropy 2d": of(lambda x: F.cross_entropy(x, _classes(2, 6, 6)), IMAGE),
    "cross entropy 2d by element": of(
        lambda x: F.cross_entropy(x, _classes(2, 6, 6), reduction="none"), IMAGE
    ),
    "cross entropy smoothed": of(
        lambda x: F.cross_entropy(x, _classes(2, 6, 6), label_smoothing=0.2), IMAGE
    ),
    "cross entropy weighed": of(
        lambda x: F.cross_entropy(
            x, _classes(2, 6, 6), weight=torch.arange(1.0, 5.0, dtype=x.dtype)
        ),
        IMAGE,
    ),
    "cross entropy of shares": of(lambda x, y: F.cross_entropy(x, y.softmax(1)), IMAGE, IMAGE),
    "cross entropy sum 3d": of(
        lambda x: F.cross_entropy(x, _classes(2, 4, 4, 4), reduction="sum"), VOLUME
    ),
    "nll": of(lambda x: F.nll_loss(x.log_softmax(1), _classes(6)), (6, 4)),
    "nll 2d": of(lambda x: F.nll_loss(x.log_softmax(1), _classes(2, 6, 6)), IMAGE),
    "nll 2d by element": of(
        lambda x: F.nll_loss(x.log_softmax(1), _classes(2, 6, 6), reduction="none"), IMAGE
    ),
    "nll raw": of(lambda x: F.nll_loss(x, _classes(6)), (6, 4)),
    "bce": of(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), IMAGE, IMAGE),
    "bce by element": of(
        lambda x: F.binary_cross_entropy(
            x.sigmoid(), (ids(2, *IMAGE)).to(x.dtype), reduction="none"
        ),
        IMAGE,
    ),
    "bce with logits": of(
        lambda x, y: F.binary_cross_entropy_with_logits(
            x, y.sigmoid(), pos_weight=torch.full((6,), 2.0, dtype=x.dtype)
        ),
        IMAGE,
        IMAGE,
    ),
    "mse": of(F.mse_loss, IMAGE, IMAGE),
    "mse by element": of(lambda x, y: F.mse_loss(x, y, reduction="none"), IMAGE, IMAGE),
    "l1": of(F.l1_loss, IMAGE, IMAGE),
    "smooth l1": of(lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), IMAGE, IMAGE),
    "huber": of(lambda x, y: F.huber_loss(x, y, delta=0.5), IMAGE, IMAGE),
    "kl": of(
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (6, 4), (6, 4)
    ),
    "kl of logs": of(
        lambda x, y: F.kl_div(
            x.log_softmax(1), y.log_softmax(1), reduction="none", log_target=True
        ),
        IMAGE,
        IMAGE,
    ),
    "poisson": of(lambda x, y: F.poisson_nll_loss(x, y.abs(), full=True), (6, 4), (6, 4)),
    "gaussian": of(lambda x, y, z: F.gaussian_nll_loss(x, y, z.exp()), (6, 4), (6, 4), (6, 4)),
    "soft margin": of(
        lambda x: F.soft_margin_loss(x, ids(2, *IMAGE).to(x.dtype) * 2 - 1, reduction="none"), IMAGE
    ),
    "hinge": of(lambda x: F.hinge_embedding_loss(x, ids(2, *IMAGE).to(x.dtype) * 2 - 1), IMAGE),
    "margin ranking": of(
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones(6, dtype=x.dtype)), (6,), (6,)
    ),
    "multi margin": of(lambda x: F.multi_margin_loss(x, ids(4, 6)), (6, 4)),
    "multilabel soft": of(
        lambda x: F.multilabel_soft_margin_loss(x, ids(2, 6, 4).to(x.dtype)), (6, 4)
    ),
    "cosine": of(
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6, dtype=x.dtype)), (6, 4), (6, 4)
    ),
    "triplet": of(F.triplet_margin_loss, (6, 4), (6, 4), (6, 4)),
    "ctc": of(
        lambda x: F.ctc_loss(
            x.log_softmax(-1), ids(3, 2, 3) + 1, torch.full((2,), 9), torch.full((2,), 3)
        ),
        (9, 2, 5),
    ),
    "ctc raw": of(
        lambda x: F.ctc_loss(
            x, ids(3, 2, 3) + 1, torch.tensor([9, 7]), torch.tensor([3, 2]), reduction="sum"
        ),
        (9, 2, 5),
    ),
    "cosine similarity": of(lambda x, y: F.cosine_similarity(x, y, dim=1), IMAGE, IMAGE),
    "pairwise distance": of(F.pairwise_distance, (6, 4), (6, 4)),
    "cdist": of(torch.cdist, (2, 5, 4), (2, 6, 4)),
    "cdist of ones": of(lambda x, y: torch.cdist(x, y, p=1.0), (2, 5, 4), (2, 6, 4)),
    "pdist": of(F.pdist, (5, 4), ties=True),
}
