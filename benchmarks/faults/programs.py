"""A random program: a model, its batch, a mesh and a plan, as the text of a module.

The text is self-contained: a failing case is reported as such a file. It follows from a `Recipe`:
`random_recipe` draws one, and `smaller` returns those to which a failing one may be reduced.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.faults.choices import random_choice
from benchmarks.faults.steps import ACTIVATIONS, DIMS, LABELS, VOCABULARY, WIDTHS, Shape, Step
from benchmarks.faults.steps_further import STEPS

MAX_TRIES, MAX_ELEMENTS, SEQ = 60, 400, 6
PER_TOKEN = ("keep", "ids", "lengths")  # inputs with SEQ tokens
BATCHES = (12, 12, 12, 24, 8, 7)
STARTS: dict[str, tuple[str, Shape, str]] = {
    "features": ("tokens", (SEQ, 8), ""),
    "ids": ("tokens", (SEQ, 12), f"self.embedding = nn.Embedding({VOCABULARY}, 12)"),
    "vector": ("vector", (16,), ""),
    "image": ("image", (3, 8, 8), ""),
}
FRICTIONLESS, HOSTED = 'load_profile("cpu-gloo-frictionless")', 'load_profile("h100-sxm")'
CROSS_ENTROPY = "F.cross_entropy(z.flatten(0, -2), y.flatten()"
ENDS = {
    "cross entropy": f"return {CROSS_ENTROPY})",
    "label smoothing": f"return {CROSS_ENTROPY}, label_smoothing=0.1)",
    "sum": f"return {CROSS_ENTROPY}, reduction='sum')",
    "mse": "return F.mse_loss(z, target)",
    "mean square": "return z.square().mean()",
    "masked": f"return {CROSS_ENTROPY}, reduction='none').sum() / (y != -100).sum()",
    "loss and logits": f"return {{'loss': {CROSS_ENTROPY}), 'logits': z}}",
    "outputs": "return z",
    "several outputs": "return {'logits': z, 'hidden': h}",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The parts of a program.

    Attributes:
        source: kind of the input.
        steps: names in `STEPS`, each with the seed of its choices. Steps that do not fit their
            operand's shape are omitted.
        end: the end of forward.
        batch: number of samples.
        mesh: sizes of the mesh axes, which are named a, b, ...
        plan: an expression that plans with `arguments`.
        inference: whether the plan is for inference.
    """

    source: str
    steps: tuple[tuple[str, int], ...]
    end: str
    batch: int
    mesh: tuple[int, ...]
    plan: str
    inference: bool


def random_recipe(seed: int) -> Recipe:
    """Return the recipe of a seed. Steps are drawn until the wanted number of them fit."""
    rng = random.Random(seed)
    source = rng.choice(tuple(STARTS))
    kind, shape, _ = STARTS[source]
    steps: list[tuple[str, int]] = []
    wanted = rng.randint(3, 9)
    for _ in range(MAX_TRIES):
        if len(steps) == wanted:
            break
        name = rng.choice([n for n, s in STEPS.items() if s.kind == kind])
        choice = rng.randrange(1 << 30)
        ends_early = STEPS[name].to == "vector" and rng.random() < 0.7
        if not ends_early and fits(STEPS[name], kind, shape, choice):
            kind, shape = result_of(STEPS[name], shape, choice)
            steps.append((name, choice))
    mesh, plan, inference = random_choice(rng)
    end, batch = rng.choice(tuple(ENDS)), rng.choice(BATCHES)
    return Recipe(source, tuple(steps), end, batch, mesh, plan, inference)


def sizes_of(step: Step, shape: Shape, choice: int) -> dict[str, Any]:
    """Return the names that a step's text may use, some of them drawn."""
    rng = random.Random(choice)
    sizes: dict[str, Any] = dict(zip(DIMS[step.kind], shape, strict=True))
    width = sizes.get("D", sizes.get("C", 1))
    heads = [k for k in (1, 2, 3, 4) if width % k == 0]
    drawn = {"E": rng.choice(WIDTHS), "act": rng.choice(ACTIVATIONS), "k": rng.choice(heads)}
    return {**sizes, **drawn}


def result_of(step: Step, shape: Shape, choice: int) -> tuple[str, Shape]:
    """Return the kind and the shape after a step."""
    sizes = sizes_of(step, shape, choice)
    out = eval(f"({step.out},)", {}, sizes) if step.out else shape  # the text is from our own table
    return step.to or step.kind, out


def fits(step: Step, kind: str, shape: Shape, choice: int) -> bool:
    """Return whether a step accepts a shape, and its result is neither empty nor too large."""
    if step.kind != kind or not eval(step.needs, {}, sizes_of(step, shape, choice)):
        return False
    if kind == "tokens" and shape[0] != SEQ and any(name in step.forward for name in PER_TOKEN):
        return False
    result = result_of(step, shape, choice)[1]
    return min(result) >= 1 and math.prod(result) <= MAX_ELEMENTS


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Yield recipes with fewer steps, the smallest first; then those with a simpler end."""
    num = len(recipe.steps)
    size = num
    while size >= 1:
        for start in range(0, num, size):
            yield replace(recipe, steps=recipe.steps[:start] + recipe.steps[start + size :])
        size //= 2
    if recipe.end != "mean square":
        yield replace(recipe, end="mean square")


def text_of(recipe: Recipe, title: str) -> str:
    """Return the text of a recipe's module."""
    kind, shape, start = STARTS[recipe.source]
    lines = ["h = self.embedding(ids)" if recipe.source == "ids" else "h = x"]
    made = [start] if start else []
    for number, (name, choice) in enumerate(recipe.steps):
        step = STEPS[name]
        if not fits(step, kind, shape, choice):
            continue
        sizes = {**sizes_of(step, shape, choice), "n": number}
        kind, shape = result_of(step, shape, choice)
        made += step.init.format(**sizes).split("\n") if step.init else []
        lines += step.forward.format(**sizes).split("\n")
    rows, width = ((shape[0],), shape[1]) if kind == "tokens" else ((), shape[0])
    made.append(f"self.head = nn.Linear({width}, {LABELS})")
    lines.append("z = self.head(h.mean((2, 3)))" if kind == "image" else "z = self.head(h)")
    lines += ENDS[recipe.end].split("\n")
    inputs = inputs_of(recipe.source, rows, "\n".join(lines))
    mesh = {chr(ord("a") + i): size for i, size in enumerate(recipe.mesh)}
    return TEMPLATE.format(
        title=title,
        init="\n        ".join(made),
        parameters=", ".join(inputs),
        forward="\n        ".join(lines),
        mode=".eval()" if recipe.inference else "",
        size=recipe.batch,
        entries="\n        ".join(f'"{name}": {value},' for name, value in inputs.items()),
        mesh=mesh,
        plan=recipe.plan,
        profile=HOSTED if "offload" in recipe.plan else FRICTIONLESS,
    )


def inputs_of(source: str, rows: tuple[int, ...], forward: str) -> dict[str, str]:
    """Return the inputs that forward reads, each with the expression of its values."""
    x = STARTS[source][1]
    labels = ", ".join(map(str, ("size", *rows)))
    all_inputs = {
        "x": f"torch.randn(size, {', '.join(map(str, x))}, generator=made)",
        "ids": f"torch.randint(0, {VOCABULARY}, (size, {SEQ}), generator=made)",
        "keep": f"torch.arange({SEQ}) < torch.randint(1, {SEQ + 1}, (size, 1), generator=made)",
        "lengths": f"torch.randint(1, {SEQ + 1}, (size,), generator=made)",
        "label": f"torch.randint(0, {LABELS}, (size,), generator=made)",
        "y": f"torch.randint(0, {LABELS}, ({labels},), generator=made)"
        f".masked_fill(torch.rand({labels}, generator=made) < 0.2, -100)",
        "target": f"torch.randn({labels}, {LABELS}, generator=made)",
    }
    words = set(re.findall(r"\w+", forward))
    return {name: value for name, value in all_inputs.items() if name in words}


TEMPLATE = '''"""{title}"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from benchmarks.common import load_profile
from benchmarks.faults.running import random_legal_plan, tight_plan


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, {parameters}):
        {forward}


def build():
    torch.manual_seed(0)
    return Model(){mode}


def batch(size={size}):
    made = torch.Generator().manual_seed(1)
    return {{
        {entries}
    }}


def hardware():
    return {profile}


def make_plan():
    mesh = autopar.Mesh({mesh})
    arguments = dict(model=build(), mesh=mesh, example_inputs=batch(), hardware=hardware())
    return {plan}


if __name__ == "__main__":
    print(autopar.verify(make_plan(), build(), batch()))
'''
