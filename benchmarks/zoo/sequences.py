"""Models on sequences and tables that transformers does not have: torch's own Transformer, an LSTM
and a DLRM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Translator(nn.Module):
    """`torch.nn.Transformer`, encoder and decoder, with token embeddings and a loss."""

    def __init__(
        self,
        vocab: int = 128,
        dim: int = 64,
        heads: int = 4,
        layers: int = 2,
        length: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.source, self.target, self.positions = (
            nn.Embedding(vocab, dim),
            nn.Embedding(vocab, dim),
            nn.Embedding(length, dim),
        )
        self.body = nn.Transformer(dim, heads, layers, layers, 2 * dim, dropout, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        places = self.positions(torch.arange(source.shape[1], device=source.device))
        later = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device, dtype=places.dtype
        )
        hidden = self.body(
            self.source(source) + places,
            self.target(target)
            + self.positions(torch.arange(target.shape[1], device=target.device)),
            tgt_mask=later,
            src_is_causal=False,
            tgt_is_causal=True,
        )
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class LanguageLstm(nn.Module):
    """A two-layer LSTM over tokens, with a language model's loss."""

    def __init__(
        self, vocab: int = 128, dim: int = 64, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=dropout)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.lstm(self.embed(ids))
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Dlrm(nn.Module):
    """A recommendation model (Naumov et al., 2019): bags of categories and dense features, their
    pairwise products, and a click."""

    def __init__(
        self, tables: int = 4, rows: int = 64, dim: int = 16, dense: int = 8, width: int = 32
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(dense, width), nn.ReLU(), nn.Linear(width, dim), nn.ReLU()
        )
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("rows", pairs[0], persistent=False)
        self.register_buffer("columns", pairs[1], persistent=False)
        self.top = nn.Sequential(
            nn.Linear(dim + pairs.shape[1], width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, dense: Tensor, categories: Tensor, clicks: Tensor) -> tuple[Tensor, Tensor]:
        bottom = self.bottom(dense)
        bags = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack([bottom, *bags], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.rows, self.columns]
        logits = self.top(torch.cat([bottom, products], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicks), logits


def nn_transformer(
    batch: int, seq: int, vocab: int = 128, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the translator, and three rows of tokens per sample."""
    return Translator(vocab, **settings), {
        name: torch.randint(0, vocab, (batch, seq)) for name in ("source", "target", "labels")
    }


def lstm(
    batch: int, seq: int, vocab: int = 128, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the LSTM, and tokens."""
    return LanguageLstm(vocab, **settings), {
        name: torch.randint(0, vocab, (batch, seq)) for name in ("ids", "labels")
    }


def dlrm(
    batch: int, tables: int = 4, rows: int = 64, dense: int = 8, bag: int = 3, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the DLRM, and dense features, categories and clicks."""
    settings.pop("dropout", None)
    return Dlrm(tables, rows, dense=dense, **settings), {
        "dense": torch.randn(batch, dense),
        "categories": torch.randint(0, rows, (batch, tables, bag)),
        "clicks": torch.randint(0, 2, (batch,)).to(torch.get_default_dtype()),
    }
