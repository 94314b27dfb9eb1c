"""Losses other than cross entropy, penalties, losses of reinforcement learning, and losses with
further outputs. They are exact in parts of the batch if the means of inputs are known first."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.faults.losses import (
    CLASSES,
    EXPERTS,
    IGNORED,
    LossFunction,
    class_weights,
    cross_entropy,
    log_probability,
    register,
)

# Element-wise losses ---------------------------------------------------------------------------


@register("focal", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    each = cross_entropy(z, y, reduction="none")
    return ((1 - (-each).exp()).square() * each).sum() / (y != IGNORED).sum()


@register("focal by class counts of the batch", on="rows", expect="either")
def _(z: Tensor, c: Tensor) -> Tensor:
    counts = F.one_hot(c, CLASSES).sum(0)
    weight = (len(c) / (CLASSES * counts.clamp(min=1))).to(z)
    return (F.cross_entropy(z, c, reduction="none") * weight[c]).mean()


@register("polynomial cross entropy", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    each = cross_entropy(z, y, reduction="none")
    valid = y != IGNORED
    return ((each + 1 - (-each).exp()) * valid).sum() / valid.sum()


@register("distillation", on="both")
def _(z: Tensor, target: Tensor, y: Tensor) -> Tensor:
    soft = F.kl_div(
        (z / 2).log_softmax(-1).flatten(0, -2),
        (target / 2).softmax(-1).flatten(0, -2),
        reduction="batchmean",
    )
    return 0.5 * cross_entropy(z, y) + 2.0 * soft


@register("distillation, masked", on="both")
def _(z: Tensor, target: Tensor, y: Tensor) -> Tensor:
    valid = y != IGNORED
    each = F.kl_div(z.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)
    return cross_entropy(z, y) + (each * valid).sum() / valid.sum()


@register("Jensen-Shannon divergence", on="both")
def _(z: Tensor, target: Tensor) -> Tensor:
    p, q = z.softmax(-1), target.softmax(-1)
    mid = ((p + q) / 2).log()
    return ((p * (p.log() - mid)).sum(-1) + (q * (q.log() - mid)).sum(-1)).mean() / 2


def of_targets(loss: Callable[..., Tensor]) -> LossFunction:
    """Return a loss of the logits and the targets."""
    return lambda z, target: loss(z, target)


TARGETED: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": lambda z, t: F.soft_margin_loss(z, t.round() * 2 - 1),
    "bce": F.binary_cross_entropy_with_logits,
    "poisson": F.poisson_nll_loss,
}

for _name, _loss in TARGETED.items():
    register(_name, on="both")(of_targets(_loss))


@register("bce with pos_weight, masked", on="both")
def _(z: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    each = F.binary_cross_entropy_with_logits(
        z, target, reduction="none", pos_weight=class_weights().to(z)
    )
    return (each * mask.unsqueeze(-1)).sum() / (mask.sum() * CLASSES)


@register("bce with pos_weight of the batch", on="both", expect="either")
def _(z: Tensor, target: Tensor) -> Tensor:
    hard = target.round()
    weight = (1 - hard).sum() / hard.sum()
    return F.binary_cross_entropy_with_logits(z, hard, pos_weight=weight)


@register("gaussian nll", on="both")
def _(z: Tensor, value: Tensor) -> Tensor:
    return F.gaussian_nll_loss(z[..., 0], value, F.softplus(z[..., 1]))


@register("multi margin", on="rows")
def _(z: Tensor, c: Tensor) -> Tensor:
    return F.multi_margin_loss(z, c)


@register("hinge by hand", on="both")
def _(z: Tensor, c: Tensor) -> Tensor:
    right = z.gather(-1, c.unsqueeze(-1))
    return (1 + z - right).clamp(min=0).sum(-1).mean() - 1


@register("multilabel soft margin", on="rows")
def _(z: Tensor, target: Tensor) -> Tensor:
    return F.multilabel_soft_margin_loss(z, target.round())


@register("cosine embedding", on="rows")
def _(h: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return F.cosine_embedding_loss(h[:, :8], x, mask.long() * 2 - 1)


@register("triplet", on="rows")
def _(h: Tensor) -> Tensor:
    return F.triplet_margin_loss(h[:, :4], h[:, 4:8], h[:, 8:12])


@register("margin ranking", on="rows")
def _(z: Tensor, mask: Tensor) -> Tensor:
    return F.margin_ranking_loss(z[:, 0], z[:, 1], mask.to(z) * 2 - 1, margin=0.5)


@register("quantile (pinball)", on="both")
def _(z: Tensor, value: Tensor) -> Tensor:
    error = value - z[..., 0]
    return torch.maximum(0.9 * error, -0.1 * error).mean()


@register("ctc", on="tokens")
def _(z: Tensor, spans: Tensor) -> Tensor:
    num = z.shape[0]
    steps, labels = torch.full((num,), z.shape[1]), torch.full((num,), spans.shape[1])
    return F.ctc_loss(z.log_softmax(-1).transpose(0, 1), spans, steps, labels, zero_infinity=True)


@register("dice of each sample", on="tokens")
def _(z: Tensor, target: Tensor) -> Tensor:
    p = z.sigmoid()
    return (1 - (2 * (p * target).sum((1, 2)) + 1) / ((p + target).sum((1, 2)) + 1)).mean()


# Penalties and balancing terms that are linear in the samples ----------------------------------


def squares(net: nn.Module) -> Tensor:
    """Return the sum of squares of all parameters."""
    return torch.stack([p.square().sum() for p in net.parameters()]).sum()


@register("L2 of the parameters", on="both")
def _(z: Tensor, y: Tensor, net: nn.Module) -> Tensor:
    return cross_entropy(z, y) + 1e-2 * squares(net)


@register("L2 of the parameters, sum of losses", on="both")
def _(z: Tensor, y: Tensor, net: nn.Module) -> Tensor:
    return cross_entropy(z, y, reduction="sum") + 1e-2 * squares(net)


@register("L1 of one weight, times a count", on="both")
def _(z: Tensor, y: Tensor, net: nn.Module) -> Tensor:
    return cross_entropy(z, y) + 1e-2 * net.head.weight.abs().sum() * (y != IGNORED).sum()


@register("norm of the parameters", on="both")
def _(z: Tensor, y: Tensor, net: nn.Module) -> Tensor:
    return cross_entropy(z, y) + 1e-2 * squares(net).sqrt()


@register("orthogonality of a weight", on="both")
def _(z: Tensor, y: Tensor, net: nn.Module) -> Tensor:
    weight = net.blocks[1].weight
    return cross_entropy(z, y) + 1e-2 * (weight @ weight.t() - torch.eye(12).to(z)).square().sum()


@register("activity regulariser", on="both")
def _(z: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return cross_entropy(z, y) + 1e-2 * h.square().mean()


@register("activity regulariser, sum over batch", on="both")
def _(z: Tensor, y: Tensor, h: Tensor) -> Tensor:
    return cross_entropy(z, y) + 1e-2 * h.abs().sum() / h.shape[0]


@register("entropy bonus over valid labels", on="both")
def _(z: Tensor, y: Tensor) -> Tensor:
    valid = y != IGNORED
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    return cross_entropy(z, y) - 0.1 * (entropy * valid).sum() / valid.sum()


@register("router z-loss", on="both")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    return cross_entropy(z, y) + 1e-2 * gates.logsumexp(-1).square().mean()


@register("router load against given shares", on="both")
def _(z: Tensor, y: Tensor, gates: Tensor) -> Tensor:
    shares = torch.linspace(0.1, 0.4, EXPERTS).to(z)
    return cross_entropy(z, y) + 1e-2 * (gates.softmax(-1) * shares).sum(-1).mean()


# Reinforcement learning ------------------------------------------------------------------------


@register("policy gradient", on="both")
def _(z: Tensor, c: Tensor, value: Tensor) -> Tensor:
    return -(log_probability(z, c) * value).mean()


@register("PPO, advantages as given", on="both")
def _(z: Tensor, c: Tensor, value: Tensor, old: Tensor) -> Tensor:
    ratio = (log_probability(z, c) - old).exp()
    return -torch.minimum(ratio * value, ratio.clamp(0.8, 1.2) * value).mean()


@register("PPO, advantages less their mean", on="both", expect="either")
def _(z: Tensor, c: Tensor, value: Tensor, old: Tensor) -> Tensor:
    gain, ratio = value - value.mean(), (log_probability(z, c) - old).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


@register("PPO, advantages by mean and std", on="both", expect="either")
def _(z: Tensor, c: Tensor, value: Tensor, old: Tensor) -> Tensor:
    gain = (value - value.mean()) / (value.std() + 1e-8)
    ratio = (log_probability(z, c) - old).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()


@register("GRPO, per token, masked, groups in neighbouring rows", on="tokens", expect="either")
def _(z: Tensor, c: Tensor, value: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    groups = value[:, 0].view(-1, 2)
    gain = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)
    ratio = (log_probability(z, c) - old).exp()
    each = -torch.minimum(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None])
    return (each * mask).sum() / mask.sum()


@register("GRPO, per sequence", on="tokens")
def _(z: Tensor, c: Tensor, value: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = (log_probability(z, c) - old).exp()
    each = -(ratio * value) * mask
    return (each.sum(1) / mask.sum(1).clamp(min=1)).mean()


@register("value and policy with a KL penalty", on="both")
def _(z: Tensor, c: Tensor, h: Tensor, value: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    logp = log_probability(z, c)
    kl = ((old - logp).exp() - (old - logp) - 1) * mask
    return F.mse_loss(h[..., 0], value) - (logp * value).mean() + 0.1 * kl.sum() / mask.sum()


@register("DPO of a row and a reference", on="tokens")
def _(z: Tensor, c: Tensor, old: Tensor) -> Tensor:
    margin = log_probability(z, c).sum(1) - old.sum(1)
    return -F.logsigmoid(0.1 * margin).mean()


# Several outputs -------------------------------------------------------------------------------


@register("loss and its parts", on="both")
def _(z: Tensor, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    nll, penalty = cross_entropy(z, y), h.square().mean()
    return nll + 0.1 * penalty, nll.detach(), penalty.detach()


@register("loss, logits and a count", on="both")
def _(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy(z, y, label_smoothing=0.1), z.detach(), (y != IGNORED).sum()


@register("loss and an accuracy", on="both")
def _(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    valid = y != IGNORED
    right = ((z.argmax(-1) == y) & valid).sum() / valid.sum()
    return cross_entropy(z, y), right
