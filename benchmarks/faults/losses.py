"""Losses of every common form, each in a small model whose forward returns it.

A loss is a function whose parameters have the names of the values that it reads: values of the
model (`z` logits, `h` hidden states, `gates` router logits, `net` the model) and entries of the
batch (`x`, `y`, ...: see `make_batch`). `all_losses` returns the losses of `losses_of_counts`,
`losses_of_terms` and `losses_coupled`.

The numbers of counted labels and tokens differ between samples, so that parts of a batch have other
counts, weights and means than the whole. `expect` states the allowed outcomes of a plan that cuts
the batch:

- ``exact``: a sum over samples divided by values of inputs, which can be computed in parts.
- ``either``: exact only for a planner with more knowledge, for example that the mean of an input is
  known beforehand. Both an exact plan and a refusal are correct.
- ``refused``: samples are coupled by values that depend on parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, SEQ, FEATURES, HIDDEN, CLASSES, EXPERTS = 12, 4, 8, 12, 5, 4
IGNORED = -100
MODULES = ("losses_of_counts", "losses_of_terms", "losses_coupled")
LossFunction = Callable[..., Any]


class LossModel(nn.Module):
    """Four layers, a router and a head. Forward returns the loss."""

    def __init__(self, loss: LossFunction) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.loss, self.reads = loss, tuple(inspect.signature(loss).parameters)

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        c: Tensor | None = None,
        w: Tensor | None = None,
        mask: Tensor | None = None,
        target: Tensor | None = None,
        value: Tensor | None = None,
        old: Tensor | None = None,
        lengths: Tensor | None = None,
        spans: Tensor | None = None,
    ) -> Any:
        h = self.embed(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        gates = self.router(h)
        z = self.head(h * (1 + gates.softmax(-1).amax(-1, keepdim=True)))
        values = {
            "z": z,
            "h": h,
            "gates": gates,
            "net": self,
            "x": x,
            "y": y,
            "c": c,
            "w": w,
            "mask": mask,
            "target": target,
            "value": value,
            "old": old,
            "lengths": lengths,
            "spans": spans,
        }
        return self.loss(*(values[name] for name in self.reads))


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss: its function, whether it reads sequences, and its allowed outcome in parts."""

    name: str
    compute: LossFunction
    tokens: bool
    expect: str

    @property
    def has_outputs(self) -> bool:
        """Whether it returns further outputs."""
        return self.name.partition("/")[2].startswith("loss")

    def build(self) -> nn.Module:
        """Return the model, with the weights of one seed."""
        torch.manual_seed(0)
        return LossModel(self.compute)

    def batch(self, seed: int = 0, size: int = BATCH) -> dict[str, Tensor]:
        """Return the entries of the batch that the loss reads, and `x`."""
        reads = {"x", *inspect.signature(self.compute).parameters}
        made = make_batch(self.tokens, seed, size)
        return {name: entry for name, entry in made.items() if name in reads}


def make_batch(tokens: bool, seed: int, size: int = BATCH) -> dict[str, Tensor]:
    """Return all entries that a loss may read. Early samples have fewer valid labels, smaller
    weights and smaller values.

    Returns:
        `x` features; `y` labels, some of them ignored; `c` labels, none ignored; `w` positive
        weights; `mask` (bool); `target` (float, one per class); `value` (float, one per row); `old`
        (earlier log-probabilities, one per row); `lengths` (of the sequences); `spans` (label
        sequences for CTC).
    """
    made = torch.Generator().manual_seed(seed)
    rows = (size, SEQ) if tokens else (size,)
    slope = (torch.arange(1, size + 1) / size).view(-1, *[1] * (len(rows) - 1))
    classes = torch.randint(0, CLASSES, rows, generator=made)
    kept = torch.rand(rows, generator=made) < 0.3 + 0.7 * slope
    kept[-1] = True
    lengths = torch.randint(1, SEQ + 1, (size,), generator=made)
    return {
        "x": torch.randn(*rows, FEATURES, generator=made) * (0.5 + slope.unsqueeze(-1)),
        "y": torch.where(kept, classes, IGNORED),
        "c": classes,
        "w": torch.rand(rows, generator=made) * slope + 0.05,
        "mask": kept,
        "target": torch.rand(*rows, CLASSES, generator=made),
        "value": torch.randn(rows, generator=made) + 2 * slope,
        "old": -torch.rand(rows, generator=made) - 1,
        "lengths": lengths.sort().values,
        "spans": torch.randint(1, CLASSES, (size, 2), generator=made),
    }


ROWS: dict[str, tuple[LossFunction, str]] = {}
TOKENS: dict[str, tuple[LossFunction, str]] = {}


def register(name: str, *, on: str = "rows", expect: str = "exact") -> Callable[[Any], Any]:
    """Add a loss to the table, on ``rows`` [batch, classes], ``tokens`` [batch, seq, classes] or
    ``both``."""

    def put(compute: LossFunction) -> LossFunction:
        for kind, table in (("rows", ROWS), ("tokens", TOKENS)):
            if on in (kind, "both"):
                if name in table:
                    raise ValueError(f"two losses are named {name!r}")
                table[name] = (compute, expect)
        return compute

    return put


def rows_of(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and labels as one list of rows."""
    return z.flatten(0, -2), y.flatten()


def cross_entropy(z: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Return torch's cross entropy over all rows, in the shape of the labels if it is not
    reduced."""
    found = F.cross_entropy(*rows_of(z, y), **options)
    return found.view_as(y) if options.get("reduction") == "none" else found


def log_probability(z: Tensor, c: Tensor) -> Tensor:
    """Return the log-probability of each label."""
    return z.log_softmax(-1).gather(-1, c.unsqueeze(-1)).squeeze(-1)


def class_weights() -> Tensor:
    """Return unequal weights of the classes."""
    return torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5])


def all_losses() -> tuple[Loss, ...]:
    """Return every loss of the modules of functions, which register themselves."""
    for module in MODULES:
        import_module(f"benchmarks.faults.{module}")

    rows = [Loss(f"rows/{name}", fn, False, expect) for name, (fn, expect) in ROWS.items()]
    tokens = [Loss(f"tokens/{name}", fn, True, expect) for name, (fn, expect) in TOKENS.items()]
    return (*rows, *tokens)


def find_loss(name: str) -> Loss:
    """Return the loss of a name."""
    return next(loss for loss in all_losses() if loss.name == name)
