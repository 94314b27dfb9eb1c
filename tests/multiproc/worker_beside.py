"""Run by any number of processes: save objects together with a model, and restore them on another
number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hosts import quick_hosts
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 128).reshape(8, 16)


class Net(nn.Module):
    """A model with two layers and dropout, whose random state must be restored, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).square().mean()


class Ema:
    """Averages of parameters in a dict, as in many scripts."""

    def __init__(self, module: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def update(self, module: nn.Module) -> None:
        with torch.no_grad():
            for name, p in module.named_parameters():
                self.shadow[name].lerp_(p, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.5, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Training:
    """A model and the other objects of a training script."""

    def __init__(self, seed: int, *, stages: bool = False) -> None:
        torch.manual_seed(seed)
        options: dict[str, Any] = {"hardware": quick_hosts(), "example_inputs": (X,)}
        sharded = {"constraints": (autopar.constraints.fsdp(),), **options}
        cut = {"constraints": (autopar.constraints.pipeline("gpu", microbatches=2),), **options}
        self.model: Any = autopar.compile(Net(), **(cut if stages else sharded))
        self.critic: Any = autopar.compile(Net(), **sharded)
        self.third: Any = autopar.compile(Net(), **sharded)
        self.head = nn.Linear(16, 2)
        for number, module in enumerate((self.model, self.critic, self.third)):
            module.manual_seed(seed + number)
        named = list(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW([p for name, p in named if "bias" not in name], 0.05)
        self.average = AveragedModel(self.model)
        self.others: dict[str, Any] = {
            "average": self.average,
            "critic": self.critic,
            "third": self.third,
            "head": self.head,
            "biases": torch.optim.SGD(
                [p for name, p in named if "bias" in name], 0.05, momentum=0.9
            ),
            "of_critic": torch.optim.Adam(self.critic.parameters(), 0.05),
            "of_both": torch.optim.RMSprop(
                [*self.third.parameters(), *self.head.parameters()], 0.05
            ),
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5),
        }
        if not stages:
            self.others["ema"] = Ema(self.model)
            self.others["values"] = self._values(seed)

    def _values(self, seed: int) -> dict[str, Any]:
        weight = self.model.first.weight.detach()
        return {
            "weight": weight * seed,
            3: [weight + 1, (weight - 1,)],
            "array": np.arange(6.0).reshape(2, 3) * seed,
            "generator": np.random.RandomState(seed).get_state(),
            "number": np.float32(seed),
            "best": torch.tensor(seed),
        }

    def step(self) -> None:
        """Run one step of all objects."""
        self.model(X).backward()
        (self.critic(X) + self.third(X) + self.head(X).square().mean()).backward()
        for each in (self.optimizer, *self.others.values()):
            if isinstance(each, torch.optim.Optimizer):
                each.step()
                each.zero_grad()
        self.others["scheduler"].step()
        self.average.update_parameters(self.model)
        if "ema" in self.others:
            self.others["ema"].update(self.model)

    def values(self) -> dict[str, Any]:
        """Return the full values of all objects."""
        modules = {
            "model": self.model,
            "average": self.average.module,
            "critic": self.critic,
            "third": self.third,
        }
        found: dict[str, Any] = {name: module.full_state_dict() for name, module in modules.items()}
        found |= {
            f"random {name}": module.random_state
            for name, module in modules.items()
            if name != "average"
        }
        found |= {
            "head": self.head.state_dict(),
            "counted": self.average.n_averaged,
            "rate": self.optimizer.param_groups[0]["lr"],
        }
        found |= (
            {"ema": self.others["ema"].shadow, "values": self.others["values"]}
            if "ema" in self.others
            else {}
        )
        return dict(_flat(found))


def _flat(value: Any, path: str = "") -> Any:
    """Return full values by path, on any device."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from _flat(each, f"{path}.{key}")
    elif isinstance(value, Tensor | np.ndarray):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield (
            path,
            (
                type(value).__name__,
                np.asarray(whole.detach() if isinstance(whole, Tensor) else whole).copy(),
            ),
        )
    else:
        yield path, value


def save(rank: int, folder: str, stages: bool = False, background: bool = False) -> dict[str, Any]:
    """Train, save, train further and restore. Return the saved values, the restored values, and
    both after one more step."""
    training, checkpoints = Training(1, stages=stages), autopar.Checkpoints(folder)
    training.step()
    training.step()
    before = training.values()
    write = checkpoints.async_save if background else checkpoints.save
    write(2, training.model, training.optimizer, **training.others)
    training.step()
    after = training.values()
    assert checkpoints.load(training.model, training.optimizer, **training.others) == 2
    back = training.values()
    training.step()
    return {"before": before, "after": after, "back": back, "again": training.values()}


def load(rank: int, folder: str) -> dict[str, Any]:
    """Restore into a run without a step, or with one. Return the restored values and those after
    the next step."""
    found = {}
    for name, num_steps in (("fresh", 0), ("stepped", 1)):
        training = Training(7)
        for _ in range(num_steps):
            training.step()
        others = {name: other for name, other in training.others.items() if _is_there(folder, name)}
        assert autopar.Checkpoints(folder).load(training.model, training.optimizer, **others) == 2
        if len(others) < len(training.others):
            training.others = others
        found[name] = training.values()
        training.step()
        found[f"{name} next"] = training.values()
    return found


def _is_there(folder: str, name: str) -> bool:
    from autopar.checkpoint.companions import read_others

    (place,) = autopar.Checkpoints(folder)._find_checkpoints().values()
    return name in read_others(place).kinds


def _filled(value: float) -> nn.Module:
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, value)
    return module


class Own:
    """An object with state that differs between ranks."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def refused(rank: int, folder: str) -> dict[str, str]:
    """Return the error for each kind of state that one rank cannot write, and the result of its
    remedy."""
    checkpoints, training = autopar.Checkpoints(folder), Training(1, stages=True)
    pm, critic = training.model, training.critic
    both = torch.optim.SGD([*pm.parameters(), *critic.parameters()], 0.1)
    said = {
        "number": _refusal(lambda: checkpoints.save(1, pm, own=Own({"seen": rank}))),
        "tensor": _refusal(lambda: checkpoints.save(1, pm, own=Own(torch.full((4,), float(rank))))),
        "names": _refusal(lambda: checkpoints.save(1, pm, own=Own({f"rank {rank}": 1}))),
        "module": _refusal(lambda: checkpoints.save(1, pm, own=_filled(rank))),
        "of a stage": _refusal(lambda: checkpoints.save(1, pm, ema=Ema(pm))),
        "optimizer": _refusal(
            lambda: checkpoints.save(1, pm, of_critic=training.others["of_critic"])
        ),
        "both": _refusal(lambda: checkpoints.save(1, pm, both)),
        "no state": _refusal(lambda: checkpoints.save(1, pm, own=rank)),
        "steps": str(checkpoints.steps()),
    }
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(everywhere, {"seen": rank})
    extras = {"of ranks": everywhere}
    checkpoints.save(
        1,
        pm,
        extras=extras,
        average=training.average,
        critic=critic,
        both=both,
        of_critic=training.others["of_critic"],
    )
    extras.clear()
    checkpoints.load(
        pm,
        extras=extras,
        average=training.average,
        critic=critic,
        both=both,
        of_critic=training.others["of_critic"],
    )
    return {**said, "followed": str(extras)}


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeStateError as error:
        return str(error)
    return ""
