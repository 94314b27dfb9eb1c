"""Search over plans: without stages, with the requested pipeline, or with stages along every axis
and some numbers of microbatches, which are pruned by their bounds. If memory binds, losses that
process the logits in parts are tried, too."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.api.microbatch_search import (
    ONE_STAGE,
    WITHOUT_ASKING,
    CapturedCall,
    Tries,
    add_coverage,
    numbers_of,
    walk,
)
from autopar.api.tracing import batch_size
from autopar.capture.chunked_loss import heads_of
from autopar.constraints import Pipelined, check, pipeline_in
from autopar.core.garbage import collected_seldom
from autopar.core.hardware import slowest
from autopar.core.schedules import AUTO, INTERLEAVED
from autopar.errors import AutoparError, ConstraintError, CoupledError, InfeasibleError
from autopar.planner import Planned, TooSlow
from autopar.plans import Plan
from autopar.program.schedule import num_rounds

# --------------------------------------------------------------------------------------------------
# Stages along one axis: numbers of microbatches and schedules, each of which has to beat the plans
# that were found before.

_WORTH = 0.01  # share of a step: a further stage per device is to save as much


@dataclass(frozen=True, slots=True)
class Staging(CapturedCall):
    """A captured call, and the search over its pipelines.

    Attributes:
        coupled: the error that says why the batch cannot be cut, once that is known. Then stages
            work on one microbatch, unless more are requested.
    """

    coupled: list[CoupledError] = field(default_factory=list)

    def along(self, wish: Pipelined, limit_s: float, tries: Tries) -> AutoparError | TooSlow | None:
        """Try numbers of microbatches along one axis.

        Args:
            wish: the requested pipeline, with its axis.
            limit_s: seconds of a step that plans have to beat.
            tries: plans are recorded here.

        Returns:
            Why a number has no plan that is faster than what was found; None if all have.
        """
        axis, found_s, alone_s = (
            wish.axis or "",
            dict[int, float](),
            0.0,
        )  # what they take at least if no stage waits, however many
        refusal: AutoparError | TooSlow | None = None
        for num in self.numbers(wish, found_s):
            if self.options.is_late and (
                tries.best is not None or math.isfinite(limit_s)
            ):  # a limit is what another plan takes
                log.warning(
                    "the time was over before %d microbatches along %r were tried", num, axis
                )
                return refusal or TooSlow(0.0)
            limit = self.limit_to_beat(tries.best, limit_s)
            if alone_s >= limit and num > min(found_s):
                log.info(
                    "more microbatches along %r are not tried: with nothing to wait for they take"
                    " %.4g s",
                    axis,
                    alone_s,
                )
                continue
            try:
                found_s[num] = tries.add(axis, num, self._plan_schedules(wish, num, limit))
            except TooSlow as error:
                refusal = refusal or error
                found_s[num], bound_s = math.inf, tries.add_too_slow(axis, num, error)
                log.info(
                    "no plan of %d microbatches along %r is faster: at least %.4g s",
                    num,
                    axis,
                    bound_s,
                )
                # a smaller microbatch takes no smaller share of its time: launches and latencies
                # stay as they are
                if axis:
                    alone_s = max(alone_s, bound_s * num / (num + self.num_ranks(wish) - 1))
            except (InfeasibleError, ConstraintError) as error:
                log.info("no plan of %d microbatches along %r: %s", num, axis, error.what)
                refusal, found_s[num] = error, tries.add_refused(axis, num)
                self.coupled.extend([error] if isinstance(error, CoupledError) else [])
        return refusal

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
        """Yield (axis, number of microbatches) to try first; 0 microbatches stand for no
        pipeline."""
        if wish.axis is None and self.number(wish) is None:
            yield "", 0
        for axis in self.axes(wish):
            for num in self.numbers(replace(wish, axis=axis), {}):
                yield axis, num

    def numbers(self, wish: Pipelined, found_s: Mapping[int, float]) -> Iterator[int]:
        """Yield the numbers of microbatches to try along an axis, in the order of `walk`.

        Once samples are known to be coupled, numbers above one are skipped. One alone is then tried
        if a constraint asks for stages.
        """
        samples = batch_size(self.args, self.kwargs)
        if (asked := self.number(wish)) is not None:
            yield from walk((asked,), found_s)
            return
        for num in walk(self._free_numbers(wish, samples), found_s):
            if not self.coupled:
                yield num
        needs_one = bool(self.coupled) and bool(self.options.constraints)
        if needs_one and wish.chunks == 1 and 1 not in found_s:
            yield 1

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

    def limit_to_beat(self, best: Planned | None, limit_s: float) -> float:
        """Return the seconds of a step that a further plan may take at most to be worth more than
        the best."""
        return (
            limit_s
            if best is None
            else min(limit_s, self.options.worth_s(best.plan.prediction.step_s))
        )


log = logging.getLogger("autopar")
_PARTS = (4, 16)  # into which a device's rows of logits are cut
_LEAST_ROWS = 64  # below, a product no longer fills a device
# share of a step that is spent on running ops again: from there on microbatches without stages may
# be worth it
_AGAIN = 0.05
_IDLE = (
    0.1  # share of a step beyond what it computes at least, below which stages would save nothing
)
_NO_STAGES = (
    "no stages: of these a call returns the loss alone, and other outputs are asked for; with"
    ' outputs="loss" they are tried'
)
# share of a step that stages are to save which nobody asked for: they are more to wait for, and to
# look into
_SAVED = 0.05


@dataclass(frozen=True, slots=True)
class Chooser(Staging):
    """A captured call that is to be planned; `plan` finds the fastest plan among those tried."""

    @collected_seldom()
    def plan(self, limit_s: float = math.inf) -> Planned:
        """Find the fastest plan among those tried.

        Args:
            limit_s: seconds of a step; a plan that is no faster, by the gap, is not wanted.

        Raises:
            CaptureError: if a loss by rows is requested and impossible.
            ConstraintError, InfeasibleError: of the last plan tried, if there is none.
            TooSlow: if bounds show that no plan beats the limit.
        """
        asked, limit_s = self.options.loss_rows, self.options.worth_s(limit_s)
        if asked != "auto":
            return replace(self, rows=asked)._with_parts(limit_s)
        heads, refusals = heads_of(self.trace)
        try:
            best = self._pipelines(limit_s)
        except InfeasibleError as error:
            best, refusal = None, _with_hint(error, refusals)
        if best is not None and not (heads and _is_bound_by_memory(best.plan)):
            return best
        tried = self.row_choices(max((head.num_rows for head in heads), default=0), best)
        for rows in tried:
            if best is not None and self.options.is_late:
                break
            here = replace(self, rows=rows)
            try:
                found = here._pipelines(self.limit_to_beat(best, limit_s))
            except (TooSlow, InfeasibleError, ConstraintError) as error:
                log.info("no better plan with a loss by %d rows: %s", rows, error)
                continue
            if best is None or found.plan.prediction.step_s < best.plan.prediction.step_s:
                best = found
            if not _is_bound_by_memory(found.plan):
                break
        if best is None:
            return replace(self, rows=tried[-1] if tried else 0)._in_parts(refusal, limit_s)
        return best

    def row_choices(self, num_rows: int, found: Planned | None) -> tuple[int, ...]:
        """Return the numbers of a device's rows of logits that the loss may process at a time."""
        pipeline = None if found is None else found.plan.pipeline
        num_stages, parts = (
            (1, 1)
            if pipeline is None
            else (len(pipeline.stages) // pipeline.num_chunks, pipeline.num_microbatches)
        )
        local = num_rows * num_stages // (self.mesh.num_devices * parts)
        rows = [
            max(-(-local // (part * _LEAST_ROWS)) * _LEAST_ROWS, _LEAST_ROWS) for part in _PARTS
        ]
        return tuple(dict.fromkeys(n for n in rows if n < local))

    def _with_parts(self, limit_s: float) -> Planned:
        """Plan the loss with these rows, in microbatches if it fits in no other way."""
        try:
            return self._pipelines(limit_s)
        except InfeasibleError as error:
            return self._in_parts(error, limit_s)

    def _pipelines(self, limit_s: float) -> Planned:
        """Find the fastest of the requested plans with and without stages."""
        asked = pipeline_in(self.options.constraints, self.mesh)
        if asked is None and self.options.num_microbatches in (1, "auto"):
            if not (self._may_have_stages and self._returns_the_same):
                return self._whole_or_cut(limit_s)
            asked = WITHOUT_ASKING
        if asked is not None and asked.axis:
            check(asked, self.mesh)
        wish, tries = asked or ONE_STAGE, Tries()
        if wish.axis is None and self.number(wish) is None:
            refusal = self._with_or_without(wish, limit_s, tries)
        else:
            refusal = self._along_all(wish, limit_s, tries)
        if tries.best is None:
            assert refusal is not None, "there is something to try"
            raise refusal
        return self._of_one(tries.fastest()) if self.coupled else tries.fastest()

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

    def _with_or_without(
        self, wish: Pipelined, limit_s: float, tries: Tries
    ) -> AutoparError | TooSlow | None:
        """Try plans without stages, and plans with stages along every axis.

        If the search for a plan without stages would take long, stages are tried before it, since
        their step may end it. Stages that nobody asked for are tried only if the plan without them
        takes sufficiently longer than its ops in their least time, and taken only if they save
        enough.

        Returns:
            Why there is no faster plan; None if nothing was refused.
        """
        looked: list[AutoparError | TooSlow | None] = []
        unasked, in_stages = wish is WITHOUT_ASKING, Tries()
        saved = _SAVED if unasked else 0.0

        def stages(step_s: float, compute_s: float) -> None:
            if not looked and (not unasked or _leaves_room(step_s, compute_s)):
                looked.append(None)
                limit = min(limit_s, self.options.worth_s(step_s), step_s * (1.0 - saved))
                looked[0] = self._along_all(wish, limit, in_stages)

        def elsewhere(step_s: float, compute_s: float) -> float:
            stages(step_s, compute_s)
            return min(
                limit_s,
                (
                    in_stages.best_s / (1.0 - saved)
                    if unasked
                    else self.options.worth_s(in_stages.best_s)
                ),
            )

        refusal: AutoparError | TooSlow | None = None
        try:
            tries.add("", 0, self.in_one_piece(limit_s, elsewhere))
        except TooSlow as error:
            tries.add_too_slow("", 0, error)
            refusal = error
        except (InfeasibleError, ConstraintError) as error:
            log.info("no plan without stages: %s", error.what)
            tries.add_refused("", 0)
            refusal = error
        if not isinstance(refusal, TooSlow) and (not unasked or self._may_be_cut(tries)):
            self._one_after_another(min(limit_s, self.options.worth_s(in_stages.best_s)), tries)
        if (
            tries.best is None
            and in_stages.best is None
            and any(isinstance(found, TooSlow) for found in looked)
        ):
            # they are no faster than what was to be a plan without stages, and did not fit after
            # all
            looked.clear()
            in_stages.told.clear()
        if tries.best is None or not self.options.is_late:
            stages(tries.best_s, 0.0 if tries.best is None else tries.best.computing_s)
        elif not looked:
            log.warning("the time was over before stages were tried")
        tries.join(in_stages, saved)
        last = looked[0] if looked else None
        return refusal or last if unasked else last or refusal

    def _along_all(
        self, wish: Pipelined, limit_s: float, tries: Tries
    ) -> AutoparError | TooSlow | None:
        """Try stages along every requested axis. Returns why one has no plan that is faster than
        what was found."""
        refusal: AutoparError | TooSlow | None = None
        for axis in self.axes(wish):
            refusal = self.along(replace(wish, axis=axis), limit_s, tries) or refusal
        return refusal

    def _may_be_cut(self, tries: Tries) -> bool:
        """Whether microbatches that nobody asked for may be tried."""
        return (
            tries.best is not None
            and self._returns_the_same
            and _run_again(tries.best.plan) >= _AGAIN
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
        tries.add("", 0, self.in_one_piece(limit_s))
        if self.options.num_microbatches == "auto" and self._may_be_cut(tries):
            self._one_after_another(limit_s, tries)
        found = tries.fastest()
        if not (
            self._may_have_stages and _leaves_room(found.plan.prediction.step_s, found.computing_s)
        ):
            return found
        log.info(_NO_STAGES)
        return add_coverage(found, _NO_STAGES)

    def _one_after_another(self, limit_s: float, tries: Tries) -> None:
        """Try microbatches without stages, as long as many ops run again for lack of memory, and
        more microbatches make the step faster."""
        for num in self.parts():
            best = tries.best
            if best is not None and (self.options.is_late or _run_again(best.plan) < _AGAIN):
                return
            try:
                limit = self.limit_to_beat(best, limit_s)
                tries.add("", num, self.in_stages(replace(ONE_STAGE, microbatches=num), num, limit))
            except TooSlow as error:
                tries.add_too_slow("", num, error)
            except InfeasibleError as error:
                log.info("no plan of %d microbatches, one after another: %s", num, error.what)
                tries.add_refused("", num)
            except ConstraintError as error:
                log.info("the batch is not cut into microbatches: %s", error.what)
                return
            if best is not None and tries.best is best:
                return

    def _of_one(self, found: Planned) -> Planned:
        """Record in a plan why its stages work on the whole batch and wait for each other."""
        if found.plan.pipeline is None:
            return found
        log.warning(
            "one microbatch, on which one stage works after another: %s", self.coupled[0].what
        )
        return add_coverage(
            found,
            f"one microbatch alone, since samples depend on each other: {self.coupled[0].what}",
        )

    def _in_parts(self, refusal: InfeasibleError, limit_s: float) -> Planned:
        """Find the smallest number of microbatches, one after another, that fits, if the batch may
        be cut.

        Raises:
            InfeasibleError: the given refusal, if no number of microbatches helps.
        """
        free = (
            self.options.num_microbatches == "auto"
            and pipeline_in(self.options.constraints, self.mesh) is None
        )
        for num in self.parts() if free else ():
            try:
                found = self.in_stages(replace(ONE_STAGE, microbatches=num), num, limit_s)
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


def _is_bound_by_memory(plan: Plan) -> bool:
    """Return whether more memory would make a plan faster, judged by its duals and its
    recomputation."""
    plans = plan.pipeline.stages if plan.pipeline else (plan,)
    return any(
        p.proof.memory_price_s_per_gib > 0 or any(e.recompute for e in p.entries) for p in plans
    )


def _run_again(plan: Plan) -> float:
    """Return the share of a step that is spent on ops that backward runs again."""
    plans, num = (
        (plan.pipeline.stages, plan.pipeline.num_microbatches) if plan.pipeline else ((plan,), 1)
    )
    again_s = sum(entry.again_s * len(entry.instances) for each in plans for entry in each.entries)
    return num * again_s / plan.prediction.step_s


def _leaves_room(step_s: float, compute_s: float) -> bool:
    """Return whether stages, which wait for each other, could shorten a step with this much
    compute."""
    return step_s - compute_s >= _IDLE * step_s


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
