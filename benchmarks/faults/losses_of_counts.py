"""Cross entropies divided by counts or weights of the whole batch. They are exact in parts of the
batch if the counts are known first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.faults.losses import (
    CLASSES,
    IGNORED,
    LossFunction,
    class_weights,
    cross_entropy,
    register,
)

# Cross entropies with several means in one -----------------------------------------------------

PLAIN: dict[str, dict[str, Any]] = {
    "cross entropy": {},
    "cross entropy, class weights": {"weight": "classes"},
    "cross entropy, sum": {"reduction": "sum"},
    "label smoothing": {"label_smoothing": 0.1},
    "label smoothing, class weights": {"label_smoothing": 0.1, "weight": "classes"},
    "label smoothing, sum": {"label_smoothing": 0.2, "reduction": "sum"},
}


def plain(options: dict[str, Any], labels: str) -> LossFunction:
    """Return a cross entropy with these options, of all labels (`c`) or with ignored ones (`y`)."""

    def call(z: Tensor, target: Tensor) -> Tensor:
        weight = class_weights().to(z) if "weight" in options else None
        others = {name: value for name, value in options.items() if name != "weight"}
        return cross_entropy(z, target, weight=weight, **others)

    if labels == "c":
        return lambda z, c: call(z, c)
    return lambda z, y: call(z, y)


for _name, _options in PLAIN.items():
    register(f"{_name}, ignored labels", on="both")(plain(_options, "y"))
    register(_name, on="both")(plain(_options, "c"))


@register("two targets on one log_softmax", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    logp = z.log_softmax(-1).flatten(0, -2)
    other = torch.where(y == IGNORED, y, (y + 1) % CLASSES)
    return F.nll_loss(logp, y.flatten()) + 0.5 * F.nll_loss(logp, other.flatten())


@register("two targets with other ignored labels", on="both")
def _(z: Tensor, y: Tensor, c: Tensor) -> Tensor:
    logp = z.log_softmax(-1).flatten(0, -2)
    return F.nll_loss(logp, y.flatten()) + 0.5 * F.nll_loss(logp, c.flatten())


@register("confidence penalty on the same log_softmax", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return F.nll_loss(logp.flatten(0, -2), y.flatten()) - 0.1 * entropy


@register("label smoothing by hand", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    logp, valid = z.log_softmax(-1), y.ne(IGNORED)
    nll = -logp.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    count = valid.sum()
    smooth = -logp.mean(-1)
    return (nll * valid).sum() / count * 0.9 + (smooth * valid).sum() / count * 0.1


@register("label smoothing by hand, all rows smoothed", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    return 0.9 * cross_entropy(z, y) - 0.1 * z.log_softmax(-1).mean()


@register("label smoothing as a soft target", on="both")
def _(z: Tensor, c: Tensor) -> Tensor:
    soft = F.one_hot(c, CLASSES).to(z) * 0.9 + 0.1 / CLASSES
    return F.cross_entropy(z.flatten(0, -2), soft.flatten(0, -2))


@register("unlikelihood", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    logp, valid = z.log_softmax(-1), y.ne(IGNORED)
    wrong = logp.gather(-1, ((y.clamp(min=0) + 2) % CLASSES).unsqueeze(-1)).squeeze(-1)
    unlikely = -torch.log1p(-wrong.exp().clamp(max=1 - 1e-5))
    return cross_entropy(z, y) + (unlikely * valid).sum() / valid.sum()


@register("language modelling, shifted", on="tokens")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z[:, :-1], y[:, 1:])


@register("language modelling, shifted, by a count given as an argument's sum", on="tokens")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z[:, :-1], y[:, 1:], reduction="sum") / (y[:, 1:] != IGNORED).sum()


# Counts in other forms -------------------------------------------------------------------------

COUNTS = {
    "ne().sum()": lambda y: y.ne(IGNORED).sum(),
    "float sum": lambda y: (y != IGNORED).float().sum(),
    "float sum, double": lambda y: (y != IGNORED).double().sum(),
    "numel less ignored": lambda y: y.numel() - (y == IGNORED).sum(),
    "sum().clamp(min=1)": lambda y: (y != IGNORED).sum().clamp(min=1),
    "float sum + eps": lambda y: (y != IGNORED).float().sum() + 1e-6,
    "mean × numel": lambda y: (y != IGNORED).float().mean() * y.numel(),
    "where sum": lambda y: torch.where(y == IGNORED, 0, 1).sum(),
    "count_nonzero": lambda y: (y != IGNORED).count_nonzero(),
    "max with one": lambda y: torch.maximum((y != IGNORED).sum(), torch.ones_like(y.sum())),
    "sums of sums": lambda y: (y != IGNORED).sum(0).sum(),
    "ones_like masked": lambda y: torch.ones_like(y).masked_fill(y == IGNORED, 0).sum(),
    "where on a count": lambda y: (lambda n: torch.where(n > 0, n, torch.ones_like(n)))(
        (y != IGNORED).sum()
    ),
}


def over_count(count: Callable[..., Tensor]) -> LossFunction:
    """Return a sum of cross entropies divided by a count of a given form."""
    return lambda z, y: cross_entropy(z, y, reduction="sum") / count(y)


for _name, _count in COUNTS.items():
    register(f"sum over count by {_name}", on="both")(over_count(_count))


@register("count twice in different forms", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    valid = y != IGNORED
    smooth = -(z.log_softmax(-1).mean(-1) * valid).sum() / valid.float().sum()
    return cross_entropy(z, y, reduction="sum") / y.ne(IGNORED).sum().clamp(min=1) + 0.1 * smooth


@register("count in the loss and again outside of it", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y) * (y != IGNORED).float().mean()


@register("mean times a count", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y) * (y != IGNORED).sum()


@register("sum over len(x)", on="both")
def _(z: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y, reduction="sum") / len(x)


@register("sum over numel", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y, reduction="sum") / y.numel()


@register("sum over a square root of the count", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y, reduction="sum") / (y != IGNORED).sum().sqrt()


@register("mean by the inverse count", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    inverse = (y != IGNORED).sum().float().reciprocal()
    return (cross_entropy(z, y, reduction="none") * inverse).sum()


@register("each term divided by the count", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    return (cross_entropy(z, y, reduction="none") / (y != IGNORED).sum()).sum()


# Masks and sample weights ----------------------------------------------------------------------


@register("masked mean", on="both")
def _(z: Tensor, c: Tensor, mask: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none") * mask).sum() / mask.sum()


@register("masked mean, mask from the inputs", on="both")
def _(z: Tensor, c: Tensor, x: Tensor) -> Tensor:
    mask = (x[..., 0] > 0).to(z)
    return (cross_entropy(z, c, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


@register("masked mean, mask of float values", on="both")
def _(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    mask = torch.where(w > 0.3, w, torch.zeros_like(w))
    return (cross_entropy(z, c, reduction="none") * mask).sum() / (mask > 0).sum()


@register("masked mean by masked_fill", on="both")
def _(z: Tensor, c: Tensor, mask: Tensor) -> Tensor:
    return cross_entropy(z, c, reduction="none").masked_fill(~mask, 0.0).sum() / mask.sum()


@register("masked by a selection of rows", on="both")
def _(z: Tensor, c: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(z[mask], c[mask])


@register("mean of a masked product", on="both")
def _(z: Tensor, c: Tensor, mask: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none") * mask).mean() / mask.float().mean()


@register("sample weights, by their sum", on="both")
def _(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none") * w).sum() / w.sum()


@register("sample weights, by the number of samples", on="both")
def _(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none") * w).mean()


@register("sample weights, by their mean", on="both")
def _(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none") * (w / w.mean())).mean()


@register("sample weights, by the count of positive ones", on="both")
def _(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
    kept = w * (y != IGNORED)
    return (cross_entropy(z, y, reduction="none") * kept).sum() / (kept > 0).sum()


@register("sample weights of a softmax over the batch", on="both", expect="either")
def _(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none").flatten() * w.flatten().softmax(0)).sum()


@register("sample weights over the largest", on="both", expect="either")
def _(z: Tensor, c: Tensor, w: Tensor) -> Tensor:
    return (cross_entropy(z, c, reduction="none") * (w / w.max())).mean()


@register("mean of sequences' means", on="tokens")
def _(z: Tensor, y: Tensor) -> Tensor:
    each = cross_entropy(z, y, reduction="none").sum(1)
    return (each / (y != IGNORED).sum(1).clamp(min=1)).mean()


@register("mean of sequences' sums", on="tokens")
def _(z: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(z, y, reduction="none").sum(1).mean()


@register("mean over sequences that have labels", on="tokens")
def _(z: Tensor, y: Tensor) -> Tensor:
    counts = (y != IGNORED).sum(1)
    each = cross_entropy(z, y, reduction="none").sum(1) / counts.clamp(min=1)
    return each.sum() / (counts > 0).sum()


@register("mask from lengths", on="tokens")
def _(z: Tensor, c: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.arange(c.shape[1])[None] < lengths[:, None]
    return (cross_entropy(z, c, reduction="none") * mask).sum() / lengths.sum()


@register("token and sequence level in one", on="tokens")
def _(z: Tensor, y: Tensor) -> Tensor:
    rows = (z.mean(1).logsumexp(-1) * y.ne(IGNORED).any(1)).sum() / y.ne(IGNORED).any(1).sum()
    return cross_entropy(z, y) + 0.1 * rows


@register("tasks with other counts", on="both")
def _(z: Tensor, y: Tensor, h: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    regression = ((h[..., 0] - value).square() * mask).sum() / mask.sum()
    return cross_entropy(z, y) + 0.3 * regression + 0.1 * h[..., 1].square().mean()
