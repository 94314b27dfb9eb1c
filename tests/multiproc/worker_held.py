"""Run by several processes: operations of scripts on parameters and gradients, compared with the
same script with the plain model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zoo_small
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import RuntimeStateError
from benchmarks.common import load_profile

SEED = 5
Case = Callable[[nn.Module, Tensor], Any]


class Net(nn.Module):
    """A model without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def mask_of(p: Tensor) -> Tensor:
    """Return a mask with the shape of the parameter, equal on every rank."""
    return torch.arange(p.numel()).reshape(tuple(p.shape)) % 3 == 0


def ones_of(p: Tensor) -> Tensor:
    return torch.arange(p.numel(), dtype=p.dtype).reshape(tuple(p.shape)) / p.numel()


def again(seed: int = SEED) -> None:
    torch.manual_seed(seed)


# Each is given the module and one of its weights, with gradients, under no_grad; weight and
# gradient are compared afterwards.
WRITES: dict[str, Case] = {
    "rows": lambda m, p: p.grad[:5].zero_(),
    "one row": lambda m, p: p.data[3].fill_(2.0),
    "one row from the end": lambda m, p: p[-1].mul_(0.5),
    "a row that is set": lambda m, p: p.__setitem__(2, 0.5),
    "rows that are set": lambda m, p: p.grad.__setitem__(slice(1, 4), ones_of(p)[1:4]),
    "a mask that is set": lambda m, p: p.grad.__setitem__(mask_of(p), 0.3),
    "columns": lambda m, p: p[:, 2:9].zero_(),
    "narrow": lambda m, p: p.narrow(0, 3, 6).zero_(),
    "chunk": lambda m, p: p.chunk(3)[1].zero_(),
    "chunk of columns": lambda m, p: p.chunk(3, 1)[2].add_(1.0),
    "each row": lambda m, p: [row.mul_(number) for number, row in enumerate(p)],
    "a view of a view": lambda m, p: p.view(-1)[7:19][2:].fill_(9.0),
    "a view that is read and written": lambda m, p: (row := p[1]).copy_(row.add_(1.0) * 2),
    "transposed": lambda m, p: p.t()[1].zero_(),
    "times a mask": lambda m, p: p.grad.mul_(mask_of(p)),
    "filled by a mask": lambda m, p: p.grad.masked_fill_(mask_of(p), 0.1),
    "copied": lambda m, p: p.copy_(ones_of(p)),
    "averaged": lambda m, p: p.lerp_(ones_of(p), 0.1),
    "indices": lambda m, p: p.index_fill_(0, torch.tensor([1, 5]), 4.0),
    "indices that are added": lambda m, p: p.grad.index_add_(
        0, torch.tensor([1, 5]), ones_of(p)[:2]
    ),
    "summed along": lambda m, p: p.cumsum_(0),
    "a triangle": lambda m, p: p.tril_(),
    "rows of norm one": lambda m, p: p.div_(p.norm(dim=1, keepdim=True)),
    "norms in place": lambda m, p: p.mul_(torch.norm(p, dim=-1, keepdim=True).square_()),
    "centred": lambda m, p: p.grad.sub_(p.grad.mean(dim=1, keepdim=True)),
    "where": lambda m, p: p.copy_(torch.where(p > 0, p, torch.zeros_like(p))),
    "the smallest": lambda m, p: p.masked_fill_(
        p.abs() < p.abs().flatten().kthvalue(40).values, 0.0
    ),
    "orthogonal": lambda m, p: p.copy_(
        torch.linalg.svd(p, full_matrices=False)[0] @ torch.linalg.svd(p, full_matrices=False)[2]
    ),
    "noise": lambda m, p: (again(), p.grad.add_(torch.randn_like(p.grad))),
    "drawn in place": lambda m, p: (again(), p.normal_()),
    "initialized": lambda m, p: (again(), nn.init.xavier_uniform_(p)),
    "an orthogonal start": lambda m, p: (again(), nn.init.orthogonal_(p)),
    "clipped": lambda m, p: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    "clipped one by one": lambda m, p: nn.utils.clip_grad_norm_(
        m.parameters(), 0.01, foreach=False
    ),
    "clipped by value": lambda m, p: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "clipped beside a head": lambda m, p: clip_beside(m, p),
    "an average that is plain": lambda m, p: p.add_(averaged(p)),
    "a sum that is plain": lambda m, p: p.mul_(summed(m)),
    "a branch": lambda m, p: p.mul_(2.0 if p.norm() > 1 else 3.0),
}
READS: dict[str, Case] = {
    "item": lambda m, p: sum(q.grad.norm().item() ** 2 for q in m.parameters()) ** 0.5,
    "data": lambda m, p: p.grad.data.norm(2).item(),
    "float": lambda m, p: float(p.sum()),
    "largest": lambda m, p: max(q.grad.abs().max().item() for q in m.parameters()),
    "mean": lambda m, p: p.mean().item(),
    "deviation": lambda m, p: p.std().item(),
    "finite": lambda m, p: float(all(torch.isfinite(q.grad).all() for q in m.parameters())),
    "element": lambda m, p: p[4, 3].item(),
    "list": lambda m, p: np.sum(p.grad.tolist()),
    "array": lambda m, p: p.detach().numpy().sum() + np.asarray(p.grad).std(),
    "format": lambda m, p: float(f"{p.norm():.9f}"),
    "stacked": lambda m, p: torch.stack([q.grad.norm() for q in m.parameters()]).norm().item(),
    "total": lambda m, p: nn.utils.get_total_norm([q.grad for q in m.parameters()]).item(),
    "vector": lambda m, p: nn.utils.parameters_to_vector(m.parameters()).norm().item(),
    "ranks": lambda m, p: p.flatten().sort().values[7].item(),
    "equal": lambda m, p: float(torch.equal(p, p.clone())),
}


def averaged(p: Tensor) -> Tensor:
    """Average the weight into a plain tensor, by a function and by a method."""
    average = ones_of(p)
    assert average.lerp_(p, 0.1) is average and type(average) is Tensor
    average += p.grad
    return average.copy_(average * 2)


def summed(module: nn.Module) -> Tensor:
    total = torch.tensor(0.0, dtype=torch.float64)
    for q in module.parameters():
        total += q.norm()
    return total


def clip_beside(module: nn.Module, p: Tensor) -> float:
    """Clip the parameters of the module and of a plain head with the function of torch, and add the
    gradient of the head to that of the weight."""
    head = nn.Parameter(ones_of(p))
    head.grad = ones_of(p) * 2
    norm = nn.utils.clip_grad_norm_([*module.parameters(), head], 0.05)
    p.grad.add_(head.grad)
    return float(norm)


def pair(kind: str) -> tuple[Any, nn.Module, tuple[Any, ...], dict[str, Tensor], str]:
    """Return the compiled and the plain module, a batch, and the name of a weight."""
    torch.manual_seed(0)
    profile = load_profile("cpu-gloo-frictionless")
    if kind == "fsdp":
        plain: nn.Module = Net().double()
        args: tuple[Any, ...] = (torch.randn(8, 16, dtype=torch.float64),)
        made = autopar.compile(
            copy.deepcopy(plain),
            example_inputs=args,
            hardware=profile,
            constraints=[autopar.constraints.fsdp()],
        )
        return made, plain, args, {}, "up.weight"
    plain, batch = zoo_small.gpt2(num_layers=1, dtype=torch.float64)
    sizes = {"tp": 2} if kind == "heads" else {"dp": 2, "tp": 2}
    constraint = (
        autopar.constraints.megatron(**sizes, zero=3)
        if kind == "grid"
        else autopar.constraints.megatron(tp=2)
    )
    mesh = autopar.Mesh(sizes)
    made = autopar.compile(
        copy.deepcopy(plain), mesh, example_inputs=batch, hardware=profile, constraints=[constraint]
    )
    return made, plain, (), batch, "transformer.h.0.attn.c_attn.weight"


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def apart(module: nn.Module, plain: nn.Module) -> float:
    """Return the largest difference of parameters and gradients."""
    found = 0.0
    for (name, p), (_, q) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        found = max(found, (whole(p) - q).abs().max().item())
        found = max(found, 0.0 if q.grad is None else (whole(p.grad) - q.grad).abs().max().item())
    return found


def run(rank: int, kind: str) -> dict[str, float]:
    """Return the difference from the plain model by case."""
    made, plain, args, batch, name = pair(kind)
    start, found = copy.deepcopy(plain.state_dict()), dict[str, float]()
    for model in (made, plain):
        out = model(*args, **batch)
        (out.loss if hasattr(out, "loss") else out.square().mean()).backward()
    gradients = {n: q.grad.clone() for n, q in plain.named_parameters()}
    found["steps"] = apart(made, plain)
    parts = [p for p in made.parameters() if not all(x.is_replicate() for x in p.placements)]
    assert parts, "something is split"

    def reset() -> None:
        made.load_state_dict(start)
        plain.load_state_dict(start)
        for n, q in plain.named_parameters():
            q.grad.copy_(gradients[n])
            made.get_parameter(n).grad.copy_(gradients[n])

    for case, do in WRITES.items():
        reset()
        with torch.no_grad():
            for model in (made, plain):
                do(model, model.get_parameter(name))
        found[case] = apart(made, plain)
        if case != "steps" and kind == "fsdp":
            changed = any(
                not torch.equal(q, start[n]) or not torch.equal(q.grad, gradients[n])
                for n, q in plain.named_parameters()
            )
            assert changed, f"{case} does nothing"
    reset()
    for case, read in READS.items():
        with torch.no_grad():
            found[f"read {case}"] = abs(
                read(made, made.get_parameter(name)) - read(plain, plain.get_parameter(name))
            )
    return found


def train(rank: int) -> dict[str, float]:
    """Train with penalties, a plain head, unfreezing and saved state. Return the difference from
    the plain model after some steps."""
    found: dict[str, float] = {}
    y = torch.arange(8) % 6
    made, plain, (x,), _, _ = pair("fsdp")
    heads = [nn.Linear(6, 6).double() for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    for options in ({"foreach": True}, {"fused": True}, {}):
        pairs = zip((made, plain), heads, strict=True)
        optimizers = [
            torch.optim.AdamW([*m.parameters(), *h.parameters()], 1e-2, **options) for m, h in pairs
        ]
        for _ in range(2):
            for model, head, optimizer in zip((made, plain), heads, optimizers, strict=True):
                loss = F.cross_entropy(head(model(x)), y)
                loss += 1e-3 * model.up.weight.abs().sum()
                loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
                loss.backward()
                nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 0.1)
                optimizer.step()
                optimizer.zero_grad()
        found[f"a head and penalties {options}"] = max(
            apart(made, plain), (heads[0].weight - heads[1].weight).abs().max().item()
        )
    scales = []
    for model, head in zip((made, plain), heads, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 1e-2)
        for factor in (1.0, float("inf"), 2.0):
            scaler.scale(F.cross_entropy(head(model(x)), y) * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    of_heads = (heads[0].weight - heads[1].weight).abs().max().item()
    found["scaled losses"] = max(
        apart(made, plain), of_heads, *(abs(scale - 32.0) for scale in scales)
    )
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (made, plain)]
    for step in range(3):
        if step == 1:  # a plain run that continues compiled
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        for model, optimizer in zip((made, plain), optimizers, strict=True):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    found["state of a plain optimizer"] = apart(made, plain)
    file = io.BytesIO()
    torch.save(made.full_state_dict(), file)
    file.seek(0)
    assert all(type(v) is torch.Tensor for v in torch.load(file, weights_only=True).values())
    copied = copy.deepcopy(made)
    found["copied"] = apart_values(copied, plain)
    return found


def optimize(rank: int) -> dict[str, float]:
    """Step with optimizers that write through masks, take norms of rows, read numbers and
    concatenate parameters. Return the difference from the plain model."""
    found: dict[str, float] = {}
    y = torch.arange(8) % 6
    made, plain, (x,), _, _ = pair("fsdp")
    start = copy.deepcopy(plain.state_dict())
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
        "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=1e-2, foreach=True),
        "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
        "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
        "of trust ratios": lambda p: Trusting(p, lr=1e-2),
    }
    for kind, make in kinds.items():
        for model in (made, plain):
            model.load_state_dict(start)
            optimizer = make(model.parameters())

            def evaluate(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(evaluate)
        found[kind] = apart(made, plain)
    return found


class Trusting(torch.optim.SGD):
    """An optimizer whose step depends on the norm of the parameter, as in many packages."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                length = p.grad.norm().item()
                ratio = p.norm().item() / length if length > 0 and p.norm() > 0 else 1.0
                p.grad.div_(p.grad.std() + 1e-8)
                p.data.add_(p.grad, alpha=-group["lr"] * ratio)
        return loss


def apart_values(module: nn.Module, plain: nn.Module) -> float:
    return max(
        (whole(p) - q).abs().max().item()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True)
    )


def thaw(rank: int) -> dict[str, Any]:
    """Train the head first, then more layers, then only another part. Return the difference from
    the plain model."""
    torch.manual_seed(0)
    plain = Net().double().requires_grad_(False)
    plain.down.requires_grad_(True)
    x, y = torch.randn(8, 16, dtype=torch.float64), torch.arange(8) % 6
    options: dict[str, Any] = {
        "hardware": load_profile("cpu-gloo-frictionless"),
        "constraints": [autopar.constraints.fsdp()],
    }
    made: Any = autopar.compile(copy.deepcopy(plain), example_inputs=(x,), **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (made, plain)]
    found: dict[str, Any] = {"apart": 0.0}
    for step in range(6):
        for model, optimizer in zip((made, plain), optimizers, strict=True):
            if step == 1:
                model.norm.requires_grad_(True)
            if step == 2:
                model.requires_grad_(True)
            if step == 3:
                model.requires_grad_(False)
                model.up.requires_grad_(True)
            size = 8 if step < 5 else 5
            F.cross_entropy(model(x[:size]), y[:size]).backward()
            optimizer.step()
        found["apart"] = max(found["apart"], apart(made, plain))
        for optimizer in optimizers:
            optimizer.zero_grad()
    found["programs"] = len(made.variants.known)
    return found


def refusals(rank: int) -> dict[str, str]:
    """Return the errors of impossible operations."""
    made, _, (x,), _, name = pair("fsdp")
    made(x).sum().backward()
    p, found = made.get_parameter(name), dict[str, str]()
    attempts: dict[str, Callable[[], Any]] = {
        "different tensors": lambda: p.grad.mul_(torch.full(p.shape, 1.0 + rank, dtype=p.dtype)),
        "torch.tensor": lambda: torch.tensor([q.grad.norm() for q in made.parameters()]),
        "wrong shape": lambda: p.detach().add_(torch.ones(3, dtype=p.dtype)),
        "leaf": lambda: p.mul_(2.0),
    }
    for attempt, do in attempts.items():
        try:
            do()
        except (RuntimeStateError, RuntimeError) as refusal:
            found[attempt] = str(refusal)
    return found


def stages(rank: int) -> dict[str, Any]:
    """Return the error of the norm of torch over the parameters of a stage, and the norm of the
    module, which covers the whole model."""
    plain, batch = zoo_small.gpt2(num_layers=2, dtype=torch.float64)
    options: dict[str, Any] = {"hardware": load_profile("cpu-gloo-frictionless"), "outputs": "loss"}
    constraints = [autopar.constraints.pipeline("pp", microbatches=2)]
    made: Any = autopar.compile(
        copy.deepcopy(plain),
        autopar.Mesh({"pp": 2}),
        example_inputs=batch,
        constraints=constraints,
        **options,
    )
    made(**batch).loss.backward()
    plain(**batch).loss.backward()
    found: dict[str, Any] = {}
    for foreach in (None, False):
        try:
            nn.utils.clip_grad_norm_(made.parameters(), 0.01, foreach=foreach)
        except RuntimeStateError as refusal:
            found[str(foreach)] = str(refusal)
    loss, weight = made(**batch).loss, next(made.parameters())
    for name, terms in (
        ("penalty", lambda: sum(p.square().sum() for p in made.parameters())),
        ("with a loss", lambda: loss + weight.square().sum()),
        ("of one", lambda: weight.grad.norm() + 0.1 * weight.norm() + weight.data.sum()),
    ):
        try:
            terms()
        except RuntimeStateError as refusal:
            found[name] = str(refusal)
    norm = nn.utils.get_total_norm([q.grad for q in plain.parameters()])
    found["apart"] = abs(float(made.clip_grad_norm_(float("inf"))) - float(norm)) / float(norm)
    return found
