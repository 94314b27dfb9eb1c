"""The plan: everything that is needed to emit a program, with its prediction and its proof. It is
stored as versioned JSON, never as a pickle.

A plan uses the user's names. Its entries are keyed by patterns of node keys (``module path / op /
phase / ordinal``) in which the indices of repeated layers are written ``{0}``, ``{1}`` …;
`instances` lists the indices that they take. Therefore a plan of 80 equal layers is as long as a
plan of one. Equal plans have the same file, byte for byte.
"""

from __future__ import annotations

import hashlib
import html
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.core.collective import Collective, collective_time, share_of_bucket
from autopar.core.hardware import HardwareProfile
from autopar.core.json_text import read_json
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.core.streams import Load, work
from autopar.core.text_files import read_text, reason_of, write_file
from autopar.core.units import microbatches, seconds, size
from autopar.errors import CONTROL, AutoparError, PlanError
from autopar.plans.consistency import find_contradiction
from autopar.plans.parts import (
    Bucket,
    Communication,
    Crossed,
    Entry,
    Fingerprint,
    Kept,
    Overlap,
    Prediction,
)
from autopar.plans.proof import Proof
from autopar.plans.stored import from_data, to_data

FORMAT = "autopar-plan"
VERSION = 4

_SHOWN: list[Callable[[Plan], str]] = []


def shown_by(card: Callable[[Plan], str]) -> None:
    """Register the function that makes the HTML of plans for notebooks.

    It is registered because `autopar.report`, which defines it, imports this module.
    """
    _SHOWN[:] = [card]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages and microbatches of a plan.

    Attributes:
        axis: name of the mesh axis of the stages; ``""`` if there is one stage on the whole mesh,
            which runs once per microbatch.
        positions: the cuts, as positions among the forward nodes.
        modules: the part of the model with which each later stage begins.
        num_microbatches: number of microbatches of a step.
        schedule: name of the schedule in torch.distributed.pipelining.
        num_in_flight: per stage the number of microbatches whose kept values it holds.
        independent: whether the user promised that samples do not depend on each other.
        stages: one plan per stage, over the mesh without `axis`; its prediction is that of one
            microbatch, with the peak of the stage.
        crossings: per cut the values that go from the stage before it to the stage after it.
        accumulates: whether gradients are added to sums, and parameters may be held gathered,
            through a step.
        rank_bytes: if a device holds several stages, the peak in bytes of each rank of the axis. A
            stage's own peak is then computed as if it were alone.
        budgets: if a device holds several stages, the bytes of memory within which each stage was
            planned.
        rank_budgets: budget in bytes of each rank of the axis, if devices along it have different
            budgets; empty if the plan's option holds for all.
        handed_bytes: bytes of the outputs, other than the loss, that are sent from the stages that
            make them to all others, once a step.
        handed_s: seconds of these transfers.
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

    @staticmethod
    def of_one_stage(plan: Plan) -> Pipeline:
        """Return a pipeline whose only stage is a plan without stages, which runs once a step."""
        return Pipeline(
            axis="",
            positions=(),
            modules=(),
            num_microbatches=1,
            schedule="1f1b",
            num_in_flight=(1,),
            independent=False,
            stages=(plan,),
            crossings=(),
            accumulates=False,
        )

    @property
    def num_chunks(self) -> int:
        """Stages per device."""
        return len(self.stages) // len(self.rank_bytes) if self.rank_bytes else 1

    @property
    def num_ranks(self) -> int:
        """Devices along the axis; 1 if there is no axis."""
        return len(self.stages) // self.num_chunks

    @property
    def ranks(self) -> tuple[tuple[Plan, ...], ...]:
        """The stages of each rank of the axis."""
        return tuple(self.stages[rank :: self.num_ranks] for rank in range(self.num_ranks))

    @property
    def rank_word(self) -> str:
        """``stage`` if a device holds one stage, else ``rank``."""
        return "rank" if self.num_chunks > 1 else "stage"

    def where(self, rank: int) -> str:
        """Describe the devices of a rank, for unequal devices: ``stage 1 (a100-sxm-80gb)``, or
        ``rank 1 (…)`` if it holds several stages."""
        return f"{self.rank_word} {rank} ({self.stages[rank].fingerprint.profile})"

    @property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of a device of each rank."""
        return self.rank_bytes or tuple(stage.prediction.peak_bytes for stage in self.stages)

    @property
    def host_bytes(self) -> Mapping[str, int]:
        """Kind → bytes on the host, of the device with the most bytes there. Tensors that several
        of its stages read are counted for each of them."""
        num_ranks = self.num_ranks
        ranks: list[Counter[str]] = [Counter() for _ in range(num_ranks)]
        for number, stage in enumerate(self.stages):
            ranks[number % num_ranks].update(stage.prediction.host_bytes)
        return max(map(dict, ranks), key=lambda kinds: sum(kinds.values()))


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of planning (see the module docstring). A plan with a `pipeline` has its decisions
    in the plans of its stages. Any other plan is its own only stage (`as_pipeline`).

    Attributes:
        mesh: the mesh that it is for.
        fingerprint: the model, the batch and the hardware that it is for.
        options: the options of planning that are recorded (`autopar.plans.OPTIONS`).
        entries: the decisions.
        kept: the values that are kept for backward.
        communications: the collectives.
        prediction: predicted time and memory of a step.
        proof: the proven bound.
        capture: whether repeated layers were captured once, or why all layers were captured.
        pipeline: stages and microbatches; None if there is one stage and one microbatch.
        overlap: how far communication overlaps with compute.
        loss_rows: number of rows of logits that the loss has at a time on a device; 0 for all.
        starts: list of layers → the indices where its second and later groups begin, if the layers
            do not all have the same decisions.
        buckets: the communications that are done as one collective.
        alone_s: if unequal devices run in lockstep, the seconds of the plan's step if all devices
            were equal to those at each index along their axis.
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

    @property
    def as_pipeline(self) -> Pipeline:
        """The pipeline of the plan; without one, the plan as a pipeline of one stage and one
        microbatch."""
        return self.pipeline or Pipeline.of_one_stage(self)

    @property
    def stages(self) -> tuple[Plan, ...]:
        """The plans of the stages, which hold all decisions; the plan itself without a pipeline."""
        return self.as_pipeline.stages

    @property
    def stage_axis(self) -> str:
        """Name of the mesh axis of the stages; ``""`` if there is one stage on the whole mesh."""
        return self.as_pipeline.axis

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step."""
        return self.as_pipeline.num_microbatches

    @property
    def unit(self) -> str:
        """The unit of the figures of stages: ``microbatch``, or ``step`` for a plan without a
        pipeline.
        """
        return "microbatch" if self.pipeline else "step"

    def node_choices(self) -> dict[str, Strategy]:
        """Return the strategy of every node, by node key, with all instances expanded."""
        return dict(_expand(self.entries, "nodes"))

    def recomputed_choices(self) -> dict[str, Strategy]:
        """Return the strategy of every node that backward runs again, by node key, with all
        instances expanded."""
        return dict(_expand(self.entries, "recompute"))

    def kept_layouts(self) -> dict[tuple[str, int], tuple[Layout, ...]]:
        """Return (node key, result) → layouts kept for backward, with all instances expanded."""
        return {(k.node.format(*i), k.result): k.layouts for k in self.kept for i in k.instances}

    def steps(self) -> tuple[tuple[str, Communication], ...]:
        """Return (node key, communication) pairs, with all instances expanded."""
        return tuple(
            (c.node.format(*indices), c) for c in self.communications for indices in c.instances
        )

    def issued(self) -> tuple[tuple[str, Collective], ...]:
        """Return (phase, collective) pairs as the program runs them: the communications of a bucket
        are one collective."""
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
        """Return the bytes that the plan may use on a device of one stage, or on any device if it
        has no stages; 0 if they are not recorded."""
        budgets = self.as_pipeline.rank_budgets
        if budgets:
            return budgets[stage % len(budgets)]
        return int(self.options.get("memory_bytes", 0))

    def __repr__(self) -> str:
        """Summarize the plan in one line; `autopar.explain` has the details."""
        num = len(self.stages)
        staged = f", {num} stages" if num > 1 else ""
        stages = (
            f", {len(self.entries)} decisions"
            if self.entries
            else f"{staged}, {microbatches(self.num_microbatches)}"
        )
        step_s, peak = seconds(self.prediction.step_s), size(self.prediction.peak_bytes)
        return (
            f"Plan({self.fingerprint.model_name or 'model'} on {self.mesh}{stages}: step {step_s},"
            f" peak {peak})"
        )

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show: that of `autopar.report.card` if it is imported,
        which all functions that make plans do."""
        return _SHOWN[0](self) if _SHOWN else f"<pre>{html.escape(repr(self))}</pre>"

    @property
    def hash(self) -> str:
        """Hash of the text of the file; all ranks must have the same."""
        return hashlib.sha256(self.dumps().encode()).hexdigest()[:16]

    def dumps(self) -> str:
        """Return the text of the file: JSON with sorted keys and one value per line."""
        return (
            json.dumps(
                {"format": FORMAT, "version": VERSION, **to_data(self)}, indent=1, sort_keys=True
            )
            + "\n"
        )

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            PlanError: if the file cannot be written.
        """
        write_file(path, self.dumps(), "the plan", PlanError)

    @staticmethod
    def of(plan: Plan | str | Path) -> Plan:
        """Return `plan` itself, or load it if it is a path.

        Raises:
            PlanError: if it is neither a plan nor a path; also as `load`.
        """
        if isinstance(plan, str | Path):
            return Plan.load(plan)
        if not isinstance(plan, Plan):
            message = f"{type(plan).__name__} is not a plan"
            raise PlanError(
                message,
                remedy="pass an autopar.Plan or its file; pm.plan is the plan of a compiled module",
            )
        return plan

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            PlanError: if the file cannot be read, is not JSON or not a plan, or has another
                version.
        """
        try:
            text = read_text(path)
        except OSError as error:
            raise PlanError(
                f"cannot read plan {str(path)!r}: {reason_of(error)}",
                remedy="check the path; Plan.save writes plan files",
            ) from error
        return Plan.loads(text, str(path))

    @staticmethod
    def loads(text: str, where: str = "") -> Plan:
        """Read a plan from the text of its file.

        Args:
            text: the text.
            where: name of the file, for errors.

        Raises:
            PlanError: if it is not JSON or not a plan, or has another version.
        """
        try:
            data = read_json(text, without=CONTROL)
        except ValueError as error:
            message = f"plan is not JSON that autopar can read: {error}"
            raise PlanError(message, where=where, remedy="save it again with Plan.save") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise PlanError(
                "the file is not an autopar plan",
                where=where,
                remedy="pass a file written by Plan.save",
            )
        if data.get("version") != VERSION:
            raise PlanError(
                f"plan version {data.get('version')!r:.40} is not supported; this autopar reads "
                f"version {VERSION}",
                where=where,
                remedy="plan again",
            )
        try:
            fields = {key: data[key] for key in data if key not in ("format", "version")}
            plan = from_data(fields, Plan)
            wrong = find_contradiction(plan)
            if not wrong:  # patterns must match their instances to be expanded
                plan.node_choices(), plan.recomputed_choices(), plan.kept_layouts(), plan.steps()
        except (IndexError, KeyError, ValueError, AutoparError) as error:
            raise PlanError(
                f"plan is malformed: {error}", where=where, remedy="plan again"
            ) from error
        if wrong:
            raise PlanError(f"plan is malformed: {wrong}", where=where, remedy="plan again")
        return plan


def _expand(entries: tuple[Entry, ...], which: str) -> Iterator[tuple[str, Strategy]]:
    for entry in entries:
        for choice in getattr(entry, which):
            for indices in entry.instances:
                yield choice.node.format(*indices), choice.strategy


# --------------------------------------------------------------------------------------------------
# The load of the two streams of a step under a plan (`autopar.core.streams.Load`), from the times
# that the plan records for each piece of work.


def load_of(plan: Plan) -> Load:
    """Return the load of a step, or of one microbatch for the plan of a stage."""
    entries = sum(
        (
            _entry_load(e, e.time_s * len(e.instances), e.again_s * len(e.instances))
            for e in plan.entries
        ),
        Load(),
    )
    return sum(
        (moved_load(c, c.time_s * len(c.instances), _saved_s(c)) for c in plan.communications),
        entries,
    )


def forward_load(plan: Plan) -> Load:
    """Return the load of the forward phase of a step, or of one microbatch for the plan of a
    stage."""
    entries = (e for e in plan.entries if e.phase == "forward" and e.kind in ("compute", "input"))
    computed = sum((_entry_load(e, e.time_s * len(e.instances), 0.0) for e in entries), Load())
    moves = (c for c in plan.communications if c.phase == "forward")
    return sum((moved_load(c, c.time_s * len(c.instances), _saved_s(c)) for c in moves), computed)


def beyond_shares_s(moves: Iterable[Communication]) -> float:
    """Return the seconds by which collectives on their own take longer than the shares of buckets
    that the objective counts.
    """
    return sum(len(c.instances) * (c.by_itself_s - c.time_s) for c in moves)


def counted_time(c: Communication, axis_size: int, link: str, profile: HardwareProfile) -> float:
    """Return the seconds of one instance of a collective on other hardware, counted as in the plan.

    Args:
        c: the communication.
        axis_size: devices on the mesh axis there.
        link: the link of the axis there, ``"intra"`` or ``"inter"``.
        profile: the other hardware.
    """
    moved = c.collective
    alone_s = collective_time(moved, axis_size, link, profile)
    if c.alone_s is None or axis_size == 1:
        return alone_s
    return min(alone_s, share_of_bucket(moved, axis_size, link, profile))


def _entry_load(entry: Entry, time_s: float, again_s: float) -> Load:
    """Load of an entry that takes `time_s`, and `again_s` when backward runs it again."""
    if entry.kind != "compute":  # parameters, inputs and transfers of stages do not overlap
        return Load(time_s + again_s)
    return work(entry.phase, time_s, compute=True) + work("backward", again_s, compute=True)


def _saved_s(c: Communication) -> float:
    return c.kernel.saved_s * len(c.instances) if c.kernel else 0.0


def moved_load(c: Communication, time_s: float, saved_s: float = 0.0) -> Load:
    """Return the load of all instances of a communication.

    Args:
        c: the communication.
        time_s: seconds of all its instances.
        saved_s: seconds of these and of the products beside them that kernels save.
    """
    if c.phase == "step":
        return Load(time_s)
    load = work(c.phase, time_s, compute=c.collective.kind == "slice", early=c.beside)
    return load + work(c.phase, saved_s, compute=True).scale(-1.0) if saved_s else load
