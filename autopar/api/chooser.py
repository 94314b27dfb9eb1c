"""Plans of a captured call on one mesh shape: without stages or with requested stages and, if
memory is the bottleneck, with losses by rows of the logits and sequential microbatches.
"""

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
_PARTS = (4, 16)  # number of parts that a device's rows of logits are cut into
_LEAST_ROWS = 64  # with fewer rows, a matrix product does not use the whole device
# Share of recomputation in the step time above which microbatches without stages may be faster.
_AGAIN = 0.05
# Share of the step time beyond the minimum compute time, below which stages save nothing.
_IDLE = 0.1
_NO_STAGES = (
    "no stages: of these a call returns the loss alone, and other outputs are asked for; with "
    'outputs="loss" they are tried'
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
        asked = pipeline_in(self.options.constraints, self.mesh)
        if asked is not None:
            return asked if asked.axis is None and self.number(asked) is None else None
        return WITHOUT_ASKING if self._may_have_stages and self._returns_the_same else None

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
                found = replace(self, rows=rows)._find_fastest(self.limit_to_beat(best, limit_s))
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
            if best is None or found.plan.prediction.step_s < best.plan.prediction.step_s:
                best = found
            if not is_bound_by_memory(found.plan):
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
                f"{wish}: mesh {self.mesh} has no axis with several devices for the stages",
                remedy="remove the pipeline constraint; num_microbatches= splits the batch without "
                "stages",
            )
        refusal = search.run(alternatives, tries)
        if tries.best is None:
            assert refusal is not None, "there is something to try"
            raise refusal
        return note_tries(tries.best, tries.told, search.coupled)

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
        found = note_tries(tries.best, tries.told)
        if self._returns_the_same or not (self._may_have_stages and leaves_room(found)):
            return found
        log.info(_NO_STAGES)
        return add_coverage(found, _NO_STAGES)

    def _may_be_cut(self, tries: Tries) -> bool:
        """Whether microbatches that were not requested may be tried."""
        asked = pipeline_in(self.options.constraints, self.mesh)
        return (
            tries.best is not None
            and (asked is not None or self._returns_the_same)
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
        for num in self.parts() if free else ():
            try:
                found = here.in_stages(replace(ONE_STAGE, microbatches=num), num, limit_s)
            except InfeasibleError as error:
                log.info("no plan with %d microbatches: %s", num, error.what)
            except ConstraintError as error:
                log.info("the batch is not split into microbatches: %s", error.what)
                break
            else:
                log.warning(
                    "planned %d sequential microbatches, because all at once %s",
                    num,
                    refusal.what,
                )
                return found
        raise refusal

    def limit_to_beat(self, best: Planned | None, limit_s: float) -> float:
        """Return the step time in seconds below which a further plan replaces the best one."""
        return (
            limit_s
            if best is None
            else min(limit_s, self.options.worth_s(best.plan.prediction.step_s))
        )


def note_tries(found: Planned, told: Sequence[str], coupled: CoupledError | None = None) -> Planned:
    """Record in a plan the alternatives that it was chosen from.

    Args:
        found: the plan.
        told: the alternatives, with the step time of each.
        coupled: the reason why samples depend on each other, if they do; the stages then process
            one microbatch.
    """
    if len(told) > 1:
        line = (
            "this number of microbatches and these stages alone; tried, with the step found for "
            f"each: {'; '.join(told)}"
        )
        found = add_coverage(found, line)
    if coupled is None or found.plan.pipeline is None:
        return found
    log.warning("one microbatch, which the stages process one after another: %s", coupled.what)
    return add_coverage(
        found, f"one microbatch alone, since samples depend on each other: {coupled.what}"
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
