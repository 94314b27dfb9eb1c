"""The plan: everything needed to emit, with its prediction and its proof. Versioned JSON, never
pickle.

A plan speaks the user's words. Its entries are keyed by patterns of node keys (``module path / op /
phase / ordinal``) in which the indices of repeated layers are written ``{0}``, ``{1}`` …;
`instances` lists the indices they take. So a plan of 80 equal layers is as long as a plan of one.
The file is the same, byte for byte, for the same plan.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.core.collective import Collective
from autopar.core.json_text import mismatch, read_json, unread
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.core.units import microbatches, seconds, size
from autopar.errors import CONTROL, AutoparError, PlanError
from autopar.plans.consistency import misfit
from autopar.plans.parts import (
    Bucket,
    Communication,
    Crossed,
    Entry,
    Fingerprint,
    Kept,
    Overlap,
    Prediction,
    read_bucket,
    read_communication,
    read_entry,
    read_fingerprint,
    read_instances,
    read_overlap,
)
from autopar.plans.proof import Proof, read_proof

FORMAT = "autopar-plan"
VERSION = 4

_SHOWN: list[Callable[[Plan], str]] = []


def shown_by(card: Callable[[Plan], str]) -> None:
    """Let notebooks show plans by this HTML, which is made on a floor above."""
    _SHOWN[:] = [card]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How a plan works through microbatches, in stages.

    Attributes:
        axis: name of the mesh axis along which the stages lie, ``""`` where one stage on the whole
            mesh runs once per microbatch.
        positions: the cuts, as positions among the forward nodes. modules: the part of the model
            with which each later stage begins.
        schedule: its name in torch.distributed.pipelining. num_in_flight: per stage, microbatches
            whose kept values it holds.
        independent: whether the user promised that samples do not depend on each other.
        accumulates: whether gradients are added to sums, and parameters may be held gathered,
            through a step.
        stages: one plan per stage, over the mesh without the axis; its prediction is that of one
            microbatch, with the stage's peak.
        crossings: per cut, what goes from the stage before it to the one behind.
        rank_bytes, budgets: where a device holds several stages, the peak of each rank of the axis,
            and the share of memory within which each stage was planned; a stage's own peak is then
            as if it were alone.
        rank_budgets: where devices along the axis have budgets of their own, that of each rank;
            else the plan's option holds for all.
        handed_bytes: of outputs, the loss apart, that go from the stages that make them to all
            others, once a step, in `handed_s`.
    """

    axis: str
    positions: tuple[int, ...]
    modules: tuple[str, ...]
    num_microbatches: int
    schedule: str
    num_in_flight: tuple[int, ...]
    independent: bool
    stages: tuple[Plan, ...]
    crossings: tuple[tuple[Crossed, ...], ...]
    accumulates: bool
    rank_bytes: tuple[int, ...] = ()
    budgets: tuple[int, ...] = ()
    rank_budgets: tuple[int, ...] = ()
    handed_bytes: int = 0
    handed_s: float = 0.0

    @property
    def num_chunks(self) -> int:
        """Stages per device."""
        return len(self.stages) // len(self.rank_bytes) if self.rank_bytes else 1

    @property
    def num_ranks(self) -> int:
        """Devices along the axis; 1 where there is none."""
        return len(self.stages) // self.num_chunks

    def where(self, rank: int) -> str:
        """Which devices a rank's are, of unequal ones: ``stage 1 (a100-sxm-80gb)``, or ``rank``
        where it holds several stages."""
        return (
            f"{'rank' if self.rank_bytes else 'stage'} {rank}"
            f" ({self.stages[rank].fingerprint.profile})"
        )

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes at the peak of each rank's devices."""
        return self.rank_bytes or tuple(stage.prediction.peak_bytes for stage in self.stages)

    @property
    def host_bytes(self) -> Mapping[str, int]:
        """Kind → bytes that the device with most on its host has there; what several of its
        stages read is counted for each."""
        num_ranks = self.num_ranks
        ranks: list[Counter[str]] = [Counter() for _ in range(num_ranks)]
        for number, stage in enumerate(self.stages):
            ranks[number % num_ranks].update(stage.prediction.host_bytes)
        return max(map(dict, ranks), key=lambda kinds: sum(kinds.values()))


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: see the module docstring. `capture` says how repeated layers were captured, or
    why in full; `overlap` how far communication runs beside compute; `loss_rows` how many rows of
    logits the loss has at a time on a device, 0 for all; `starts`, per list of layers whose layers
    do not all decide alike, where its second and later groups begin; `buckets` which communications
    are one collective; `alone_s`, where unequal devices run in lockstep, the seconds of the plan's
    step if all were like those at each index along their axis.

    A plan with a `pipeline` has its decisions in the plans of its stages.
    """

    mesh: Mesh
    fingerprint: Fingerprint
    options: Mapping[str, Any]
    entries: tuple[Entry, ...]
    kept: tuple[Kept, ...]
    communications: tuple[Communication, ...]
    prediction: Prediction
    proof: Proof
    capture: str = ""
    pipeline: Pipeline | None = None
    overlap: Overlap = field(default_factory=Overlap)
    loss_rows: int = 0
    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buckets: tuple[Bucket, ...] = ()
    alone_s: tuple[float, ...] = ()

    def node_choices(self) -> dict[str, Strategy]:
        """Strategy per node key, all instances expanded."""
        return dict(_expand(self.entries, "nodes"))

    def recomputed_choices(self) -> dict[str, Strategy]:
        """Strategy per node key that backward runs again, all instances expanded."""
        return dict(_expand(self.entries, "recompute"))

    def kept_layouts(self) -> dict[tuple[str, int], tuple[Layout, ...]]:
        """(node key, result) → layouts kept for backward, all instances expanded."""
        return {(k.node.format(*i), k.result): k.layouts for k in self.kept for i in k.instances}

    def steps(self) -> tuple[tuple[str, Communication], ...]:
        """(node key, collective), all instances expanded."""
        return tuple(
            (c.node.format(*indices), c) for c in self.communications for indices in c.instances
        )

    def issued(self) -> tuple[tuple[str, Collective], ...]:
        """(phase, collective) as the program runs them: those that share a bucket are one."""
        shared = {
            (bucket.phase, m.node, m.result, m.target)
            for bucket in self.buckets
            for m in bucket.members
        }
        alone = (
            (c.phase, c.collective)
            for node, c in self.steps()
            if c.own or (c.phase, node, c.result, c.target) not in shared
        )
        return (*alone, *((bucket.phase, bucket.collective) for bucket in self.buckets))

    def budget_of(self, stage: int) -> int:
        """Bytes of a device of one stage that the plan may use; of a plan without stages, of
        each; 0 where it does not say."""
        pipeline = self.pipeline
        if pipeline is not None and pipeline.rank_budgets:
            return pipeline.rank_budgets[stage % pipeline.num_ranks]
        return int(self.options.get("memory_bytes", 0))

    def __repr__(self) -> str:
        """One line; `autopar.explain` tells all."""
        parts = self.pipeline
        staged = f", {len(parts.stages)} stages" if parts and len(parts.stages) > 1 else ""
        stages = (
            f"{staged}, {microbatches(parts.num_microbatches)}"
            if parts
            else f", {len(self.entries)} decisions"
        )
        step_s, peak = seconds(self.prediction.step_s), size(self.prediction.peak_bytes)
        return (
            f"Plan({self.fingerprint.model_name or 'model'} on {self.mesh}{stages}: step {step_s},"
            f" peak {peak})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: `autopar.report.card`, where that is imported, as it is by all
        that makes plans."""
        return _SHOWN[0](self) if _SHOWN else f"<pre>{html.escape(repr(self))}</pre>"

    @property
    def hash(self) -> str:
        """Hash of the file's text; all ranks must agree on it."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]

    def dumps(self) -> str:
        """The file's text: sorted keys, one fact a line."""
        return (
            json.dumps(
                {"format": FORMAT, "version": VERSION, **_encode(self)}, indent=1, sort_keys=True
            )
            + "\n"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @staticmethod
    def of(plan: Plan | str | Path) -> Plan:
        """A plan as it is, or the one in a file. Raises PlanError where it is neither, and as
        `load`."""
        if isinstance(plan, str | Path):
            return Plan.load(plan)
        if not isinstance(plan, Plan):
            what = f"{type(plan).__name__} is no plan"
            raise PlanError(
                what,
                remedy="pass an autopar.Plan or its file; a compiled module has its own as pm.plan",
            )
        return plan

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: where the file is missing, no JSON, no plan, or of another version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise PlanError(
                f"cannot read plan {str(path)!r}: {why}",
                remedy="check the path; Plan.save writes it",
            ) from error
        return Plan.loads(text, str(path))

    @staticmethod
    def loads(text: str, where: str = "") -> Plan:
        """Read a plan from text; `where` names it in errors."""
        try:
            data = read_json(text, without=CONTROL)
        except ValueError as error:
            what = f"plan is no JSON that autopar reads: {error}"
            raise PlanError(what, where=where, remedy="save it again with Plan.save") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(
                "the file is no autopar plan",
                where=where,
                remedy="pass a file written by Plan.save",
            )
        if data.get("version") != VERSION:
            raise PlanError(
                f"plan version {data.get('version')!r:.40}, this autopar reads {VERSION}",
                where=where,
                remedy="plan again",
            )
        try:
            plan = _decode_plan(data)
            wrong = mismatch(plan, Plan, (Layout, Mesh)) or misfit(plan)
            if not wrong:  # a pattern that its instances do not fill cannot be expanded
                plan.node_choices(), plan.recomputed_choices(), plan.kept_layouts(), plan.steps()
            wrong = wrong or unread(data, {"format": FORMAT, "version": VERSION, **_encode(plan)})
        except KeyError as error:
            raise PlanError(
                f"plan is malformed: it has no {error}", where=where, remedy="plan again"
            ) from error
        except (IndexError, TypeError, ValueError, AttributeError, AutoparError) as error:
            raise PlanError(
                f"plan is malformed: {type(error).__name__}: {error}",
                where=where,
                remedy="plan again",
            ) from error
        if wrong:
            raise PlanError(f"plan is malformed: {wrong}", where=where, remedy="plan again")
        return plan


def _expand(entries: tuple[Entry, ...], which: str) -> Iterator[tuple[str, Strategy]]:
    for entry in entries:
        for choice in getattr(entry, which):
            for indices in entry.instances:
                yield choice.node.format(*indices), choice.strategy


def _encode(value: Any) -> Any:
    if isinstance(value, Layout):
        return str(value)
    if isinstance(value, Mesh):
        return value.to_json()
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value


def _decode_plan(data: Mapping[str, Any]) -> Plan:
    prediction = {
        **data["prediction"],
        "timeline": tuple(tuple(row) for row in data["prediction"]["timeline"]),
    }
    kept = tuple(
        Kept(
            **{
                **k,
                "instances": read_instances(k["instances"]),
                "layouts": tuple(map(Layout.parse, k["layouts"])),
            }
        )
        for k in data["kept"]
    )
    return Plan(
        mesh=Mesh.from_json(data["mesh"]),
        fingerprint=read_fingerprint(data["fingerprint"]),
        options=data["options"],
        entries=tuple(map(read_entry, data["entries"])),
        kept=kept,
        communications=tuple(map(read_communication, data["communications"])),
        prediction=Prediction(**prediction),
        proof=read_proof(data["proof"]),
        capture=str(data.get("capture", "")),
        pipeline=_decode_pipeline(data.get("pipeline")),
        overlap=read_overlap(data.get("overlap", {})),
        loss_rows=data.get("loss_rows", 0),
        starts={layers: tuple(starts) for layers, starts in data.get("starts", {}).items()},
        buckets=tuple(map(read_bucket, data.get("buckets", ()))),
        alone_s=tuple(data.get("alone_s", ())),
    )


def _decode_pipeline(data: Mapping[str, Any] | None) -> Pipeline | None:
    if data is None:
        return None
    lists = {name: tuple(data[name]) for name in ("positions", "modules", "num_in_flight")}
    lists |= {name: tuple(data.get(name, ())) for name in ("rank_bytes", "budgets", "rank_budgets")}
    crossings = tuple(
        tuple(Crossed(**{**c, "layout": Layout.parse(c["layout"])}) for c in cut)
        for cut in data["crossings"]
    )
    return Pipeline(
        **{
            **data,
            **lists,
            "stages": tuple(map(_decode_plan, data["stages"])),
            "crossings": crossings,
        }
    )
