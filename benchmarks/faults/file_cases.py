"""Damaged plans and profiles. They must be refused, rejected by `check`, or have no effect.

For a plan with a falsified value, `check` must reject it, or list the field as not verified. A
damaged profile must be refused, or the plan made with it must be correct.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import category

import torch
from torch import Tensor, nn

import autopar
from autopar.certificate import Certificate
from autopar.certificate.report import UNORDERED
from autopar.core.hardware import HardwareProfile
from benchmarks.common import ROOT
from benchmarks.faults.damage import WAYS, Damaged, differences, pattern_of
from benchmarks.faults.judging import Notes, WrongResult

PROFILES = ("h100-sxm", "cpu-gloo", "a100-sxm-80gb")
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one device": ({"gpu": 1}, {}),
    "microbatches": ({"gpu": 1}, {"num_microbatches": 2, "outputs": "loss"}),
    "fsdp": ({"gpu": 2}, {"constraints": [autopar.constraints.fsdp()]}),
    "tensor parallel": (
        {"node": 2, "gpu": 2},
        {"constraints": [autopar.constraints.megatron(tp=2, dp=2, zero=1)]},
    ),
    "stages": (
        {"gpu": 2},
        {"constraints": [autopar.constraints.pipeline("gpu", microbatches=2)], "outputs": "loss"},
    ),
}


class Small(nn.Module):
    """A small model of a few equal layers with a head and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            for _ in range(2)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = h + layer(h)
        logits = self.head(h)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build() -> nn.Module:
    """Return the small model, with the weights of one seed."""
    torch.manual_seed(0)
    return Small()


def batch() -> dict[str, Tensor]:
    """Return its batch."""
    made = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 16, (8, 4), generator=made)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def model_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return both, in the form of `--module` on the command line."""
    return build(), batch()


@cache
def plan_text(name: str) -> str:
    """Return the text of an undamaged plan."""
    mesh, options = PLANS[name]
    planned = autopar.plan(
        build(), autopar.Mesh(mesh), example_inputs=batch(), hardware="h100-sxm", **options
    )
    return planned.dumps()


def run(seed: int, notes: Notes) -> None:
    """Run the case of a seed.

    Raises:
        WrongResult: if `check` accepts a falsified value, or if a plan computes another result.
        AutoparError: if autopar refuses.
    """
    rng = random.Random(seed)
    way = rng.choice(tuple(WAYS))
    if rng.random() < 0.25:
        name = rng.choice(PROFILES)
        whole = (ROOT / "cost_models" / f"{name}.json").read_text(encoding="utf-8")
        damaged = WAYS[way](whole, rng)
        notes.entries |= {"plan": f"profile {name}", "damage": damaged.how}
        run_profile(damaged, notes)
    else:
        name = rng.choice(tuple(PLANS))
        notes.phase = "whole plan"
        damaged = WAYS[way](plan_text(name), rng)
        notes.entries |= {"plan": f"plan {name}", "damage": damaged.how}
        notes.entries["field"] = pattern_of(damaged.path)
        run_plan(damaged, plan_text(name), notes)


def run_plan(damaged: Damaged, whole: str, notes: Notes) -> None:
    """Load a damaged plan, show it, check it, and run it if it is certified."""
    notes.phase = "load"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(damaged.data)
        plan = autopar.Plan.load(path)
    original = autopar.Plan.loads(whole)
    if plan == original:
        notes.entries["note"] = "the plan is unchanged"
        return
    notes.phase = "show"
    for shown in (str(autopar.explain(plan)), str(autopar.diff(original, plan)), repr(plan)):
        refuse_escapes(shown)
    notes.phase = "check"
    certificate = autopar.check(plan, build(), batch())
    refuse_escapes(str(certificate))
    if not certificate.ok:
        notes.entries["note"] = "rejected by check"
        return
    notes.phase = "verify"
    found = autopar.verify(plan, build(), batch())
    if not found.ok:
        raise WrongResult(f"check accepts a plan with wrong results:\n{found}")
    notes.entries["note"] = refuse_changes(certificate, whole, plan.dumps(), damaged.how)


def refuse_changes(certificate: Certificate, whole: str, text: str, how: str) -> str:
    """Return how a certified plan differs from the undamaged one.

    Raises:
        WrongResult: if the certificate verifies a field that differs.
    """
    changed = differences(json.loads(whole), json.loads(text), UNORDERED)
    if wrong := [".".join(map(str, path)) for path in changed if certificate.vouches_for(path)]:
        raise WrongResult(f"check accepts a changed {', '.join(wrong)}: {how}")
    if not changed:
        return "certified: the order differs"
    return "certified: the fields that differ are listed as not verified"


def run_profile(damaged: Damaged, notes: Notes) -> None:
    """Load a damaged profile, and plan with it if it is accepted."""
    notes.phase = "load"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_bytes(damaged.data)
        profile = HardwareProfile.load(str(path))
    notes.phase = "plan"
    mesh = autopar.Mesh({"gpu": 2})
    plan = autopar.plan(build(), mesh, example_inputs=batch(), hardware=profile)
    refuse_escapes(str(autopar.explain(plan)))
    if not (math.isfinite(plan.prediction.step_s) and plan.prediction.step_s > 0):
        raise WrongResult(f"a step of {plan.prediction.step_s} s is predicted: {damaged.how}")
    notes.phase = "verify"
    found = autopar.verify(plan, build(), batch())
    if not found.ok:
        raise WrongResult(str(found))


def refuse_escapes(text: str) -> None:
    """Raise WrongResult if control characters of a file would reach the terminal."""
    found = next((c for c in text if c not in "\n\t\r" and category(c) in ("Cc", "Cs")), None)
    if found is not None:
        raise WrongResult(f"a control character of the file is printed: {found!r}")
