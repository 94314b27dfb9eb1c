"""Losses in which a value of one sample changes the gradient of another one: ratios and products of
sums, roots, extremes, contrastive and balancing losses.

For parts of a batch they must be refused, unless a planner computes the coupling value first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.faults.losses import (
    EXPERTS,
    IGNORED,
    LossFunction,
    cross_entropy,
    log_probability,
    register,
)

# Functions of a mean ---------------------------------------------------------------------------

OF_A_MEAN = {
    "perplexity": lambda m: m.exp(),
    "log of a mean": lambda m: m.log(),
    "root of a mean": lambda m: m.sqrt(),
    "square of a mean": lambda m: m.square(),
    "inverse of a mean": lambda m: 1 / m,
    "a mean clamped": lambda m: m.clamp(max=1.5),
    "a mean above a margin": lambda m: F.relu(m - 0.5),
    "distance of a mean": lambda m: (m - 0.1).abs() + m,
}


def of_a_mean(function: Callable[..., Tensor]) -> LossFunction:
    """Return a function of the mean cross entropy."""
    return lambda z, y: function(cross_entropy(z, y))


for _name, _function in OF_A_MEAN.items():
    register(_name, on="both", expect="refused")(of_a_mean(_function))


@register("RMSE", on="both", expect="refused")
def _(z: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(z, target).sqrt()


@register("product of two means", on="both", expect="refused")
def _(z: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return cross_entropy(z, y) * h.square().mean()


@register("ratio of two sums of parameters", on="both", expect="refused")
def _(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).square().sum() / (z.square().sum() + 1)


@register("dice over the batch", on="both", expect="refused")
def _(z: Tensor, target: Tensor) -> Tensor:
    p = z.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


@register("Tversky, per class over the batch", on="rows", expect="refused")
def _(z: Tensor, target: Tensor) -> Tensor:
    p, t = z.softmax(-1), target.round()
    hit, extra, missed = (p * t).sum(0), (p * (1 - t)).sum(0), ((1 - p) * t).sum(0)
    return (1 - (hit + 1) / (hit + 0.3 * extra + 0.7 * missed + 1)).mean()


@register("weights of the model, by their sum", on="both", expect="refused")
def _(z: Tensor, c: Tensor, gates: Tensor) -> Tensor:
    weight = gates[..., 0].sigmoid()
    return (cross_entropy(z, c, reduction="none") * weight).sum() / weight.sum()


@register("mask of the model's values, by its count", on="both", expect="either")
def _(z: Tensor, c: Tensor) -> Tensor:
    mask = z[..., 0] > 0
    return (cross_entropy(z, c, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


@register("hard examples only, by a threshold", on="both", expect="either")
def _(z: Tensor, c: Tensor) -> Tensor:
    each = cross_entropy(z, c, reduction="none")
    hard = (each.detach() > 1.0).to(z)
    return (each * hard).sum() / hard.sum().clamp(min=1)


# Detached statistics of the batch --------------------------------------------------------------


@register("detached mean as a baseline", on="both", expect="either")
def _(z: Tensor, c: Tensor, value: Tensor) -> Tensor:
    baseline = z[..., 0].mean().detach()
    return -(log_probability(z, c) * (value - baseline)).mean()


@register("detached scale", on="both", expect="either")
def _(z: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return cross_entropy(z, y) / (h.abs().mean().detach() + 1e-6)


@register("loss over its own detached value", on="both", expect="either")
def _(z: Tensor, y: Tensor) -> Tensor:
    nll = cross_entropy(z, y)
    return nll / nll.detach()


@register("advantages of the model's own rewards", on="both", expect="either")
def _(z: Tensor, c: Tensor, h: Tensor) -> Tensor:
    reward = h[..., 0].detach()
    gain = (reward - reward.mean()) / (reward.std() + 1e-6)
    return -(log_probability(z, c) * gain).mean()


# Extremes and orders ---------------------------------------------------------------------------

EXTREMES = {
    "max": lambda e: e.max(),
    "min plus mean": lambda e: e.min() + e.mean(),
    "logsumexp": lambda e: e.logsumexp(0),
    "softmax weights": lambda e: (e.softmax(0).detach() * e).sum(),
    "median": lambda e: e.median(),
    "quantile": lambda e: e.quantile(0.75),
    "top-k": lambda e: e.topk(5).values.mean(),
    "sorted half": lambda e: e.sort().values[: e.shape[0] // 2].sum(),
    "std": lambda e: e.mean() + 0.5 * e.std(),
    "variance": lambda e: e.mean() + e.var(),
    "norm": lambda e: e.norm(),
    "product": lambda e: e.clamp(min=0.5).prod(),
    "cumulative maximum": lambda e: e.cummax(0).values.mean(),
    "cumulative sum": lambda e: e.cumsum(0).mean(),
    "difference of neighbours": lambda e: (e[1:] - e[:-1]).square().mean(),
}


def of_extremes(function: Callable[..., Tensor]) -> LossFunction:
    """Return a function of the cross entropies of all rows."""
    return lambda z, c: function(cross_entropy(z, c, reduction="none").flatten())


for _name, _function in EXTREMES.items():
    register(f"{_name} over the batch", on="both", expect="refused")(of_extremes(_function))


@register("first sample weighs more", on="both", expect="either")
def _(z: Tensor, c: Tensor) -> Tensor:
    each = cross_entropy(z, c, reduction="none")
    return each.mean() + each[0].mean()


# Pairs of samples ------------------------------------------------------------------------------


@register("InfoNCE", expect="refused")
def _(h: Tensor) -> Tensor:
    a, b = F.normalize(h[:, :6], dim=-1), F.normalize(h[:, 6:], dim=-1)
    return F.cross_entropy(a @ b.t() / 0.2, torch.arange(h.shape[0]))


@register("CLIP", expect="refused")
def _(h: Tensor) -> Tensor:
    a, b = F.normalize(h[:, :6], dim=-1), F.normalize(h[:, 6:], dim=-1)
    pairs, own = a @ b.t() / 0.2, torch.arange(h.shape[0])
    return (F.cross_entropy(pairs, own) + F.cross_entropy(pairs.t(), own)) / 2


@register("SigLIP", expect="refused")
def _(h: Tensor) -> Tensor:
    pairs = F.normalize(h[:, :6], dim=-1) @ F.normalize(h[:, 6:], dim=-1).t()
    return -F.logsigmoid(pairs * (2 * torch.eye(h.shape[0]).to(h) - 1)).sum() / h.shape[0]


@register("supervised contrastive", expect="refused")
def _(h: Tensor, c: Tensor) -> Tensor:
    unit = F.normalize(h, dim=-1)
    alike = (c[:, None] == c[None]).to(h)
    logp = (unit @ unit.t()).log_softmax(-1)
    return -((logp * alike).sum(1) / alike.sum(1)).mean()


@register("pairwise ranking", expect="refused")
def _(z: Tensor, value: Tensor) -> Tensor:
    above = (value[:, None] > value[None]).to(z)
    return (F.softplus(z[None, :, 0] - z[:, None, 0]) * above).sum() / above.sum()


@register("DPO of neighbouring rows", on="tokens", expect="either")
def _(z: Tensor, c: Tensor, old: Tensor) -> Tensor:
    gain = (log_probability(z, c) - old).sum(1).view(-1, 2)
    return -F.logsigmoid(0.1 * (gain[:, 0] - gain[:, 1])).mean()


@register("DPO of two halves", on="tokens", expect="refused")
def _(z: Tensor, c: Tensor, old: Tensor) -> Tensor:
    chosen, rejected = (log_probability(z, c) - old).sum(1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@register("mixup by a flipped batch", on="both", expect="refused")
def _(z: Tensor, c: Tensor) -> Tensor:
    return 0.7 * cross_entropy(z, c) + 0.3 * cross_entropy(z, c.flip(0))


# Statistics over the batch ---------------------------------------------------------------------


@register("standardised logits", on="both", expect="refused")
def _(z: Tensor, c: Tensor) -> Tensor:
    dims = tuple(range(z.dim() - 1))
    spread = z.var(dims, keepdim=True, unbiased=False)
    return cross_entropy((z - z.mean(dims, keepdim=True)) * (spread + 1e-5).rsqrt(), c)


@register("centred logits", on="both", expect="refused")
def _(z: Tensor, c: Tensor) -> Tensor:
    return cross_entropy(z - z.mean(0, keepdim=True), c)


@register("batch norm in training", expect="refused")
def _(z: Tensor, c: Tensor) -> Tensor:
    return F.cross_entropy(F.batch_norm(z, None, None, training=True), c)


@register("variance hinge (VICReg)", expect="refused")
def _(z: Tensor, c: Tensor, h: Tensor) -> Tensor:
    return F.cross_entropy(z, c) + F.relu(1 - (h.var(0) + 1e-4).sqrt()).mean()


@register("covariance (VICReg)", expect="refused")
def _(z: Tensor, c: Tensor, h: Tensor) -> Tensor:
    centred = h - h.mean(0)
    covariance = centred.t() @ centred / (h.shape[0] - 1)
    off = covariance.square().sum() - covariance.diagonal().square().sum()
    return F.cross_entropy(z, c) + 0.1 * off / h.shape[1]


@register("cross correlation (Barlow twins)", expect="refused")
def _(h: Tensor) -> Tensor:
    a, b = ((v - v.mean(0)) / (v.std(0) + 1e-4) for v in (h[:, :6], h[:, 6:]))
    return (a.t() @ b / h.shape[0] - torch.eye(6).to(h)).square().sum()


@register("entropy of the mean prediction", on="both", expect="refused")
def _(z: Tensor, c: Tensor) -> Tensor:
    mean = z.softmax(-1).flatten(0, -2).mean(0)
    return cross_entropy(z, c) + 0.1 * (mean * mean.log()).sum()


@register("mean prediction against a given one", on="both", expect="refused")
def _(z: Tensor, c: Tensor, target: Tensor) -> Tensor:
    gap = z.softmax(-1).flatten(0, -2).mean(0) - target.softmax(-1).flatten(0, -2).mean(0)
    return cross_entropy(z, c) + gap.square().sum()


# Balancing losses of experts: shares of tokens (detached) times mean probabilities -------------


@register("Switch balancing", on="both", expect="either")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    probabilities = gates.softmax(-1).flatten(0, -2)
    picked = F.one_hot(probabilities.argmax(-1), EXPERTS).to(z).mean(0)
    return cross_entropy(z, y) + 0.1 * EXPERTS * (picked * probabilities.mean(0)).sum()


@register("Mixtral balancing (top 2)", on="both", expect="either")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    probabilities = gates.softmax(-1).flatten(0, -2)
    picks = F.one_hot(probabilities.topk(2).indices, EXPERTS).to(z)
    return cross_entropy(z, y) + 0.1 * EXPERTS * (picks.mean(0) * probabilities.mean(0)).sum()


@register("Mixtral balancing, masked tokens", on="tokens", expect="either")
def _(z: Tensor, y: Tensor, gates: Tensor, mask: Tensor) -> Tensor:
    probabilities, keep = gates.softmax(-1).flatten(0, -2), mask.flatten().to(z)[:, None]
    picks = F.one_hot(probabilities.topk(2).indices, EXPERTS).to(z)
    shares = (picks * keep[..., None]).sum(0) / keep.sum()
    means = (probabilities * keep).sum(0) / keep.sum()
    return cross_entropy(z, y) + 0.1 * EXPERTS * (shares * means).sum()


@register("balancing within each sequence", on="tokens")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    probabilities = gates.softmax(-1)
    picked = F.one_hot(probabilities.argmax(-1), EXPERTS).to(z).mean(1)
    return cross_entropy(z, y) + 0.1 * (picked * probabilities.mean(1)).sum(-1).mean()


@register("importance of experts (squared variation)", on="both", expect="refused")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    importance = gates.softmax(-1).flatten(0, -2).sum(0)
    return cross_entropy(z, y) + 0.1 * importance.var() / importance.mean().square()


@register("balancing and z-loss with their own counts", on="both", expect="either")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    valid = y.ne(IGNORED).flatten().to(z)
    probabilities = gates.softmax(-1).flatten(0, -2)
    picked = F.one_hot(probabilities.argmax(-1), EXPERTS).to(z).mean(0)
    balance = EXPERTS * (picked * probabilities.mean(0)).sum()
    z_loss = (gates.logsumexp(-1).square().flatten() * valid).sum() / valid.sum()
    return cross_entropy(z, y) + 0.1 * balance + 0.01 * z_loss
