"""Lines about how the seconds of a step come about.

All devices of a stage do the same. A stage *waits* while its devices have nothing to do: with times
τ of a microbatch per stage and M microbatches, stage s waits step − M · τ_s (the bubble, and the
difference to the slowest stage). If a device holds several stages, the sum of their times counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.units import microbatches, seconds, share, size
from autopar.explanation.summary import as_emitted, beside, num_kernels, spent
from autopar.plans import Pipeline, Plan, forward_load

_ROUNDING = 1e-12  # share of the step


def describe_step(plan: Plan) -> Iterator[str]:
    """Yield what the seconds of a step are made up of, a few lines."""
    if plan.pipeline is None:
        yield from _describe_one_piece(plan)
        return
    yield from _describe_schedule(plan)
    yield from _describe_overlap(plan)
    yield from spent(plan)


def summarize_step(plan: Plan) -> Iterator[str]:
    """Yield the same in one line, or two."""
    if plan.pipeline is None:
        p = plan.prediction
        saved = f", {seconds(_saved_s(plan))} saved by doing both at once" if _saves(plan) else ""
        parts = f"compute {seconds(p.compute_s)}, communication {seconds(p.communication_s)}{saved}"
        yield f"step {seconds(p.step_s)}: {parts}{as_emitted(plan)}"
        return
    yield f"step {seconds(plan.prediction.step_s)}: {_schedule(plan.pipeline)}{as_emitted(plan)}"
    yield from spent(plan)


def waiting_share(plan: Plan, stage: int) -> float:
    """Return the share of the step in which a stage's devices wait."""
    pipeline = plan.as_pipeline
    whole = max(plan.prediction.step_s, 1e-30)
    works_s = sum(each.prediction.step_s for each in pipeline.ranks[stage % pipeline.num_ranks])
    return 1 - pipeline.num_microbatches * works_s / whole


# --------------------------------------------------------------------------------------------------
# The batch in one piece.


def _describe_one_piece(plan: Plan) -> Iterator[str]:
    p = plan.prediction
    saved = f" − {seconds(_saved_s(plan))} that both save by running at once"
    yield (
        f"step {seconds(p.step_s)} = compute {seconds(p.compute_s)} + communication"
        f" {seconds(p.communication_s)} ({share(p.communication_s / max(p.serial_s, 1e-30))})"
        f"{saved if _saves(plan) else ''}"
    )
    yield from beside(plan)


def _saved_s(plan: Plan) -> float:
    return plan.prediction.serial_s - plan.prediction.step_s


def _saves(plan: Plan) -> bool:
    """Return whether compute and communication at once save more than rounding does."""
    return _saved_s(plan) > _ROUNDING * plan.prediction.serial_s


# --------------------------------------------------------------------------------------------------
# Microbatches through stages, or one after another.


def _schedule(pipeline: Pipeline) -> str:
    num = pipeline.num_microbatches
    if not pipeline.axis:
        return "one microbatch" if num == 1 else f"{num} microbatches, one after another"
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
    waits = f"devices wait {share(waiting)} of it on average"
    if pipeline.num_chunks > 1:
        busy = [num * sum(times[r :: pipeline.num_ranks]) for r in range(pipeline.num_ranks)]
        most = max(range(len(busy)), key=busy.__getitem__)
        yield (
            f"step {step}, simulated; the devices of rank {most}, which do most, work"
            f" {seconds(busy[most])} of it; {waits}"
        )
        return
    yield (
        f"step {step} = {num - 1} × {_longest(pipeline, times)} + {seconds(sum(times))} (one"
        f" microbatch through all stages){_output_time(pipeline)}; {waits}"
    )


def _longest(pipeline: Pipeline, times: list[float]) -> str:
    """Return the stage that all others wait for; under GPipe that of forward and that of
    backward."""
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
    sent = f"{seconds(pipeline.handed_s)} (outputs, {size(handed)}, handed to all stages)"
    return f" + {sent}" if handed else ""


def _describe_overlap(plan: Plan) -> Iterator[str]:
    """Yield what kernels save and what runs beside compute, of a microbatch in each stage."""
    saving = [(stage.prediction.in_kernels_s, num_kernels(stage)) for stage in plan.stages]
    if any(number for _, number in saving):
        saved = ", ".join(seconds(saved_s) for saved_s, _ in saving)
        yield (
            f"{saved} of a microbatch are saved by collective-overlap kernels, by stages:"
            f" {sum(n for _, n in saving)} in all"
        )
    if plan.prediction.hidden_s:
        hidden = ", ".join(seconds(stage.prediction.hidden_s) for stage in plan.stages)
        yield (
            f"{hidden} of a microbatch run beside compute, by stages: simulated, a step takes"
            f" {seconds(plan.prediction.simulated_s)}"
        )
