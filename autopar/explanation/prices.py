"""What faster links are worth to a plan as it is: its own communication, priced again on a link that is a little faster.

The difference is exact for the plan's decisions, with what compute hides in it; where stages are interleaved, devices are taken to wait
for as large a share of the step as in the plan. A plan made for the faster link is at least as fast as this one is on it, so planning
anew gains no less. What a faster link is, `autopar.collective.faster` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.text import Text

from autopar.collective import collective_time, faster
from autopar.emit.choices import input_key, output_key
from autopar.errors import PlanError
from autopar.explanation.rendering import table
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.plans import Pipeline, Plan, load_of, moved_load
from autopar.units import seconds

_SHARE = 1e-3  # by which a link is made faster
_GB = 1e9


@dataclass(frozen=True, slots=True)
class LinkWorth:
    """One mesh axis: its link, the time of a step that the plan communicates over it, and what a GB/s more per device would save.

    Attributes:
        communication_s: of one step, on the stages' critical path: what the step would be shorter by if it took no time.
    """

    axis: str
    link: str
    bandwidth_bytes_per_s: float
    communication_s: float
    saved_s_per_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Worth:
    """What the links of a plan's axes are worth, or why that is not known."""

    links: tuple[LinkWorth, ...] = ()
    missing: str = ""

    def renderables(self) -> Iterator[RenderableType]:
        """A table, or the reason why there is none."""
        if self.missing:
            yield Text(self.missing)
            return
        rows = [
            (w.axis, w.link, f"{w.bandwidth_bytes_per_s / _GB:.4g} GB/s", seconds(w.communication_s), seconds(w.saved_s_per_gb_per_s))
            for w in self.links
        ]
        if rows:
            title = "What faster links are worth to this plan as it is, a step; a plan made for them gains no less"
            yield from table(title, ("axis", "link", ">now", ">communicates", ">saved per GB/s more, at first"), rows)


def worth(plan: Plan, profile: HardwareProfile | None = None) -> Worth:
    """What a GB/s more on the link of each axis saves this plan.

    Args:
        profile: the one that the plan was made for; by default the shipped one of its name.
    """
    name, known = plan.fingerprint.profile, plan.fingerprint.profile_hash
    if profile is None and name not in HardwareProfile.names():
        return Worth(missing=f"what faster links are worth is not known: profile {name} is not at hand")
    profile = profile or HardwareProfile.load(name)
    if profile.hash != known:
        return Worth(missing=f"what faster links are worth is not known: profile {name} is not the one that the plan was made for")
    return Worth(tuple(_of_axis(plan, axis, profile) for axis in plan.mesh.names if _size(plan.mesh, axis) > 1))


def _of_axis(plan: Plan, axis: str, profile: HardwareProfile) -> LinkWorth:
    name = plan.mesh.link(plan.mesh.names.index(axis))
    link = profile.links[name]
    quicker = replace(profile, links={**profile.links, name: faster(link, _SHARE)})
    now, then, nothing = (_times(plan, axis, p) for p in (profile, quicker, None))
    saved_s = step_with(plan, now) - step_with(plan, then)
    per_gb = saved_s / (_SHARE * link.bandwidth_bytes_per_s / _GB)
    return LinkWorth(axis, name, link.bandwidth_bytes_per_s, step_with(plan, now) - step_with(plan, nothing), per_gb)


def step_with(plan: Plan, times: Sequence[float]) -> float:
    """Seconds of the step, for times of the step or of a microbatch per stage; see the module docstring for interleaved stages."""
    num = plan.pipeline.num_microbatches if plan.pipeline else 1
    if plan.pipeline and plan.pipeline.num_chunks > 1:
        then, planned = (_busiest(plan.pipeline, each) for each in (times, [s.prediction.step_s for s in plan.pipeline.stages]))
        return plan.prediction.step_s * then / planned
    return (num - 1) * max(times) + sum(times)


def longer_step_s(plan: Plan, stage: int, delta_s: float) -> float:
    """By how much the step of a plan with stages is longer where one stage's microbatch takes so much longer."""
    assert plan.pipeline is not None, "the plan has stages"
    now = [s.prediction.step_s for s in plan.pipeline.stages]
    then = [time_s + delta_s * (number == stage) for number, time_s in enumerate(now)]
    return step_with(plan, then) - step_with(plan, now)


def _busiest(pipeline: Pipeline, times: Sequence[float]) -> float:
    """Of a microbatch, what all stages of the rank take that does most."""
    num_ranks = len(pipeline.rank_bytes)
    return max(sum(times[rank::num_ranks]) for rank in range(num_ranks))


def _times(plan: Plan, axis: str, profile: HardwareProfile | None) -> list[float]:
    """Times of the step, or of a microbatch per stage, where what is sent along `axis` is priced on `profile`; with None it is free."""
    stages = plan.pipeline.stages if plan.pipeline else (plan,)
    if plan.pipeline and axis == plan.pipeline.axis:
        return [s.prediction.step_s - r + w for s, r, w in zip(stages, *_received(plan.pipeline, plan.mesh, profile), strict=True)]
    num = plan.pipeline.num_microbatches if plan.pipeline else 1
    return [stage.prediction.step_s - _shorter_s(stage, axis, profile, num) for stage in stages]


def _shorter_s(plan: Plan, axis: str, profile: HardwareProfile | None, num_microbatches: int) -> float:
    """By how much a step or a microbatch is shorter where what is sent along `axis` is priced on `profile`; what is done once per step is
    shared among microbatches."""
    number, slowdown = plan.mesh.names.index(axis), plan.overlap.slowdown
    size, link = plan.mesh.shape[number], plan.mesh.link(number)
    load = changed = load_of(plan)
    for c in plan.communications:
        if c.collective.axis == number and c.collective.kind != "slice":
            once_s = collective_time(c.collective, size, link, profile) if profile else 0.0
            once_s /= num_microbatches if c.phase == "step" else 1
            # what kernels save goes with the collective: exact where their products hide nearly all of it; routes save passes over memory
            saved_s = c.kernel.saved_s * (once_s / c.time_s - 1.0) if c.kernel and not c.own else 0.0
            changed += moved_load(c, len(c.instances) * (once_s - c.time_s), len(c.instances) * saved_s)
    return load.least_s(slowdown) - changed.least_s(slowdown)


def _received(pipeline: Pipeline, mesh: Mesh, profile: HardwareProfile | None) -> tuple[list[float], list[float]]:
    """Per stage seconds of a microbatch that it receives, in the plan and on `profile`: forward from the stage before, gradients from
    the one behind."""
    link = profile.links[mesh.link(mesh.names.index(pipeline.axis))] if profile else None
    before, after = [], []
    for number, stage in enumerate(pipeline.stages):
        arriving = pipeline.crossings[number - 1] if number else ()
        returning = [c for c in pipeline.crossings[number] if c.returns] if number < len(pipeline.crossings) else []
        crossed = (*arriving, *returning)
        after.append(sum(link.latency_s + c.bytes / link.bandwidth_bytes_per_s for c in crossed) if link else 0.0)
        times = {e.nodes[0].node.format(*i): e.time_s for e in stage.entries if e.kind in ("input", "output") for i in e.instances}
        keys = [*(input_key(c.node) for c in arriving), *(output_key(c.node) for c in returning)]
        for key in (key for key in keys if key not in times):
            what = f"{key.rpartition('/')[0]} is said to cross a cut, and stage {number} decides nothing about it"
            raise PlanError(what, remedy="plan again; the file was changed by hand or belongs to another version")
        before.append(sum(times[key] for key in keys))
    return before, after


def _size(mesh: Mesh, axis: str) -> int:
    return mesh.shape[mesh.names.index(axis)]
