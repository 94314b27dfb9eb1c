"""Plans of a captured call on one mesh shape: without stages or with requested stages and, if
memory is the bottleneck, with losses by rows of the logits and sequential microbatches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, combinations

from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.api.alternatives import (
    CAPTURE_WORK,
    Alternative,
    AlternativeSearch,
    SearchStatus,
    Splits,
    Tries,
    WorkBudget,
    name_of,
    search_work,
)
from autopar.api.captured_call import NOT_REQUESTED, ONE_STAGE, CapturedCall, add_coverage
from autopar.api.tracing import batch_size, by_rows
from autopar.capture.chunked_loss import heads_of
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined, check, pipeline_in
from autopar.core.hardware import slowest
from autopar.core.mesh import Mesh
from autopar.core.schedules import AUTO, INTERLEAVED
from autopar.cost.op_times import TotalWork
from autopar.errors import ConstraintError, CoupledError, InfeasibleError
from autopar.planner import Planned, TooSlow
from autopar.planner.pipeline.pipeline_bound import least_batch_s
from autopar.plans import Plan
from autopar.program.schedule import num_rounds
from autopar.stages.placing import most_parts

# --------------------------------------------------------------------------------------------------
# Pipelines of a captured call: the numbers of microbatches to try along an axis, their bounds, and
# the plan for one of them with the requested or the fastest schedule.


_NEEDY = 3  # numbers of microbatches per axis whose memory is examined if nothing fits
_WORTH = 0.01  # share of the step time that a further stage per device has to save


# Microbatches per stage above which the pipeline waits for less than an eighth of its time.
MOST_ROUNDS = 8


def numbers_of(divisors: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the numbers of microbatches to try, ascending: one, and those that fill the stages
    several times.

    Args:
        divisors: the numbers that divide the batch.
        num_stages: stages of the pipeline.
    """
    filling = [n for n in divisors if num_stages <= n <= MOST_ROUNDS * num_stages] or list(
        divisors[-1:]
    )
    return tuple(dict.fromkeys((*[n for n in divisors if n == 1], *filling)))


def _dims_of_batch(trace: Trace, num_samples: int) -> list[int]:
    """Return the sizes of dims that may hold samples: multiples of the number of samples that are
    not dims of parameters, and products of the first dims of inputs.
    """
    values = (leaf for node in trace.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    sizes = {int(size) for x in values if isinstance(x, Tensor) for size in x.shape}
    sizes -= {size for p in trace.parameters for size in p.view}
    sizes |= {math.prod(i.shape[:n]) for i in trace.inputs for n in range(1, len(i.shape) + 1)}
    return sorted(size for size in sizes if size and size % num_samples == 0)


def _splits(sizes: Sequence[int], mesh: Mesh) -> Splits:
    """Return the numbers of devices over which dims of these sizes can be split.

    sizes: sizes of the dims.
        mesh: mesh of a stage.
        mesh: of a stage.
    """
    shape = mesh.shape
    groups = chain.from_iterable(combinations(shape, n) for n in range(1, len(shape) + 1))
    numbers = sorted({math.prod(group) for group in groups})
    return frozenset(
        (position, num, size % num == 0)
        for position, size in enumerate(sizes)
        for num in numbers
        if size >= num
    )


@dataclass(frozen=True, slots=True)
class Staging(CapturedCall):
    """A captured call, and its pipelines."""

    def alternatives(self, pipelined: Pipelined) -> Iterator[Alternative]:
        """Yield the pipelines to try.

        Args:
            pipelined: the requested pipeline; its axis, number of microbatches and schedule may be
                open.
        """
        total, num_parts = TotalWork.of(self.trace, self.hardware), most_parts(self.trace)
        sizes = _dims_of_batch(self.trace, batch_size(self.args, self.kwargs))
        for axis in self.axes(pipelined):
            here = replace(pipelined, axis=axis)
            for num in self.numbers(here):
                if pipelined is NOT_REQUESTED and num == 1:
                    continue  # all stages but one wait
                chunks = self._most_chunks(here, num, num_parts)
                ranks = self.num_ranks(here)
                yield Alternative(
                    self.mesh,
                    axis,
                    num,
                    (num + (ranks - 1) / chunks) / (ranks * num),
                    self._bound_s(here, num, chunks, total),
                    _splits([size // num for size in sizes], self._stage_mesh(axis)),
                    partial(self._least_batch_s, axis) if ranks <= num_parts else lambda: 0.0,
                    partial(self._plan_schedules, here, num),
                )

    def _bound_s(self, pipelined: Pipelined, num: int, chunks: int, total: TotalWork) -> float:
        """Return a lower bound of the step of a pipeline with equal stages, from its compute."""
        ranks = self.num_ranks(pipelined)
        return total.least_staged_s(
            self.hardware, self.mesh.num_devices // ranks, ranks, num, chunks
        )

    def _least_batch_s(self, axis: str) -> float:
        """Return a lower bound of the seconds of the batch through all stages in sequence."""
        trace, mesh = by_rows(self.trace, self.rows), self._stage_mesh(axis)
        return least_batch_s(trace, mesh, self.hardware, self.options.of_a_trace())

    def _stage_mesh(self, axis: str) -> Mesh:
        """Return the mesh of a stage."""
        return self.mesh.without(axis)

    def _most_chunks(self, pipelined: Pipelined, num: int, num_parts: int) -> int:
        """Return the maximum number of stages per device that `_plan_schedules` may try.

        Args:
            pipelined: the pipeline, with its axis.
            num: number of microbatches.
            num_parts: maximum number of parts that the model can be cut into.
        """
        if pipelined.schedule != AUTO:
            return pipelined.chunks
        ranks, chunks = self.num_ranks(pipelined), 1
        if ranks > 1 and num_rounds(ranks, num):
            while 2 * chunks * ranks <= num_parts:
                chunks *= 2
        return chunks

    def _plan_schedules(self, pipelined: Pipelined, num: int, limit_s: float) -> Planned:
        """Plan the requested schedule or, if none is requested, the fastest: 1F1B, then increasing
        numbers of stages per device.

        With 1F1B, a step takes the time of M microbatches on each of P devices, and each device
        waits for the time of P − 1 microbatches. With v stages per device it waits 1/v of that.
        Interleaving is therefore tried if 1F1B, or its bound, would be fast enough with that much
        less waiting.
        """
        if pipelined.schedule != AUTO:
            return self.in_stages(pipelined, num, limit_s)
        ranks = self.num_ranks(pipelined)
        best: Planned | None = None
        refusal: TooSlow | None = None
        try:
            best = self.in_stages(replace(pipelined, schedule="1f1b"), num, limit_s)
            plain_s = best.plan.prediction.step_s
        except TooSlow as error:
            refusal, plain_s = error, error.args[0]
        chunks = 2
        while ranks > 1 and num_rounds(ranks, num):
            fast_enough = (
                limit_s
                if best is None
                else min(limit_s, best.plan.prediction.step_s * (1.0 - _WORTH))
            )
            if plain_s * (num + (ranks - 1) / chunks) / (num + ranks - 1) >= fast_enough:
                break
            try:
                result = self.in_stages(
                    replace(pipelined, schedule=INTERLEAVED, chunks=chunks), num, fast_enough
                )
            except (TooSlow, InfeasibleError, ConstraintError) as error:
                log.info(
                    "no plan with %d stages per device along %r: %s", chunks, pipelined.axis, error
                )
                break
            if result.plan.prediction.step_s >= fast_enough:
                break
            best, chunks = result, chunks * 2
        if best is None:
            assert refusal is not None, "1F1B has a plan, or is too slow"
            raise refusal
        return best

    def candidates(self, pipelined: Pipelined) -> Iterator[tuple[str, int]]:
        """Yield the (axis, number of microbatches) that need least memory; 0 microbatches stand for
        no pipeline. These are the largest numbers, which have the smallest microbatches.
        """
        if pipelined.axis is None and self.number(pipelined) is None:
            yield "", 0
        for axis in self.axes(pipelined):
            for num in self.numbers(replace(pipelined, axis=axis))[-_NEEDY:]:
                yield axis, num

    def numbers(self, pipelined: Pipelined) -> tuple[int, ...]:
        """Return the numbers of microbatches to try along an axis, ascending."""
        if (requested := self.number(pipelined)) is not None:
            return (requested,)
        return self._free_numbers(pipelined, batch_size(self.args, self.kwargs))

    def _free_numbers(self, pipelined: Pipelined, samples: int) -> tuple[int, ...]:
        """Return the numbers of microbatches to try if none is requested, ascending."""
        if not pipelined.axis:
            return (1,)
        stages = self.num_ranks(pipelined)
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        if pipelined.chunks > 1:
            divisors = [n for n in divisors if num_rounds(stages, n)]
        return numbers_of(divisors or [samples], stages)

    def axes(self, pipelined: Pipelined) -> tuple[str, ...]:
        """Return the axes along which stages may lie: the requested one, else all with several
        devices."""
        return (
            tuple(axis.name for axis in self.mesh.axes if axis.size > 1)
            if pipelined.axis is None
            else (pipelined.axis,)
        )

    def number(self, pipelined: Pipelined) -> int | None:
        """Return the requested number of microbatches; None if none is requested."""
        return pipelined.microbatches or (
            self.options.num_microbatches
            if isinstance(self.options.num_microbatches, int)
            else None
        )


# --------------------------------------------------------------------------------------------------


log = logging.getLogger("autopar")
_PARTS = (4, 16)  # number of parts that a device's rows of logits are cut into
_LEAST_ROWS = 64  # with fewer rows, a matrix product does not use the whole device
# Share of recomputation in the step time above which microbatches without stages may be faster.
_AGAIN = 0.05
# Share of the step time beyond the minimum compute time, below which stages save nothing.
_IDLE = 0.1
_NO_STAGES = (
    "no stages, because a call with stages returns only the loss, and other outputs were "
    'requested; outputs="loss" makes the planner try stages'
)


@dataclass(frozen=True, slots=True)
class Chooser(Staging):
    """Plans of a captured call on one mesh shape, without stages or with requested stages.

    Attributes:
        budget: work for alternatives to the first plan, shared by all mesh shapes.
        status: receives progress reports of searches; `progress` receives the phases.
    """

    budget: WorkBudget = field(default_factory=WorkBudget)
    status: SearchStatus = field(default_factory=SearchStatus)

    @property
    def free_stages(self) -> Pipelined | None:
        """Pipeline whose axis and number of microbatches the planner chooses; None if stages are
        not tried, or are requested in more detail.
        """
        requested = pipeline_in(self.options.constraints, self.mesh)
        if requested is not None:
            return requested if requested.axis is None and self.number(requested) is None else None
        return NOT_REQUESTED if self._may_have_stages and self._returns_the_same else None

    def plan(self, limit_s: float = math.inf) -> Planned:
        """Find the fastest plan without stages or, if requested, with these stages.

        Args:
            limit_s: step time in seconds; a plan that is not faster, up to the gap, is not
                returned.

        Raises:
            CaptureError: if a loss by rows is requested and impossible.
            ConstraintError, InfeasibleError: of the last plan tried, if there is no plan.
            TooSlow: if bounds show that no plan beats the limit.
        """
        limit_s = self.options.worth_s(limit_s)
        if self.options.loss_rows != "auto":
            return replace(self, rows=self.options.loss_rows)._find_fastest(limit_s)
        heads, refusals = heads_of(self.trace)
        best: Planned | None = None
        refusal: InfeasibleError | None = None
        try:
            best = self._find_fastest(limit_s)
        except InfeasibleError as error:
            refusal = _with_hint(error, refusals)
        if best is None or (heads and is_bound_by_memory(best.plan)):
            best = self._by_fewer_rows(best, limit_s)
        if best is None:
            assert refusal is not None, "a search without a plan is refused"
            raise refusal
        return best

    def _by_fewer_rows(self, best: Planned | None, limit_s: float) -> Planned | None:
        """Try losses that process fewer and fewer rows of logits at a time, as long as memory is
        the bottleneck. Return the best plan.
        """
        for rows in self.row_choices(best):
            if best is not None and self.budget.is_over:
                break
            self.status.begin(f"a loss by {rows} rows", 0)
            try:
                result = replace(self, rows=rows)._find_fastest(self.limit_to_beat(best, limit_s))
            except KeyboardInterrupt:
                if best is None:
                    raise
                self.budget.interrupt()
                break
            except TooSlow as error:
                log.info("no better plan with a loss by %d or fewer rows: %s", rows, error)
                break
            except (InfeasibleError, ConstraintError) as error:
                log.info("no better plan with a loss by %d rows: %s", rows, error)
                continue
            if best is None or result.plan.prediction.step_s < best.plan.prediction.step_s:
                best = result
            if not is_bound_by_memory(result.plan):
                break
        return best

    def row_choices(self, found: Planned | None) -> tuple[int, ...]:
        """Return the numbers of a device's logits rows that the loss may process at a time, other
        than all; empty if the number is requested, or the loss cannot be computed by rows.

        Args:
            found: a plan; its stages and microbatches determine the rows per device.
        """
        if self.options.loss_rows != "auto":
            return ()
        num_rows = max((head.num_rows for head in heads_of(self.trace)[0]), default=0)
        num_devices = self.mesh.num_devices
        if found is not None:
            num_devices //= found.plan.as_pipeline.num_ranks
            num_rows //= found.plan.num_microbatches
        local = num_rows // num_devices
        rows = [
            max(-(-local // (part * _LEAST_ROWS)) * _LEAST_ROWS, _LEAST_ROWS) for part in _PARTS
        ]
        return tuple(dict.fromkeys(n for n in rows if n < local))

    def _find_fastest(self, limit_s: float) -> Planned:
        """Find the fastest of the requested plans with the rows of the loss, with stages only if
        these are requested."""
        requested = pipeline_in(self.options.constraints, self.mesh)
        if self.free_stages is not None or (
            requested is None and self.options.num_microbatches in (1, "auto")
        ):
            return self._try_microbatches(self.in_one_piece(limit_s), limit_s)
        pipelined = requested or ONE_STAGE
        if pipelined.axis:
            check(pipelined, self.mesh)
        tries = Tries()
        search = AlternativeSearch(
            self.budget.unlimited(),
            lambda best_s: min(limit_s, self.options.worth_s(best_s)),
            status=self.status,
        )
        alternatives = list(self.alternatives(pipelined))
        if not alternatives:
            raise ConstraintError(
                f"{pipelined}: mesh {self.mesh} has no axis with several devices for the stages",
                remedy="remove the pipeline constraint; num_microbatches= splits the batch without "
                "stages",
            )
        refusal = search.run(alternatives, tries)
        if tries.best is None:
            assert refusal is not None, "there is something to try"
            raise refusal
        return note_tries(tries.best, tries.summaries, search.coupled)

    @property
    def _may_have_stages(self) -> bool:
        """Whether to try stages that were not requested: in training on GPUs, if the model returns
        its loss and nothing is forced. On CPUs, processes share cores, and a waiting stage frees
        its core for others, which the cost model does not represent.
        """
        options, trace = self.options, self.trace
        free = (
            not options.constraints
            and options.num_microbatches == "auto"
            and options.batch == "global"
        )
        return (
            free
            and not options.inference
            and trace.loss is not None
            and not trace.given_back
            and slowest(self.hardware).is_gpu
        )

    @property
    def _returns_the_same(self) -> bool:
        """Whether a call returns the same with stages and microbatches: the loss, or outputs that
        can be concatenated.
        """
        return self.options.outputs in ("loss", "full") or len(self.trace.outputs) == 1

    def _try_microbatches(self, whole: Planned, limit_s: float) -> Planned:
        """Return the plan of the whole batch, or one of several microbatches one after another if
        it is faster and the call returns the same: the loss, or outputs that can be joined.

        Args:
            whole: the plan of the whole batch.
            limit_s: seconds of a step that a plan has to beat.
        """
        tries = Tries()
        tries.add(name_of("", 0), whole)
        if self.options.num_microbatches == "auto" and self._may_be_cut(tries):
            self._one_after_another(limit_s, tries)
        assert tries.best is not None, "a search without a plan is refused"
        result = note_tries(tries.best, tries.summaries)
        if self._returns_the_same or not (self._may_have_stages and leaves_room(result)):
            return result
        log.info(_NO_STAGES)
        return add_coverage(result, _NO_STAGES)

    def _may_be_cut(self, tries: Tries) -> bool:
        """Whether microbatches that were not requested may be tried."""
        requested = pipeline_in(self.options.constraints, self.mesh)
        return (
            tries.best is not None
            and (requested is not None or self._returns_the_same)
            and _run_again(tries.best.plan) >= _AGAIN
        )

    def _one_after_another(self, limit_s: float, tries: Tries) -> None:
        """Try microbatches without stages as long as many ops are recomputed for lack of memory,
        and more microbatches shorten the step.
        """
        for num in self.parts():
            best, name = tries.best, name_of("", num)
            if best is not None and _run_again(best.plan) < _AGAIN:
                return
            if not self.budget.take(CAPTURE_WORK + search_work(len(self.mesh.axes))):
                tries.summaries.append(f"{name} (not tried)")
                return
            self.status.begin(name, 0)
            try:
                limit = self.limit_to_beat(best, limit_s)
                tries.add(name, self.in_stages(replace(ONE_STAGE, microbatches=num), num, limit))
            except KeyboardInterrupt:
                self.budget.interrupt()
                tries.summaries.append(f"{name} (interrupted)")
                return
            except TooSlow as error:
                tries.add_bound(name, error.args[0])
            except InfeasibleError as error:
                log.info("no plan with %d sequential microbatches: %s", num, error.what)
                tries.add_refused(name)
            except ConstraintError as error:
                log.info("the batch is not split into microbatches: %s", error.what)
                return
            if best is not None and tries.best is best:
                return

    def in_parts(self, refusal: InfeasibleError, limit_s: float) -> Planned:
        """Find the smallest number of sequential microbatches that fits, if the batch may be split.

        Args:
            refusal: error of the plans that were tried before.
            limit_s: step time that the plan has to beat, in seconds.

        Raises:
            InfeasibleError: the given error, if no number of microbatches fits.
        """
        free = (
            self.options.num_microbatches == "auto"
            and pipeline_in(self.options.constraints, self.mesh) is None
        )
        rows = self.options.loss_rows if self.options.loss_rows != "auto" else 0
        here = replace(self, rows=[rows, *self.row_choices(None)][-1])
        find = cache(lambda num: here._in_microbatches(num, limit_s))
        numbers = self.parts() if free else ()
        try:
            result = find(numbers[0]) if numbers else None
            if result is None and any(map(find, self._fitting_best(numbers[1:]))):
                result = next(filter(None, map(find, numbers[1:])), None)
        except ConstraintError as error:
            log.info("the batch is not split into microbatches: %s", error.what)
            raise refusal from None
        if result is None:
            raise refusal
        log.warning(
            "planned %d sequential microbatches, because all at once %s",
            result.plan.num_microbatches,
            refusal.what,
        )
        return result

    def _fitting_best(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of microbatches that need least memory: one sample per microbatch, or
        one sample per device, because fewer samples than devices cannot be sharded."""
        samples_of = {num: self.parts()[-1] // num for num in numbers}
        sharded = [n for n in numbers if samples_of[n] >= self.mesh.num_devices]
        return tuple(dict.fromkeys((*sharded[-1:], *numbers[-1:])))

    def _in_microbatches(self, num: int, limit_s: float) -> Planned | None:
        """Plan a number of sequential microbatches; None if they do not fit."""
        try:
            return self.in_stages(replace(ONE_STAGE, microbatches=num), num, limit_s)
        except InfeasibleError as error:
            log.info("no plan with %d microbatches: %s", num, error.what)
            return None

    def limit_to_beat(self, best: Planned | None, limit_s: float) -> float:
        """Return the step time in seconds below which a further plan replaces the best one."""
        return (
            limit_s
            if best is None
            else min(limit_s, self.options.worth_s(best.plan.prediction.step_s))
        )


def note_tries(
    found: Planned, summaries: Sequence[str], coupled: CoupledError | None = None
) -> Planned:
    """Record in a plan the alternatives that it was chosen from.

    Args:
        found: the plan.
        summaries: the alternatives, with the step time of each.
        coupled: the reason why samples depend on each other, if they do; the stages then process
            one microbatch.
    """
    if len(summaries) > 1:
        line = (
            "only this number of microbatches and these stages; alternatives, with the step time of"
            f" each: {'; '.join(summaries)}"
        )
        found = add_coverage(found, line)
    if coupled is None or found.plan.pipeline is None:
        return found
    log.warning(
        "using one microbatch, which the stages process one after another: %s", coupled.what
    )
    return add_coverage(
        found, f"only one microbatch, because samples depend on each other: {coupled.what}"
    )


def is_bound_by_memory(plan: Plan) -> bool:
    """Return whether more memory would make a plan faster, according to its dual values and its
    recomputation.
    """
    return any(
        stage.proof.memory_price_s_per_gib > 0 or any(e.recompute for e in stage.entries)
        for stage in plan.stages
    )


def _run_again(plan: Plan) -> float:
    """Return the share of recomputed ops in the step time."""
    entries = (entry for stage in plan.stages for entry in stage.entries)
    again_s = sum(entry.again_s * len(entry.instances) for entry in entries)
    return plan.num_microbatches * again_s / plan.prediction.step_s


def leaves_room(found: Planned) -> bool:
    """Return whether stages could shorten the step of a plan despite their waiting time."""
    step_s = found.plan.prediction.step_s
    return step_s - found.computing_s >= _IDLE * step_s


def _with_hint(error: InfeasibleError, refusals: Sequence[str]) -> InfeasibleError:
    """Return the error with advice on how to make the loss computable by rows."""
    hints = [refusal for refusal in refusals if "outputs=" in refusal]
    return (
        InfeasibleError(
            error.what, remedy="; ".join([error.remedy, *hints]), needed_bytes=error.needed_bytes
        )
        if hints
        else error
    )
