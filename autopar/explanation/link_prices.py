"""The value of faster links for a plan: its communication, priced again on a slightly faster link.

The difference is exact for the plan's decisions, including the communication that compute hides.
With interleaved stages, devices are assumed to wait for the same share of the step as in the plan.
Under GPipe, the slowest stage in forward is assumed to be the slowest in backward. A plan made for
the faster link is at least as fast on it as this plan, so planning again saves at least as much.
`autopar.core.collective.faster` defines a faster link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from autopar.core.collective import with_faster
from autopar.core.hardware import Hardware, HardwareProfile, Mixed, profile_of
from autopar.core.mesh import Mesh
from autopar.core.units import seconds
from autopar.cost.priced import Wire, output_broadcast_s, wire
from autopar.emit.context import input_key, output_key
from autopar.errors import PlanError
from autopar.explanation.summary import table
from autopar.plans import Pipeline, Plan, counted_time, load_of, moved_load

_SHARE = 1e-3  # factor of a faster link
_GB = 1e9


@dataclass(frozen=True, slots=True)
class LinkWorth:
    """The link of a mesh axis, the communication time of the plan over it, and the saving per
    additional GB/s per device.

    Attributes:
        devices: type of the devices that the links belong to, if stages have several types;
            otherwise empty.
        communication_s: communication time of a step on the critical path of the stages: the time
            saved if this communication were free.
    """

    axis: str
    link: str
    bandwidth_bytes_per_s: float
    communication_s: float
    saved_s_per_gb_per_s: float
    devices: str = ""

    @property
    def name(self) -> str:
        """The name of the axis, followed by the type of devices if there are several."""
        return f"{self.axis} on {self.devices}" if self.devices else self.axis


@dataclass(frozen=True, slots=True)
class LinkValue:
    """The value of the links of a plan's axes, or the reason why it is unknown."""

    links: tuple[LinkWorth, ...] = ()
    missing: str = ""

    def renderables(self) -> Iterator[RenderableType]:
        """Yield a table, or the reason why there is none."""
        if self.missing:
            yield Text(self.missing)
            return
        rows = [
            (
                w.name,
                w.link,
                f"{w.bandwidth_bytes_per_s / _GB:.4g} GB/s",
                seconds(w.communication_s),
                seconds(w.saved_s_per_gb_per_s),
            )
            for w in self.links
        ]
        if rows:
            title = (
                "Step time that faster links save with this plan; a plan made for them saves at "
                "least as much"
            )
            yield from table(
                title,
                ("axis", "link", ">now", ">communicates", ">saved per additional GB/s"),
                rows,
            )


def value_of_bandwidth(plan: Plan, hardware: Hardware | None = None) -> LinkValue:
    """Return the time that an additional GB/s on the link of each axis saves; if stages run on
    several types of devices, for each type.

    Args:
        plan: its decisions stay as they are.
        hardware: the hardware that the plan was made for; by default the shipped profiles of its
            names.
    """
    mark = plan.fingerprint
    named = [name for name, _ in mark.profiles] or [mark.profile]
    unknown = [name for name in named if name not in HardwareProfile.names()]
    if hardware is None and unknown:
        return LinkValue(missing=f"value of faster links unknown: profile {unknown[0]} not found")
    if hardware is None:
        profiles = tuple(map(HardwareProfile.load, named))
        hardware = Mixed(mark.axis, profiles) if mark.axis else profiles[0]
    if hardware.hash != mark.profile_hash:
        return LinkValue(
            missing=(
                f"value of faster links unknown: profile {mark.profile} is not the one that the "
                "plan was made for"
            )
        )
    of_stages = (profile_of(hardware, plan.stage_axis, n) for n in range(len(plan.stages)))
    kinds = tuple(dict.fromkeys(of_stages))
    axes = [axis for axis in plan.mesh.names if _size(plan.mesh, axis) > 1]
    return LinkValue(
        tuple(
            _of_axis(plan, axis, hardware, kind, several=len(kinds) > 1)
            for axis in axes
            for kind in kinds
        )
    )


def _of_axis(
    plan: Plan, axis: str, hardware: Hardware, kind: HardwareProfile, *, several: bool
) -> LinkWorth:
    name = plan.mesh.link(plan.mesh.names.index(axis))
    link = kind.links[name]
    quicker = _with_faster(hardware, kind, name) if several else with_faster(kind, name, _SHARE)
    now_s = _step_s(plan, axis, hardware)
    saved_s, moved_s = (
        now_s - _step_s(plan, axis, quicker),
        now_s - _step_s(plan, axis, hardware, free=kind),
    )
    per_gb = saved_s / (_SHARE * link.bandwidth_bytes_per_s / _GB)
    return LinkWorth(
        axis, name, link.bandwidth_bytes_per_s, moved_s, per_gb, kind.name if several else ""
    )


def _with_faster(hardware: Hardware, kind: HardwareProfile, link: str) -> Hardware:
    """Return the hardware with a slightly faster link on one type of device."""
    assert isinstance(hardware, Mixed), "there are several kinds"
    return Mixed(
        hardware.axis,
        tuple(with_faster(p, link, _SHARE) if p == kind else p for p in hardware.profiles),
    )


def step_with(plan: Plan, times: Sequence[float]) -> float:
    """Return the seconds of the step for other times of a microbatch per stage.

    The module docstring describes interleaved stages.
    """
    pipeline = plan.as_pipeline
    if pipeline.num_chunks > 1:
        then, planned = (
            _busiest(pipeline, each)
            for each in (times, [s.prediction.step_s for s in pipeline.stages])
        )
        return plan.prediction.step_s * then / planned
    return (pipeline.num_microbatches - 1) * max(times) + sum(times)


def longer_step_s(plan: Plan, stage: int, delta_s: float) -> float:
    """Return the seconds by which the step is longer if a microbatch takes longer in one stage.

    Args:
        plan: the plan with all stages.
        stage: index among all stages.
        delta_s: additional seconds of a microbatch in the stage.
    """
    now = [s.prediction.step_s for s in plan.stages]
    then = [time_s + delta_s * (number == stage) for number, time_s in enumerate(now)]
    return step_with(plan, then) - step_with(plan, now)


def _busiest(pipeline: Pipeline, times: Sequence[float]) -> float:
    """Return the seconds of a microbatch in all stages of the busiest rank."""
    num_ranks = pipeline.num_ranks
    return max(sum(times[rank::num_ranks]) for rank in range(num_ranks))


def _step_s(
    plan: Plan, axis: str, hardware: Hardware, free: HardwareProfile | None = None
) -> float:
    """Return the seconds of the step without the parts that do not depend on links along `axis`.
    Arguments are as in `_times`.
    """
    return step_with(plan, _times(plan, axis, hardware, free)) + _handed_s(
        plan, axis, hardware, free
    )


def _handed_s(plan: Plan, axis: str, hardware: Hardware, free: HardwareProfile | None) -> float:
    """Return the seconds of sending outputs to all stages, if these lie along `axis`."""
    if plan.stage_axis != axis:
        return 0.0
    if free is not None:
        others = [profile for profile in getattr(hardware, "profiles", ()) if profile != free]
        if not others:
            return 0.0
        assert isinstance(hardware, Mixed), "there are several kinds"
        hardware = Mixed(
            hardware.axis,
            tuple(others[0] if profile == free else profile for profile in hardware.profiles),
        )
    return output_broadcast_s(axis, plan.mesh, hardware, plan.as_pipeline.handed_bytes)


def _times(
    plan: Plan, axis: str, hardware: Hardware, free: HardwareProfile | None = None
) -> list[float]:
    """Return the times of a microbatch per stage, with transfers along `axis` priced on their
    devices; those on the type `free` are free.
    """
    pipeline = plan.as_pipeline
    stages, num = pipeline.stages, pipeline.num_microbatches
    if axis == pipeline.axis:
        received = zip(stages, *_seconds_received(pipeline, plan.mesh, hardware, free), strict=True)
        return [s.prediction.step_s - planned_s + priced_s for s, planned_s, priced_s in received]
    profiles = [profile_of(hardware, pipeline.axis, number) for number in range(len(stages))]
    shorter = [
        _shorter_s(stage, axis, None if p == free else p, num)
        for stage, p in zip(stages, profiles, strict=True)
    ]
    return [
        stage.prediction.step_s - shorter_s
        for stage, shorter_s in zip(stages, shorter, strict=True)
    ]


def _shorter_s(
    plan: Plan, axis: str, profile: HardwareProfile | None, num_microbatches: int
) -> float:
    """Return the time that a microbatch saves if transfers along `axis` are priced on `profile`.
    Work that is done once per step is divided by the number of microbatches.
    """
    number, slowdown = plan.mesh.names.index(axis), plan.overlap.slowdown
    size, link = plan.mesh.shape[number], plan.mesh.link(number)
    load = changed = load_of(plan)
    for c in plan.communications:
        if c.collective.axis == number and c.collective.kind != "slice":
            once_s = counted_time(c, size, link, profile) if profile else 0.0
            once_s /= num_microbatches if c.phase == "step" else 1
            # The time that kernels save is removed together with the collective. This is exact if
            # products hide nearly all of it; routes save passes over memory.
            saved_s = (
                c.kernel.saved_s * (once_s / c.time_s - 1.0) if c.kernel and not c.own else 0.0
            )
            changed += moved_load(
                c, len(c.instances) * (once_s - c.time_s), len(c.instances) * saved_s
            )
    return load.least_s(slowdown) - changed.least_s(slowdown)


def _seconds_received(
    pipeline: Pipeline, mesh: Mesh, hardware: Hardware, free: HardwareProfile | None = None
) -> tuple[list[float], list[float]]:
    """Return the seconds per stage for which a microbatch receives, in the plan and on its devices:
    activations from the previous stage, gradients from the next one. Transfers from and to the type
    of devices `free` are free.
    """
    wires = []
    for first in range(len(pipeline.stages) - 1):
        ends = [profile_of(hardware, pipeline.axis, end) for end in (first, first + 1)]
        wires.append(
            Wire() if free in ends else wire(pipeline.axis, mesh, hardware, first, first + 1)
        )
    before, after = [], []
    for number, stage in enumerate(pipeline.stages):
        arriving = pipeline.crossings[number - 1] if number else ()
        returning = (
            [c for c in pipeline.crossings[number] if c.returns]
            if number < len(pipeline.crossings)
            else []
        )
        after.append(
            sum(wires[number - 1].time_s(c.bytes) for c in arriving)
            + sum(wires[number].time_s(c.bytes) for c in returning)
        )
        times = {
            e.nodes[0].node.format(*i): e.time_s
            for e in stage.entries
            if e.kind in ("input", "output")
            for i in e.instances
        }
        keys = [*(input_key(c.node) for c in arriving), *(output_key(c.node) for c in returning)]
        for key in (key for key in keys if key not in times):
            message = (
                f"{key.rpartition('/')[0]} crosses a cut, but stage {number} has no decision "
                "about it"
            )
            raise PlanError(
                message,
                remedy="plan again; the file was edited by hand or written by another version",
            )
        before.append(sum(times[key] for key in keys))
    return before, after


def _size(mesh: Mesh, axis: str) -> int:
    return mesh.shape[mesh.names.index(axis)]
