"""The report of a certificate: its findings, and the fields of a plan that it verifies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autopar.core.units import seconds, share, size
from autopar.plans import Plan
from autopar.validation import Validation

# --------------------------------------------------------------------------------------------------
# What a certificate does with each field of a plan: derived and compared, or not verified.
#
# Paths are relative to a plan; those of a stage are the same below ``pipeline.stages``. The path of
# a field within a list's entries begins with the path of the list. Options and other mappings are
# looked up by key.

DERIVED: tuple[str, ...] = (
    "entries.key",
    "entries.kind",
    "entries.module",
    "entries.op",
    "entries.phase",
    "entries.instances",
    "entries.nodes.node",
    "entries.nodes.strategy.inputs",
    "entries.nodes.strategy.outputs",
    "entries.recompute.node",
    "entries.recompute.strategy.inputs",
    "entries.recompute.strategy.outputs",
    "entries.time_s",
    "entries.replicated",
    "entries.discovered",
    "entries.fallbacks.op",
    "entries.again_s",
    "kept.node",
    "kept.result",
    "kept.instances",
    "kept.layouts",
    "kept.bytes",
    "kept.is_copy",
    "communications.node",
    "communications.result",
    "communications.instances",
    "communications.module",
    "communications.phase",
    "communications.source",
    "communications.target",
    "communications.time_s",
    "communications.slack",
    "communications.beside",
    "communications.own",
    "communications.alone_s",
    *(
        f"communications.collective.{name}"
        for name in ("kind", "axis", "dim", "to_dim", "reduce_op", "dtype", "bytes", "halo_bytes")
    ),
    *(
        f"communications.kernel.{name}"
        for name in ("name", "node", "again", "num_chunks", "saved_s")
    ),
    "prediction.step_s",
    "prediction.compute_s",
    "prediction.communication_s",
    "prediction.peak_bytes",
    "prediction.memory_bytes",
    "prediction.hidden_s",
    "prediction.simulated_s",
    "prediction.in_kernels_s",
    "prediction.in_buckets_s",
    "prediction.beyond_shares_s",
    "prediction.host_bytes",
    "proof.objective_s",
    "proof.bound_s",
    "proof.gap",
    "proof.certified_bound_s",
    "pipeline.num_in_flight",
    "pipeline.accumulates",
    "pipeline.positions",
    "pipeline.modules",
    "pipeline.crossings.node",
    "pipeline.crossings.layout",
    "pipeline.crossings.bytes",
    "pipeline.crossings.returns",
    "pipeline.rank_bytes",
    "pipeline.handed_bytes",
    "pipeline.handed_s",
    "overlap.forward_bytes",
    "overlap.backward_bytes",
    "buckets.phase",
    "buckets.members.node",
    "buckets.members.result",
    "buckets.members.target",
    *(
        f"buckets.collective.{name}"
        for name in ("kind", "axis", "dim", "to_dim", "reduce_op", "dtype", "bytes", "halo_bytes")
    ),
    "buckets.time_s",
    "buckets.saved_s",
)
"""Recomputed from the model, the hardware and the decisions in other fields."""

COMPARED: tuple[str, ...] = (
    "fingerprint.model",
    "fingerprint.model_name",
    "fingerprint.profile",
    "fingerprint.profile_hash",
    "fingerprint.axis",
    "fingerprint.profiles",
    "fingerprint.inputs",
    "capture",
    "loss_rows",
    "options.precision",
    "options.inference",
    "options.optimizer",
    "overlap.slowdown",
    "pipeline.axis",
    "pipeline.num_microbatches",
    "pipeline.schedule",
    "pipeline.independent",
    "proof.on_profiles.profile",
)
"""Compared with the model, the hardware and other fields."""

_ASKED = "as requested: the claims hold for it"
_SEARCH = "the search's word"
_ROOM = "memory reserved for early collectives, whose use is derived"
_WITNESS = "multipliers, checked only by the bound that they prove"
_DIVIDES = "the division of choices into cases, checked only for coverage"

UNVERIFIED: Mapping[str, str] = {
    "mesh.axes": _ASKED,
    "mesh.devices_per_node": _ASKED,
    "mesh.links": _ASKED,
    **{
        f"options.{name}": _ASKED
        for name in (
            "memory_bytes",
            "constraints",
            "strict",
            "gap",
            "num_microbatches",
            "loss_rows",
            "batch",
            "outputs",
        )
    },
    "pipeline.budgets": _ASKED,
    "pipeline.rank_budgets": _ASKED,
    "starts": "groups of layers; every decision is checked under them",
    "overlap.forward_room": _ROOM,
    "overlap.backward_room": _ROOM,
    "entries.runner_up": "claimed by the search; only checked to be offered by the problem",
    "entries.fallbacks.reason": "why experiments found no rule may differ between machines",
    "proof.num_variables": _SEARCH,
    "proof.num_constraints": _SEARCH,
    "proof.solver": _SEARCH,
    "proof.covers": _SEARCH,
    "proof.memory_price_s_per_gib": _SEARCH,
    "proof.searched_bound_s": _SEARCH,
    "communications.why": _SEARCH,
    "alone_s": "the planner's claim of how long unequal devices wait for the slowest",
    "entries.source": "the file may have changed",
    "fingerprint.autopar": "the version that created the plan",
    "fingerprint.torch": "the version that created the plan",
    "prediction.timeline": "the division of seconds among parts, without overlap",
    "proof.balance": _WITNESS,
    "proof.memory_s": _WITNESS,
    "proof.potentials": _WITNESS,
    "proof.versions": _WITNESS,
    "proof.on_profiles.potentials": _WITNESS,
    "proof.on_profiles.versions": _WITNESS,
    "proof.cases.potentials": _WITNESS,
    "proof.cases.versions": _WITNESS,
    "proof.cases.memory_s": _WITNESS,
    "proof.cases.balance": _WITNESS,
    "proof.cases.conditions.node": _DIVIDES,
    "proof.cases.conditions.axis": _DIVIDES,
    "proof.cases.conditions.is_whole": _DIVIDES,
}
"""No claims about the model, or claims that are not proven here: path → reason."""

UNORDERED: tuple[str, ...] = (
    "entries",
    "entries.instances",
    "kept",
    "kept.instances",
    "communications",
    "communications.instances",
    "buckets",
    "buckets.members",
)
"""Lists whose order affects no claim. The members of a bucket are in the order of their list."""


@dataclass(frozen=True, slots=True)
class Unverified:
    """Fields that a certificate does not verify, for one reason."""

    why: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.paths)} ({self.why})"


def list_unverified(plan: Plan, *, but: Iterable[str] = ()) -> tuple[Unverified, ...]:
    """List the fields of a plan that its certificate does not verify.

    Args:
        plan: the plan.
        but: paths that are verified in this plan after all.

    Returns:
        The fields that are not empty in the plan or one of its stages, by reason.
    """
    plans = (plan, *plan.stages)
    by_reason: dict[str, list[str]] = {}
    for path, why in UNVERIFIED.items():
        if path not in but and any(_holds(each, path.split(".")) for each in plans):
            by_reason.setdefault(why, []).append(path)
    return tuple(Unverified(why, tuple(paths)) for why, paths in by_reason.items())


def _holds(value: Any, names: Sequence[str]) -> bool:
    """Return whether a path has a nonempty value."""
    return any(each not in (None, "", {}) for each in _values(value, names))


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


Claim = Literal[
    "model",
    "layouts",
    "moves",
    "kernels",
    "buckets",
    "kept values",
    "emission",
    "overlap",
    "memory",
    "time",
    "bound",
    "words",
    "program",
]
_SHOWN = 12  # printed findings per claim
NEAR = 1e-9  # relative tolerance of sums of the same numbers in another order
_SAME = 1e-4  # share of the objective below which two bounds are reported as one


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim that does not hold: its kind, what is wrong, and where."""

    claim: Claim
    what: str
    where: str = ""

    def __str__(self) -> str:
        if not self.where:
            return f"{self.claim}: {self.what}"
        at = "" if self.where.startswith("in ") else "at "
        return f"{self.claim}: {self.what} ({at}{self.where})"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The claims of a plan, and the result of their checks.

    Attributes:
        title: model, mesh and profile.
        findings: the claims that do not hold; none if `ok`.
        notes: remarks that do not affect the claims, such as another torch version.
        num_decisions, num_nodes, num_steps: number of checked entries, of their nodes, and of
            collectives.
        claimed_step_s, claimed_peak_bytes: step in seconds and peak in bytes as predicted by the
            plan.
        step_s, peak_bytes: the derived figures; None if an earlier finding prevents this.
        budget_bytes: bytes per device, as recorded in the plan.
        objective_s, claimed_bound_s: objective and bound of the plan's proof. The part of the bound
            that is not certified relies on the search.
        certified_bound_s: the bound that `num_multipliers` multipliers prove by arithmetic alone;
            None if an earlier finding prevents this.
        unverified: the fields of the plan that no check covers, by reason.
        validation: how the nodes of the emitted program were justified; None if a node was not,
            which is then a finding.
    """

    title: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    num_decisions: int = 0
    num_nodes: int = 0
    num_steps: int = 0
    claimed_step_s: float = 0.0
    step_s: float | None = None
    claimed_peak_bytes: int = 0
    peak_bytes: int | None = None
    budget_bytes: int = 0
    objective_s: float = 0.0
    claimed_bound_s: float = 0.0
    certified_bound_s: float | None = None
    num_multipliers: int = 0
    unverified: tuple[Unverified, ...] = ()
    validation: Validation | None = None

    @property
    def ok(self) -> bool:
        """Whether every claim holds."""
        return not self.findings

    @property
    def claimed_gap(self) -> float:
        """Relative distance of the objective from the claimed bound."""
        return _gap(self.objective_s, self.claimed_bound_s)

    @property
    def certified_gap(self) -> float | None:
        """Relative distance of the objective from the certified bound."""
        return (
            None
            if self.certified_bound_s is None
            else _gap(self.objective_s, self.certified_bound_s)
        )

    def vouches_for(self, path: Sequence[str | int]) -> bool:
        """Return whether a field of the plan's JSON is checked, and not among the unverified. The
        order of the lists in `UNORDERED` (`autopar.certificate.report`) is not checked.

        Args:
            path: keys of mappings and indices of lists, from the root on.
        """
        names = [key for key in path if isinstance(key, str)]
        names = names[2:] if names[:2] == ["pipeline", "stages"] else names
        listed = (each.split(".") for group in self.unverified for each in group.paths)
        return not any(names[: len(each)] == each for each in listed)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as data of JSON. Seconds and bytes are numbers, None if a figure was
        not derived.

        ``unordered`` lists the fields whose entries may be in any order.
        """
        figures = {
            name: getattr(self, name)
            for name in self.__slots__
            if name not in ("findings", "unverified", "validation")
        }
        return {
            "ok": self.ok,
            **figures,
            "findings": [
                {"claim": f.claim, "what": f.what, "where": f.where} for f in self.findings
            ],
            "unverified": [
                {"fields": list(each.paths), "why": each.why} for each in self.unverified
            ],
            "unordered": list(UNORDERED),
            "validation": None if self.validation is None else str(self.validation),
        }

    def __str__(self) -> str:
        num = len(self.findings)
        verdict = (
            "certified"
            if self.ok
            else f"NOT certified, {num} claim{'s do' if num > 1 else ' does'} not hold"
        )
        return "\n".join(
            [
                f"{verdict}: {self.title}",
                *(
                    f"  {line}"
                    for line in (*self._figure_lines(), *self._finding_lines(), *self._note_lines())
                ),
            ]
        )

    def _figure_lines(self) -> Iterator[str]:
        if self.num_nodes:
            yield (
                f"layouts   {self.num_decisions} decisions over {self.num_nodes} nodes,"
                f" {self.num_steps} collectives between them"
            )
        if self.step_s is not None:
            yield (
                f"step      {seconds(self.step_s)} derived, {seconds(self.claimed_step_s)}"
                " predicted"
            )
        if self.peak_bytes is not None:
            yield (
                f"peak      {size(self.peak_bytes)} derived, {size(self.claimed_peak_bytes)}"
                f" predicted, budget {size(self.budget_bytes)}"
            )
        if self.certified_bound_s is not None and self.certified_gap is not None:
            more = (
                f"{seconds(self.claimed_bound_s)} claimed by the search (gap"
                f" {share(self.claimed_gap)}), not proven here"
            )
            is_less = self.certified_gap - self.claimed_gap > _SAME
            yield (
                f"bound     {seconds(self.certified_bound_s)} proven by arithmetic from"
                f" {self.num_multipliers} multipliers"
                f" (gap {share(self.certified_gap)}),"
                f" {more if is_less else 'all that is claimed'}"
            )

        if self.validation is not None:
            first, *further = str(self.validation).splitlines()
            yield f"program   {first}"
            yield from (f"          {line}" for line in further)

    def _finding_lines(self) -> Iterator[str]:
        for claim in dict.fromkeys(f.claim for f in self.findings):
            findings = [f for f in self.findings if f.claim == claim]
            yield from map(str, findings[:_SHOWN])
            if len(findings) > _SHOWN:
                yield f"{claim}: and {len(findings) - _SHOWN} more"

    def _note_lines(self) -> Iterable[str]:
        noted = (f"note: {note}" for note in self.notes)
        return (*noted, *(f"not verified: {each}" for each in self.unverified))


def near(a: float, b: float) -> bool:
    """Return whether two sums of the same numbers are equal up to rounding."""
    return abs(a - b) <= NEAR * max(abs(a), abs(b))


def _gap(objective_s: float, bound_s: float) -> float:
    return max(objective_s - bound_s, 0.0) / objective_s if objective_s else 0.0
