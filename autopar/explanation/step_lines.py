"""Lines about the composition of the step time.

All devices of a stage do the same work. A stage *waits* while its devices are idle: with times τ of
a microbatch per stage and M microbatches, stage s waits for step − M · τ_s (the bubble, and the
difference to the slowest stage). If a device holds several stages, their times are added.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.units import microbatches, seconds, share, size
from autopar.explanation.summary import as_emitted, beside, num_kernels, spent
from autopar.plans import Pipeline, Plan, forward_load

_ROUNDING = 1e-12  # share of the step


def describe_step(plan: Plan) -> Iterator[str]:
    """Yield the composition of the step time in a few lines."""
    if plan.pipeline is None:
        yield from _describe_one_piece(plan)
        return
    yield from _describe_schedule(plan)
    yield from _describe_overlap(plan)
    yield from spent(plan)


def summarize_step(plan: Plan) -> Iterator[str]:
    """Yield the composition of the step time in one line or two."""
    if plan.pipeline is None:
        p = plan.prediction
        saved = f", {seconds(_saved_s(plan))} saved by overlap" if _saves(plan) else ""
        parts = f"compute {seconds(p.compute_s)}, communication {seconds(p.communication_s)}{saved}"
        yield f"step {seconds(p.step_s)}: {parts}{as_emitted(plan)}"
        return
    yield f"step {seconds(plan.prediction.step_s)}: {_schedule(plan.pipeline)}{as_emitted(plan)}"
    yield from spent(plan)


def waiting_share(plan: Plan, stage: int) -> float:
    """Return the share of the step for which a stage's devices wait."""
    pipeline = plan.as_pipeline
    whole = max(plan.prediction.step_s, 1e-30)
    works_s = sum(each.prediction.step_s for each in pipeline.ranks[stage % pipeline.num_ranks])
    return 1 - pipeline.num_microbatches * works_s / whole


# --------------------------------------------------------------------------------------------------
# The whole batch at once.


def _describe_one_piece(plan: Plan) -> Iterator[str]:
    p = plan.prediction
    saved = f" − {seconds(_saved_s(plan))} saved by overlap"
    yield (
        f"step {seconds(p.step_s)} = compute {seconds(p.compute_s)} + communication"
        f" {seconds(p.communication_s)} ({share(p.communication_s / max(p.serial_s, 1e-30))})"
        f"{saved if _saves(plan) else ''}"
    )
    yield from beside(plan)


def _saved_s(plan: Plan) -> float:
    return plan.prediction.serial_s - plan.prediction.step_s


def _saves(plan: Plan) -> bool:
    """Return whether overlap of compute and communication saves more than rounding error."""
    return _saved_s(plan) > _ROUNDING * plan.prediction.serial_s


# --------------------------------------------------------------------------------------------------
# Microbatches through stages, or sequentially.


def _schedule(pipeline: Pipeline) -> str:
    num = pipeline.num_microbatches
    if not pipeline.axis:
        return "one microbatch" if num == 1 else f"{num} sequential microbatches"
    each = f", {pipeline.num_chunks} on each device" if pipeline.num_chunks > 1 else ""
    through = f"{microbatches(num)} through {len(pipeline.stages)} stages along {pipeline.axis}"
    return f"{through}{each}, schedule {pipeline.schedule}"


def _describe_schedule(plan: Plan) -> Iterator[str]:
    """Yield the schedule, and the formula of the step."""
    pipeline, step = plan.as_pipeline, seconds(plan.prediction.step_s)
    times, num = [stage.prediction.step_s for stage in pipeline.stages], pipeline.num_microbatches
    if not pipeline.axis:
        yield f"{_schedule(pipeline)}, on the whole mesh"
        yield f"step {step} = {num} × {seconds(times[0])}"
        return
    yield _schedule(pipeline)
    waiting = sum(waiting_share(plan, stage) for stage in range(len(times))) / len(times)
    waits = f"devices wait for {share(waiting)} of it on average"
    if pipeline.num_chunks > 1:
        busy = [num * sum(times[r :: pipeline.num_ranks]) for r in range(pipeline.num_ranks)]
        most = max(range(len(busy)), key=busy.__getitem__)
        yield (
            f"step {step}, simulated; the devices of rank {most}, the busiest, work for "
            f"{seconds(busy[most])} of it; {waits}"
        )
        return
    yield (
        f"step {step} = {num - 1} × {_longest(pipeline, times)} + {seconds(sum(times))} (one"
        f" microbatch through all stages){_output_time(pipeline)}; {waits}"
    )


def _longest(pipeline: Pipeline, times: list[float]) -> str:
    """Return the slowest stage, as text; under GPipe that of forward and that of the rest."""
    if pipeline.schedule != "gpipe" or pipeline.num_microbatches == 1:
        slowest = max(range(len(times)), key=times.__getitem__)
        return f"{seconds(times[slowest])} (stage {slowest}, the slowest)"
    stages = pipeline.stages
    forward = [forward_load(stage).least_s(stage.overlap.slowdown) for stage in stages]
    rest = [time_s - forward_s for time_s, forward_s in zip(times, forward, strict=True)]
    waves = (
        f"{seconds(max(s))} (stage {s.index(max(s))}, the slowest in {phase})"
        for phase, s in (("forward", forward), ("the rest", rest))
    )
    return f"({' + '.join(waves)})"


def _output_time(pipeline: Pipeline) -> str:
    """Return the time of sending outputs to every rank, as text; empty if there are none."""
    handed = pipeline.handed_bytes
    sent = f"{seconds(pipeline.handed_s)} (outputs, {size(handed)}, sent to all stages)"
    return f" + {sent}" if handed else ""


def _describe_overlap(plan: Plan) -> Iterator[str]:
    """Yield the time saved by kernels and the overlapped communication, per microbatch of each
    stage.
    """
    saving = [(stage.prediction.in_kernels_s, num_kernels(stage)) for stage in plan.stages]
    if any(number for _, number in saving):
        saved = ", ".join(seconds(saved_s) for saved_s, _ in saving)
        yield (
            f"collective-overlap kernels save {saved} per microbatch, by stage: "
            f"{sum(n for _, n in saving)} in all"
        )
    if plan.prediction.hidden_s:
        hidden = ", ".join(seconds(stage.prediction.hidden_s) for stage in plan.stages)
        yield (
            f"{hidden} of communication per microbatch overlap with compute, by stage: simulated, "
            f"a step takes {seconds(plan.prediction.simulated_s)}"
        )
