"""What a certificate says of each field of a plan: derived anew, compared, or not verified.

Paths are relative to a plan; those of a stage are the same below ``pipeline.stages``. A field of a
list's entries has the path of the list in front. Options and other mappings are looked up by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.plans import Plan

DERIVED: tuple[str, ...] = (
    "entries.key", "entries.kind", "entries.module", "entries.op", "entries.phase",
    "entries.instances", "entries.nodes.node", "entries.nodes.strategy.inputs",
    "entries.nodes.strategy.outputs", "entries.recompute.node", "entries.recompute.strategy.inputs",
    "entries.recompute.strategy.outputs", "entries.time_s", "entries.replicated",
    "entries.discovered", "entries.again_s",
    "kept.node", "kept.result", "kept.instances", "kept.layouts", "kept.bytes",
    "communications.node", "communications.result", "communications.instances",
    "communications.module", "communications.phase", "communications.source",
    "communications.target", "communications.time_s", "communications.slack",
    "communications.beside", "communications.own", "communications.alone_s",
    *(f"communications.collective.{name}" for name in (
        "kind", "axis", "dim", "to_dim", "reduce_op", "dtype", "bytes", "halo_bytes")),
    *(f"communications.kernel.{name}" for name in (
        "name", "node", "again", "num_chunks", "saved_s")),
    "prediction.step_s", "prediction.compute_s", "prediction.communication_s",
    "prediction.peak_bytes", "prediction.memory_bytes", "prediction.hidden_s",
    "prediction.simulated_s", "prediction.in_kernels_s", "prediction.in_buckets_s",
    "prediction.beyond_shares_s", "prediction.host_bytes",
    "proof.objective_s", "proof.bound_s", "proof.gap", "proof.certified_bound_s",
    "pipeline.num_in_flight", "pipeline.accumulates", "pipeline.positions", "pipeline.modules",
    "pipeline.crossings.node", "pipeline.crossings.layout", "pipeline.crossings.bytes",
    "pipeline.crossings.returns", "pipeline.rank_bytes", "pipeline.handed_bytes",
    "pipeline.handed_s", "overlap.forward_bytes", "overlap.backward_bytes",
    "buckets.phase", "buckets.members.node", "buckets.members.result", "buckets.members.target",
    *(f"buckets.collective.{name}" for name in (
        "kind", "axis", "dim", "to_dim", "reduce_op", "dtype", "bytes", "halo_bytes")),
    "buckets.time_s", "buckets.saved_s",
)  # fmt: skip
"""Recomputed from the model, the hardware and what other fields decide."""

COMPARED: tuple[str, ...] = (
    "fingerprint.model", "fingerprint.model_name", "fingerprint.profile",
    "fingerprint.profile_hash", "fingerprint.axis", "fingerprint.profiles", "fingerprint.inputs",
    "capture", "loss_rows", "options.precision", "options.inference", "options.optimizer",
    "overlap.slowdown", "pipeline.axis", "pipeline.num_microbatches", "pipeline.schedule",
    "pipeline.independent", "proof.on_profiles.profile",
)  # fmt: skip
"""Held against the model, the hardware, and what other fields say."""

_ASKED = "as asked for: the claims hold for it"
_SEARCH = "the search's word"
_ROOM = "room that early steps are given, of which what they hold is derived"
_WITNESS = "multipliers, of which only what they prove is checked"

UNVERIFIED: Mapping[str, str] = {
    "mesh.axes": _ASKED, "mesh.devices_per_node": _ASKED, "mesh.links": _ASKED,
    **{f"options.{name}": _ASKED for name in (
        "memory_bytes", "constraints", "strict", "gap", "num_microbatches", "loss_rows", "batch",
        "outputs")},
    "pipeline.budgets": _ASKED, "pipeline.rank_budgets": _ASKED,
    "starts": "groups of layers, under which every decision is checked",
    "overlap.forward_room": _ROOM, "overlap.backward_room": _ROOM,
    "entries.runner_up": "the search's word, but that the problem offers it",
    "proof.num_variables": _SEARCH,
    "proof.num_constraints": _SEARCH, "proof.solver": _SEARCH, "proof.covers": _SEARCH,
    "proof.memory_price_s_per_gib": _SEARCH, "proof.searched_bound_s": _SEARCH,
    "communications.why": _SEARCH,
    "alone_s": "how long unequal devices wait for the slowest is the planner's word",
    "entries.source": "the file may have changed since",
    "fingerprint.autopar": "what made the plan", "fingerprint.torch": "what made the plan",
    "prediction.timeline": "how seconds are divided among parts, where nothing runs beside compute",
    "proof.balance": _WITNESS, "proof.memory_s": _WITNESS, "proof.potentials": _WITNESS,
    "proof.versions": _WITNESS, "proof.on_profiles.potentials": _WITNESS,
    "proof.on_profiles.versions": _WITNESS,
}  # fmt: skip
"""No claims about the model, or claims that nothing here proves: path → why."""

UNORDERED: tuple[str, ...] = (
    "entries", "entries.instances", "kept", "kept.instances", "communications",
    "communications.instances", "buckets", "buckets.members",
)  # fmt: skip
"""Lists whose order no claim depends on. Members lie in a bucket in the order of their list."""


@dataclass(frozen=True, slots=True)
class Unverified:
    """Fields that a certificate does not vouch for, for one reason."""

    why: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.paths)} ({self.why})"


def unverified(plan: Plan, *, but: Iterable[str] = ()) -> tuple[Unverified, ...]:
    """What of a plan its certificate does not vouch for.

    Args:
        but: paths that are verified in this plan after all.

    Returns:
        The fields that hold anything in the plan or one of its stages, by reason.
    """
    plans = (plan, *plan.pipeline.stages) if plan.pipeline else (plan,)
    by_reason: dict[str, list[str]] = {}
    for path, why in UNVERIFIED.items():
        if path not in but and any(_holds(each, path.split(".")) for each in plans):
            by_reason.setdefault(why, []).append(path)
    return tuple(Unverified(why, tuple(paths)) for why, paths in by_reason.items())


def _holds(value: Any, names: Sequence[str]) -> bool:
    """Whether there is anything at a path."""
    return any(found not in (None, "", {}) for found in _values(value, names))


def _values(value: Any, names: Sequence[str]) -> Iterator[Any]:
    if isinstance(value, tuple):
        for part in value:
            yield from _values(part, names)
    elif not names:
        yield value
    elif value is not None:
        is_mapping = isinstance(value, Mapping)
        inner = value.get(names[0]) if is_mapping else getattr(value, names[0])
        yield from _values(inner, names[1:])
