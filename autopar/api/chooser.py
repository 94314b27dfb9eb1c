"""A captured call on one mesh shape, and its plans: without stages, or with requested ones; with
losses that process the logits in parts, and microbatches one after another, if memory binds."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.api.alternatives import (
    CAPTURE_WORK,
    AlternativeSearch,
    SearchStatus,
    Tries,
    WorkBudget,
    name_of,
    search_work,
)
from autopar.api.captured_call import ONE_STAGE, WITHOUT_ASKING, add_coverage
from autopar.api.pipeline_search import Staging
from autopar.capture.chunked_loss import heads_of
from autopar.constraints import Pipelined, check, pipeline_in
from autopar.core.hardware import slowest
from autopar.errors import ConstraintError, CoupledError, InfeasibleError
from autopar.planner import Planned, TooSlow
from autopar.plans import Plan

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
        """Try losses that process fewer and fewer rows of logits at a time, as long as memory
        binds; returns the best plan of all."""
        for rows in self.row_choices(best):
            if best is not None and self.budget.is_over:
                break
            self.status.begin(f"a loss by {rows} rows", 0)
            try:
                found = replace(self, rows=rows)._find_fastest(self.limit_to_beat(best, limit_s))
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

    def _find_fastest(self, limit_s: float) -> Planned:
        """Find the fastest of the requested plans with the rows of the loss, with stages only if
        these are requested."""
        asked = pipeline_in(self.options.constraints, self.mesh)
        if self.free_stages is not None or (
            asked is None and self.options.num_microbatches in (1, "auto")
        ):
            return self._try_microbatches(self.in_one_piece(limit_s), limit_s)
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
