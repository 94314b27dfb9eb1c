"""The ops of random models: a table of steps, each valid for the shapes that it names.

A step reads and writes `h`, which is of one kind: ``tokens`` [batch, T, D], ``vector`` [batch, D]
or ``image`` [batch, C, H, W]. Its text may use these names, in braces: the sizes of its kind, `n`
(the number of the step), `E` (another width), `act` (an activation), `k` (a number of heads that
divides D). Batch sizes are read from tensors, so that a model takes any batch. `keep` [batch, T],
`ids` [batch, T], `lengths` and `label` [batch] are inputs of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]
DIMS = {"tokens": ("T", "D"), "vector": ("D",), "image": ("C", "H", "W")}
WIDTHS = (6, 8, 12, 16)
ACTIVATIONS = ("torch.relu", "F.gelu", "F.silu", "torch.tanh", "torch.sigmoid", "F.softplus")
VOCABULARY, LABELS = 11, 5


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table.

    Attributes:
        name: name of the step.
        kind: kind of the operand.
        init, forward: lines of the model's `__init__` and `forward`.
        out: sizes of the result, as expressions of those of the operand; by default the same.
        to: kind of the result, if it differs.
        needs: a condition on the sizes.
    """

    name: str
    kind: str
    init: str
    forward: str
    out: str = ""
    to: str = ""
    needs: str = "True"


def tokens(name: str, init: str, forward: str, **others: str) -> Step:
    """Return a step of tokens."""
    return Step(name, "tokens", init, forward, **others)


def vector(name: str, init: str, forward: str, **others: str) -> Step:
    """Return a step of vectors."""
    return Step(name, "vector", init, forward, **others)


def image(name: str, init: str, forward: str, **others: str) -> Step:
    """Return a step of images."""
    return Step(name, "image", init, forward, **others)
