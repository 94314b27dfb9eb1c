"""Expected results of the comparison, checked on its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common import Row
from benchmarks.rivals.plans import METHOD

MIB = 2**20
PEAKS = {"activations": "activation_peak_bytes", "all": "peak_above_parameters_bytes"}
SMALL_RISE = 0.02  # share of the budget
KNOWN_RISE = (
    "a plan is chosen for its time: if two plans are below budget, that of the smaller budget"
    " may use slightly more memory"
)
SLACK = 1e-4  # share of eager's flops
# (model, budget of activations in MiB) → largest extra flops. From an earlier measurement with
# a separate program for the choice of kept values.
AIMS: Mapping[str, Mapping[int, float]] = {"llama-12x512": {142: 0.065, 115: 0.115, 95: 0.155}}
# Difference of another method from a choice of kept values → why a plan need not reach its result.
KNOWN = {
    "fused": (
        "Inductor's fused kernels hold no results between the ops they join; these plans run op"
        " by op"
    ),
}


def plans_of(rows: Sequence[Row], model: str, counts: str) -> list[Row]:
    """Return autopar's measured rows, from the largest budget to the smallest."""
    here = (
        r
        for r in rows
        if r["model"] == model and r["method"] == METHOD and r["counts"] == counts and "flops" in r
    )
    return sorted(here, key=lambda r: -r["budget_bytes"])


def rivals_of(rows: Sequence[Row], model: str) -> list[Row]:
    """Return the measured rows of all other methods."""
    return [r for r in rows if r["model"] == model and r["method"] != METHOD and "flops" in r]


def front(rows: Sequence[Row], key: str) -> list[Row]:
    """Return the rows of the Pareto front of peak and flops, from the largest peak down."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda r: (r[key], r["extra_flops"])):
        if not best or row["extra_flops"] < best[-1]["extra_flops"] - SLACK:
            best.append(row)
    return best[::-1]


def to_beat(rivals: Sequence[Row], key: str) -> list[Row]:
    """Return the front of the other methods that only choose kept values, and the front of those
    with further differences."""
    return front([r for r in rivals if r["kind"] not in KNOWN], key) + front(
        [r for r in rivals if r["kind"] in KNOWN], key
    )


def at_most(plans: Sequence[Row], key: str, peak: int) -> Row | None:
    """Return the plan with the fewest flops of those whose peak is not higher."""
    return min((p for p in plans if p[key] <= peak), key=lambda p: p["extra_flops"], default=None)


def claims(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each claim about each model: whether it holds and, if it does not, the known reason,
    if any."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for counts, key in PEAKS.items():
            plans = plans_of(rows, model, counts)
            if plans:
                told = [
                    _within(plans, key),
                    _falling(plans, key),
                    *_against(plans, rivals_of(rows, model), key),
                ]
                found += [{"model": model, "counts": counts, **claim} for claim in told]
    return found


def _claim(text: str, ok: bool, detail: str, known: str | None = None) -> dict[str, Any]:
    return {"claim": text, "ok": ok, "detail": detail, "known": None if ok else known}


def _within(plans: Sequence[Row], key: str) -> dict[str, Any]:
    worst = max(plans, key=lambda p: p[key] / p["budget_bytes"])
    text = (
        f"{worst[key] / MIB:.1f} MiB under {worst['budget_bytes'] / MIB:.1f}, the closest of"
        f" {len(plans)}"
    )
    return _claim(
        "the measured peak is within the budget", worst[key] <= worst["budget_bytes"], text
    )


def _falling(plans: Sequence[Row], key: str) -> dict[str, Any]:
    rises = [(a, b) for a, b in pairwise(plans) if b[key] > a[key]]
    shown = [
        f"{a[key] / MIB:.1f} → {b[key] / MIB:.1f} MiB under {b['budget_bytes'] / MIB:.1f}"
        for a, b in rises
    ]
    small = all(
        b[key] <= b["budget_bytes"] and b[key] - a[key] <= SMALL_RISE * b["budget_bytes"]
        for a, b in rises
    )
    known = KNOWN_RISE if small else None
    return _claim(
        "the measured peak never rises as the budget falls",
        not rises,
        "; ".join(shown) or f"{len(plans)} budgets",
        known,
    )


def _against(plans: Sequence[Row], rivals: Sequence[Row], key: str) -> Iterator[dict[str, Any]]:
    for rival in to_beat(rivals, key):
        ours = at_most(plans, key, rival[key])
        good = ours is not None and ours["extra_flops"] <= rival["extra_flops"] + SLACK
        ours_text = (
            f"{ours['extra_flops']:+.1%} at {ours[key] / MIB:.1f} MiB" if ours else "no plan"
        )
        text = f"{ours_text} against {rival['extra_flops']:+.1%} at {rival[key] / MIB:.1f}"
        yield _claim(
            f"no more flops than {rival['method']} at no higher peak",
            good,
            text,
            KNOWN.get(rival["kind"]),
        )


def aims(rows: Sequence[Row], model: str) -> list[dict[str, Any]]:
    """Return the aims for a model, and the results."""
    found = []
    for size, most in AIMS.get(model, {}).items():
        ours = at_most(plans_of(rows, model, "activations"), PEAKS["activations"], size * MIB)
        reached = None if ours is None else ours["extra_flops"]
        good = reached is not None and reached <= most
        found.append(
            {
                "model": model,
                "activation_mib": size,
                "aim": most,
                "extra_flops": reached,
                "ok": good,
            }
        )
    return found
