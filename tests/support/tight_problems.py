"""Memory-bound problems that differ only in their moments."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import zoo_small
from mlp import traced

from autopar.capture import Trace, capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.problem import Problem
from autopar.cost.memory import Liveness
from autopar.solve import evaluate_choices, solve

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.random_plans import prepared_trace

NUM_LAYERS = 1


def problems() -> list[Problem]:
    """Return a memory-bound problem with some of its moments, one with other moments, and the first
    one again."""
    model, batch = zoo_small.llama(num_layers=NUM_LAYERS)
    return tight(capture(model, (), batch))


def small_problems() -> list[Problem]:
    """Return such problems for a few linear layers."""
    return tight(traced(32, 64, 64, num_layers=2))


def tight(trace: Trace) -> list[Problem]:
    """Return such problems for a trace."""
    ready = prepared_trace(trace, Mesh.parse("2"), HardwareProfile.load("h100-sxm"))
    free = ready.priced.problem
    ample = evaluate_choices(free, solve(free))
    moments = Liveness(ready.trace, ready.priced).certain
    bound = replace(free, budget_bytes=int(0.8 * max(ample.resting_bytes)))
    return [replace(bound, moments=some) for some in (moments[::3], moments, moments[::3])]
