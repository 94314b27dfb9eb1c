"""Faults planted in prices: `check`, whose formulas are independent, refuses a plan that was made
with them.

Each row makes one thing cheaper than in the profile, like an error in a formula, both during
planning and during the check.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from planted_faults import Patch
from planted_subjects import SUBJECTS

from autopar.analysis import work
from autopar.core import collective
from autopar.core.mesh import Mesh
from autopar.cost import kernel_times, op_times, priced


@dataclass(frozen=True)
class Fault:
    """A fault in the prices of the plan of `subject`, and a regular expression that matches the
    message of `check`."""

    subject: str
    says: str
    plant: Callable[[Patch], Any]


def halved(
    name: str, of: Callable[..., bool] = lambda *_: True, module: Any = collective
) -> Callable[[Patch], Any]:
    """Replace a function of a module by one that returns half of the correct value for some
    arguments."""
    whole = getattr(module, name)
    return lambda patch: patch.setattr(
        module, name, lambda *a, **k: whole(*a, **k) / 2 if of(*a) else whole(*a, **k)
    )


def kind(wanted: str) -> Callable[..., bool]:
    return lambda c, *_: getattr(c, "kind", c) == wanted


FAULTS = {
    "an all_reduce at half its cost": Fault(
        "split", "all_reduce .* it takes", halved("_wire_time", kind("all_reduce"))
    ),
    "an all_reduce that sends its bytes once": Fault(
        "split", "all_reduce .* it takes", halved("_share", kind("all_reduce"))
    ),
    "an all_reduce of one way's latency": Fault(
        "split", "all_reduce .* it takes", halved("_steps", kind("all_reduce"))
    ),
    "an all_gather at half its cost": Fault(
        "attention", "all_gather .* it takes", halved("_wire_time", kind("all_gather"))
    ),
    "a reduce_scatter at half its cost": Fault(
        "attention", "reduce_scatter .* it takes", halved("_wire_time", kind("reduce_scatter"))
    ),
    "a gather without its copies": Fault(
        "attention",
        "all_gather .* it takes",
        lambda p: p.setattr(collective, "_copied_bytes", lambda *_: 0),
    ),
    "a halo that is sent for nothing": Fault(
        "images", "halo .* it takes", halved("collective_time", kind("halo"), op_times)
    ),
    "rows that go to their experts at half the cost": Fault(
        "dispatched", "all_to_all .* takes", halved("_wire_time", kind("all_to_all"))
    ),
    "a copy from the host at half its cost": Fault(
        "hosted", "fetch .* it takes", halved("collective_time", kind("fetch"), op_times)
    ),
    "a copy to the host at half its cost": Fault(
        "hosted", "store .* it takes", halved("collective_time", kind("store"), op_times)
    ),
    "interleaved stages that send at twice the bandwidth": Fault(
        "interleaved",
        "stage 1: .*one instance takes",
        lambda p: p.setattr(
            priced.Wire,
            "time_s",
            lambda self, n: self.latency_s + n / 2 / self.bandwidth_bytes_per_s,
        ),
    ),
    "a slice that is free": Fault(
        "images",
        "slice .* it takes",
        lambda p: p.setattr(collective, "_copied_bytes", lambda *_: 0),
    ),
    "a bucket without its passes": Fault(
        "split",
        "a bucket .* it takes",
        lambda p: p.setattr(collective, "_passes_s", lambda *_: 0.0),
    ),
    "a share of a bucket at half its cost": Fault(
        "split", "it takes .* not", halved("least_per_byte", module=op_times)
    ),
    "links within a node everywhere": Fault(
        "nodes", "all_reduce .* it takes", lambda p: p.setattr(Mesh, "link", lambda *_: "intra")
    ),
    "stages that send at twice the bandwidth": Fault(
        "stages",
        "stage 1: .*one instance takes",
        lambda p: p.setattr(
            priced.Wire,
            "time_s",
            lambda self, n: self.latency_s + n / 2 / self.bandwidth_bytes_per_s,
        ),
    ),
    "a product of half its flops": Fault(
        "split",
        "one instance takes",
        lambda p: p.setitem(work._FLOPS, "autopar.ops.dot", lambda *a: work._dot_flops(*a) // 2),
    ),
    "a convolution of half its flops": Fault(
        "channels",
        "one instance takes",
        lambda p: p.setitem(
            work._FLOPS, "aten.convolution", lambda *a: work._convolution_flops(*a) // 2
        ),
    ),
    "an op that reads for nothing": Fault(
        "split", "one instance takes", halved("_bytes", module=work)
    ),
    "an op that is taken for a view": Fault(
        "split",
        "one instance takes",
        lambda p: p.setattr(
            work,
            "_describe",
            lambda target: (work.__name__, "relu" in str(target) or "add" in str(target)),
        ),
    ),
    "a kernel that hides what it cannot": Fault(
        "kernels", "it saves", halved("_together", module=kernel_times)
    ),
    "a kernel whose pass is free": Fault(
        "kernels", "it saves", lambda p: p.setattr(kernel_times, "_pass_s", lambda *_: 0.0)
    ),
    "a kernel in half of its chunks": Fault(
        "kernels", "it saves", lambda p: p.setattr(kernel_times, "_CHUNKS", (1,))
    ),
    "arithmetic at twice the peak": Fault(
        "split", "one instance takes", halved("compute_time", module=op_times)
    ),
}


@cache
def certified(name: str) -> None:
    """Assert that the plan of a subject is certified."""
    found = SUBJECTS[name].check(SUBJECTS[name].planned[1])
    assert found.ok, str(found)


FAST = (
    "an all_reduce at half its cost",
    "a bucket without its passes",
    "links within a node everywhere",
)
CASES = [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_with_planted_prices_is_refused_by_check(name: str, monkeypatch: Patch) -> None:
    fault = FAULTS[name]
    subject = SUBJECTS[fault.subject]
    certified(fault.subject)
    with monkeypatch.context() as patch:
        fault.plant(patch)
        found = subject.check(subject.plan_again()[1])
    assert not found.ok
    said = [f"{f.where}: {f.what}" for f in found.findings]
    assert any(re.search(fault.says, each) for each in said), said[:5]
