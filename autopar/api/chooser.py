"""A captured call on one mesh shape, and its plans: without stages, or with requested ones; with
losses that process the logits in parts, and microbatches one after another, if memory binds."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from autopar.api.captured_call import ONE_STAGE, WITHOUT_ASKING, CapturedCall, add_coverage
from autopar.api.tracing import batch_size, by_rows
from autopar.capture.chunked_loss import heads_of
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined, check, pipeline_in
from autopar.core.garbage import collected_seldom
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
# Pipelines of a captured call: the numbers of microbatches that may be tried along an axis, their
# bounds, and the plan for one of them with the requested schedule, or the fastest.


_NEEDY = 3  # numbers of microbatches per axis of which the memory is looked at if nothing fits
_WORTH = 0.01  # share of a step: a further stage per device is to save as much


# Microbatches per stage: beyond, the pipeline waits for less than an eighth of its time.
MOST_ROUNDS = 8


def numbers_of(divisors: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the numbers of microbatches that may be tried, rising: one, and those that fill the
    stages several times.

    Args:
        divisors: the numbers that divide the batch.
        num_stages: stages of the pipeline.
    """
    filling = [n for n in divisors if num_stages <= n <= MOST_ROUNDS * num_stages] or list(
        divisors[-1:]
    )
    return tuple(dict.fromkeys((*[n for n in divisors if n == 1], *filling)))


def _dims_of_batch(trace: Trace, num_samples: int) -> list[int]:
    """Return the sizes of dims that may hold samples: multiples of their number that are no dims of
    parameters, and products of the first dims of inputs."""
    values = (leaf for node in trace.graph.nodes for leaf in tree_leaves(node.meta.get("val")))
    sizes = {int(size) for x in values if isinstance(x, Tensor) for size in x.shape}
    sizes -= {size for p in trace.parameters for size in p.view}
    sizes |= {math.prod(i.shape[:n]) for i in trace.inputs for n in range(1, len(i.shape) + 1)}
    return sorted(size for size in sizes if size and size % num_samples == 0)


def _splits(sizes: Sequence[int], mesh: Mesh) -> Splits:
    """Return over which numbers of devices dims of these sizes can be split.

    Args:
        sizes: of the dims.
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

    def alternatives(self, wish: Pipelined) -> Iterator[Alternative]:
        """Yield the pipelines that may be tried.

        Args:
            wish: the requested pipeline; it may leave its axis, the number of microbatches and the
                schedule open.
        """
        total, num_parts = TotalWork.of(self.trace, self.hardware), most_parts(self.trace)
        sizes = _dims_of_batch(self.trace, batch_size(self.args, self.kwargs))
        for axis in self.axes(wish):
            here = replace(wish, axis=axis)
            for num in self.numbers(here):
                if wish is WITHOUT_ASKING and num == 1:
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

    def _bound_s(self, wish: Pipelined, num: int, chunks: int, total: TotalWork) -> float:
        """Bound the step of a pipeline whose stages take equally long, by its compute."""
        ranks = self.num_ranks(wish)
        return total.least_staged_s(
            self.hardware, self.mesh.num_devices // ranks, ranks, num, chunks
        )

    def _least_batch_s(self, axis: str) -> float:
        """Bound the seconds that the batch takes through all stages, one after another."""
        trace, mesh = by_rows(self.trace, self.rows), self._stage_mesh(axis)
        return least_batch_s(trace, mesh, self.hardware, self.options.of_a_trace())

    def _stage_mesh(self, axis: str) -> Mesh:
        """Return the mesh of a stage."""
        return self.mesh.without(axis)

    def _most_chunks(self, wish: Pipelined, num: int, num_parts: int) -> int:
        """Return the most stages per device that `_plan_schedules` may try.

        Args:
            wish: the pipeline, with its axis.
            num: number of microbatches.
            num_parts: parts that the model can be cut into at most.
        """
        if wish.schedule != AUTO:
            return wish.chunks
        ranks, chunks = self.num_ranks(wish), 1
        if ranks > 1 and num_rounds(ranks, num):
            while 2 * chunks * ranks <= num_parts:
                chunks *= 2
        return chunks

    def _plan_schedules(self, wish: Pipelined, num: int, limit_s: float) -> Planned:
        """Plan the requested schedule or, if none is requested, the fastest: 1F1B, then more and
        more stages per device.

        A step of 1F1B takes M microbatches on each of P devices, and P − 1 for which these wait.
        With v stages per device they wait for 1/v of that. So interleaving is tried if 1F1B, or its
        bound, would be fast enough with so much less waiting.
        """
        if wish.schedule != AUTO:
            return self.in_stages(wish, num, limit_s)
        ranks = self.num_ranks(wish)
        best: Planned | None = None
        refusal: TooSlow | None = None
        try:
            best = self.in_stages(replace(wish, schedule="1f1b"), num, limit_s)
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
                found = self.in_stages(
                    replace(wish, schedule=INTERLEAVED, chunks=chunks), num, fast_enough
                )
            except (TooSlow, InfeasibleError, ConstraintError) as error:
                log.info("no plan of %d stages a device along %r: %s", chunks, wish.axis, error)
                break
            if found.plan.prediction.step_s >= fast_enough:
                break
            best, chunks = found, chunks * 2
        if best is None:
            assert refusal is not None, "1F1B was found, or is too slow"
            raise refusal
        return best

    def candidates(self, wish: Pipelined) -> Iterator[tuple[str, int]]:
        """Yield (axis, number of microbatches) of what needs least memory; 0 microbatches stand for
        no pipeline. More microbatches are smaller ones, so these are the largest numbers."""
        if wish.axis is None and self.number(wish) is None:
            yield "", 0
        for axis in self.axes(wish):
            for num in self.numbers(replace(wish, axis=axis))[-_NEEDY:]:
                yield axis, num

    def numbers(self, wish: Pipelined) -> tuple[int, ...]:
        """Return the numbers of microbatches that may be tried along an axis, rising."""
        if (asked := self.number(wish)) is not None:
            return (asked,)
        return self._free_numbers(wish, batch_size(self.args, self.kwargs))

    def _free_numbers(self, wish: Pipelined, samples: int) -> tuple[int, ...]:
        """Return the numbers of microbatches that may be tried along an axis if none is requested,
        rising."""
        if not wish.axis:
            return (1,)
        stages = self.num_ranks(wish)
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        if wish.chunks > 1:
            divisors = [n for n in divisors if num_rounds(stages, n)]
        return numbers_of(divisors or [samples], stages)

    def axes(self, wish: Pipelined) -> tuple[str, ...]:
        """Return the axes along which stages may lie: the requested one, else all with several
        devices."""
        return (
            tuple(axis.name for axis in self.mesh.axes if axis.size > 1)
            if wish.axis is None
            else (wish.axis,)
        )

    def number(self, wish: Pipelined) -> int | None:
        """Return the requested number of microbatches; None if none is requested."""
        return wish.microbatches or (
            self.options.num_microbatches
            if isinstance(self.options.num_microbatches, int)
            else None
        )


# --------------------------------------------------------------------------------------------------


log = logging.getLogger("autopar")
_PARTS = (4, 16)  # into which a device's rows of logits are cut
_LEAST_ROWS = 64  # below, a product no longer fills a device
# Share of a step that is spent on recomputation: from there on, microbatches without stages may be
# faster.
_AGAIN = 0.05
# Share of a step beyond its least compute, below which stages save nothing.
_IDLE = 0.1
_NO_STAGES = (
    "no stages: of these a call returns the loss alone, and other outputs are asked for; with"
    ' outputs="loss" they are tried'
)


@dataclass(frozen=True, slots=True)
class Chooser(Staging):
    """A captured call on one mesh shape, and its plans without stages, or with requested ones.

    Attributes:
        budget: the work that alternatives to the first plan may take, on all mesh shapes together.
        status: is told what is searched; `progress` is told the phases.
    """

    budget: WorkBudget = field(default_factory=WorkBudget)
    status: SearchStatus = field(default_factory=SearchStatus)

    @property
    def free_stages(self) -> Pipelined | None:
        """The pipeline whose axis and number of microbatches are the planner's choice; None if
        stages are not tried, or are requested more precisely."""
        asked = pipeline_in(self.options.constraints, self.mesh)
        if asked is not None:
            return asked if asked.axis is None and self.number(asked) is None else None
        return WITHOUT_ASKING if self._may_have_stages and self._returns_the_same else None

    @collected_seldom()
    def plan(self, limit_s: float = math.inf) -> Planned:
        """Find the fastest plan without stages or, if they are requested, with these stages.

        Args:
            limit_s: seconds of a step; a plan that is no faster, by the gap, is not wanted.

        Raises:
            CaptureError: if a loss by rows is requested and impossible.
            ConstraintError, InfeasibleError: of the last plan tried, if there is none.
            TooSlow: if bounds show that no plan beats the limit.
        """
        limit_s = self.options.worth_s(limit_s)
        if self.options.loss_rows != "auto":
            return replace(self, rows=self.options.loss_rows)._requested(limit_s)
        heads, refusals = heads_of(self.trace)
        best: Planned | None = None
        refusal: InfeasibleError | None = None
        try:
            best = self._requested(limit_s)
        except InfeasibleError as error:
            refusal = _with_hint(error, refusals)
        if best is None or (heads and is_bound_by_memory(best.plan)):
            best = self._by_fewer_rows(best, limit_s)
        if best is None:
            assert refusal is not None, "a search without a plan is refused"
            raise refusal
        return best

    def _by_fewer_rows(self, best: Planned | None, limit_s: float) -> Planned | None:
        """Try losses that process fewer and fewer rows of logits at a time, as long as memory
        binds; returns the best plan of all."""
        for rows in self.row_choices(best):
            if best is not None and self.budget.is_over:
                break
            self.status.begin(f"a loss by {rows} rows", 0)
            try:
                found = replace(self, rows=rows)._requested(self.limit_to_beat(best, limit_s))
            except KeyboardInterrupt:
                if best is None:
                    raise
                self.budget.interrupt()
                break
            except TooSlow as error:
                log.info("no better plan with a loss by %d rows, or fewer: %s", rows, error)
                break
            except (InfeasibleError, ConstraintError) as error:
                log.info("no better plan with a loss by %d rows: %s", rows, error)
                continue
            if best is None or found.plan.prediction.step_s < best.plan.prediction.step_s:
                best = found
            if not is_bound_by_memory(found.plan):
                break
        return best

    def row_choices(self, found: Planned | None) -> tuple[int, ...]:
        """Return the numbers of a device's rows of logits that the loss may process at a time,
        besides all; none if they are requested, or the loss cannot be computed by rows.

        Args:
            found: a plan, whose stages and microbatches tell how many rows a device has.
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

    def _requested(self, limit_s: float) -> Planned:
        """Find the fastest of the requested plans, with stages only if these are requested."""
        asked = pipeline_in(self.options.constraints, self.mesh)
        if self.free_stages is not None or (
            asked is None and self.options.num_microbatches in (1, "auto")
        ):
            return self._whole_or_cut(limit_s)
        wish = asked or ONE_STAGE
        if wish.axis:
            check(wish, self.mesh)
        tries = Tries()
        search = AlternativeSearch(
            self.budget.unlimited(),
            lambda best_s: min(limit_s, self.options.worth_s(best_s)),
            status=self.status,
        )
        alternatives = list(self.alternatives(wish))
        if not alternatives:
            raise ConstraintError(
                f"{wish}: no axis of mesh {self.mesh} has several devices, along which stages could"
                " lie",
                remedy="leave the pipeline out; num_microbatches= cuts the batch without stages",
            )
        refusal = search.run(alternatives, tries)
        if tries.best is None:
            assert refusal is not None, "there is something to try"
            raise refusal
        return note_tries(tries.best, tries.told, search.coupled)

    @property
    def _may_have_stages(self) -> bool:
        """Whether stages may be tried that nobody asked for: in training on GPUs, of a model that
        returns its loss, where nothing is forced. On CPUs whose processes share cores a stage that
        waits leaves its core to another, which no price counts."""
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
        """Whether a call returns the same in stages and microbatches: the loss, or what can be
        put together."""
        return self.options.outputs in ("loss", "full") or len(self.trace.outputs) == 1

    def _whole_or_cut(self, limit_s: float) -> Planned:
        """Plan one microbatch, or several one after another if these are faster and the call
        returns the same: the loss, or outputs that can be put together."""
        tries = Tries()
        tries.add(name_of("", 0), self.in_one_piece(limit_s))
        if self.options.num_microbatches == "auto" and self._may_be_cut(tries):
            self._one_after_another(limit_s, tries)
        assert tries.best is not None, "a search without a plan is refused"
        found = note_tries(tries.best, tries.told)
        if self._returns_the_same or not (self._may_have_stages and leaves_room(found)):
            return found
        log.info(_NO_STAGES)
        return add_coverage(found, _NO_STAGES)

    def _may_be_cut(self, tries: Tries) -> bool:
        """Whether microbatches that nobody asked for may be tried."""
        asked = pipeline_in(self.options.constraints, self.mesh)
        return (
            tries.best is not None
            and (asked is not None or self._returns_the_same)
            and _run_again(tries.best.plan) >= _AGAIN
        )

    def _one_after_another(self, limit_s: float, tries: Tries) -> None:
        """Try microbatches without stages, as long as many ops run again for lack of memory, and
        more microbatches make the step faster."""
        for num in self.parts():
            best, name = tries.best, name_of("", num)
            if best is not None and _run_again(best.plan) < _AGAIN:
                return
            if not self.budget.take(CAPTURE_WORK + search_work(len(self.mesh.axes))):
                tries.told.append(f"{name} (not tried)")
                return
            self.status.begin(name, 0)
            try:
                limit = self.limit_to_beat(best, limit_s)
                tries.add(name, self.in_stages(replace(ONE_STAGE, microbatches=num), num, limit))
            except KeyboardInterrupt:
                self.budget.interrupt()
                tries.told.append(f"{name} (interrupted)")
                return
            except TooSlow as error:
                tries.add_bound(name, error.args[0])
            except InfeasibleError as error:
                log.info("no plan of %d microbatches, one after another: %s", num, error.what)
                tries.add_refused(name)
            except ConstraintError as error:
                log.info("the batch is not cut into microbatches: %s", error.what)
                return
            if best is not None and tries.best is best:
                return

    def in_parts(self, refusal: InfeasibleError, limit_s: float) -> Planned:
        """Find the smallest number of microbatches, one after another, that fits, if the batch may
        be cut.

        Args:
            refusal: of the plans that were tried before.
            limit_s: seconds of a step that the plan has to beat.

        Raises:
            InfeasibleError: the given refusal, if no number of microbatches helps.
        """
        free = (
            self.options.num_microbatches == "auto"
            and pipeline_in(self.options.constraints, self.mesh) is None
        )
        rows = self.options.loss_rows if self.options.loss_rows != "auto" else 0
        here = replace(self, rows=[rows, *self.row_choices(None)][-1])
        for num in self.parts() if free else ():
            try:
                found = here.in_stages(replace(ONE_STAGE, microbatches=num), num, limit_s)
            except InfeasibleError as error:
                log.info("no plan of %d microbatches: %s", num, error.what)
            except ConstraintError as error:
                log.info("the batch is not cut into microbatches: %s", error.what)
                break
            else:
                log.warning(
                    "planned in %d microbatches, one after another, since all at once %s",
                    num,
                    refusal.what,
                )
                return found
        raise refusal

    def limit_to_beat(self, best: Planned | None, limit_s: float) -> float:
        """Return the seconds of a step that a further plan may take at most to be worth more than
        the best."""
        return (
            limit_s
            if best is None
            else min(limit_s, self.options.worth_s(best.plan.prediction.step_s))
        )


def note_tries(found: Planned, told: Sequence[str], coupled: CoupledError | None = None) -> Planned:
    """Record in a plan what it was chosen from.

    Args:
        found: the plan.
        told: what was tried, with the step of each.
        coupled: why samples depend on each other, if they do; then stages work on one microbatch.
    """
    if len(told) > 1:
        line = (
            "this number of microbatches and these stages alone; tried, with the step found for"
            f" each: {'; '.join(told)}"
        )
        found = add_coverage(found, line)
    if coupled is None or found.plan.pipeline is None:
        return found
    log.warning("one microbatch, on which one stage works after another: %s", coupled.what)
    return add_coverage(
        found, f"one microbatch alone, since samples depend on each other: {coupled.what}"
    )


def is_bound_by_memory(plan: Plan) -> bool:
    """Return whether more memory would make a plan faster, judged by its duals and its
    recomputation."""
    return any(
        stage.proof.memory_price_s_per_gib > 0 or any(e.recompute for e in stage.entries)
        for stage in plan.stages
    )


def _run_again(plan: Plan) -> float:
    """Return the share of a step that is spent on ops that backward runs again."""
    entries = (entry for stage in plan.stages for entry in stage.entries)
    again_s = sum(entry.again_s * len(entry.instances) for entry in entries)
    return plan.num_microbatches * again_s / plan.prediction.step_s


def leaves_room(found: Planned) -> bool:
    """Return whether stages, which wait for each other, could shorten the step of a plan."""
    step_s = found.plan.prediction.step_s
    return step_s - found.computing_s >= _IDLE * step_s


def _with_hint(error: InfeasibleError, refusals: Sequence[str]) -> InfeasibleError:
    """Return the error with what the user may change so that the loss can be computed by rows."""
    hints = [refusal for refusal in refusals if "outputs=" in refusal]
    return (
        InfeasibleError(
            error.what, remedy="; ".join([error.remedy, *hints]), needed_bytes=error.needed_bytes
        )
        if hints
        else error
    )
