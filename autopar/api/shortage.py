"""Explain why no plan fits: how much memory would suffice, and which constraints need more than the
budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.api.captured_call import ONE_STAGE
from autopar.api.chooser import Chooser
from autopar.api.tracing import by_rows
from autopar.capture.trace import Trace
from autopar.constraints import Constraint, Pipelined, pipeline_in
from autopar.constraints.words import in_words
from autopar.core.hardware import Hardware, slowest
from autopar.core.mesh import Mesh
from autopar.core.schedules import AUTO
from autopar.errors import ConstraintError, InfeasibleError, size_text
from autopar.planner import Planned
from autopar.planner.clock import Clock
from autopar.planner.min_memory import Need, prefer_fastest, proven_bytes
from autopar.planner.pipeline.pipeline_request import PipelineRequest
from autopar.planner.pipeline.stage_construction import StagedSearch
from autopar.planner.report_infeasible import find_conflict
from autopar.planner.search import finish_search, need_of, needs, prepare_search
from autopar.request import PlanOptions

# --------------------------------------------------------------------------------------------------
# Lower bounds of the memory of one kind of plan: the whole batch at once, in microbatches, or in
# stages.


@dataclass(frozen=True, slots=True)
class PlanKind:
    """Plans of one kind under some constraints.

    Attributes:
        proven: lower bound of the memory of every plan of this kind.
        lightest: searches for plans with little memory. Returns the fastest that fits, otherwise
            the smallest; None if none is found.
    """

    proven: Need
    lightest: Callable[[], Planned | None]


def in_one_piece(
    trace: Trace,
    mesh: Mesh,
    hardware: Hardware,
    options: PlanOptions,
    model_name: str,
    clock: Clock,
) -> PlanKind:
    """Describe the plans of the whole batch at once, on the whole mesh.

    Args:
        trace: trace of the batch.
        mesh, hardware, options, model_name: of the plans.
        clock: measures the phases.

    Raises:
        ConstraintError: if the constraints cannot hold.
    """
    search = prepare_search(trace, mesh, hardware, options, clock, model_name=model_name)

    def lightest() -> Planned | None:
        candidate = search.find_lightest()
        return None if candidate is None else finish_search(candidate, clock, options)

    proven = proven_bytes(trace, search.ungrouped_layers.priced, options.solve_s)
    return PlanKind(Need(proven, options.budget(slowest(hardware))), lightest)


def in_stages(request: PipelineRequest, clock: Clock) -> PlanKind:
    """Describe the plans of a pipeline, or of one stage that processes microbatches sequentially.

    Args:
        request: the pipeline, and what it is planned for.
        clock: measures the phases.

    Raises:
        ConstraintError: if the constraints cannot hold.
    """
    search = StagedSearch(request, clock)
    return PlanKind(search.proven_need(), search.lightest)


log = logging.getLogger("autopar")
_MOST = 2  # number of kinds of plans with the lowest bounds for which small plans are searched


def find_low_memory_plan(error: InfeasibleError, chooser: Chooser) -> Planned:
    """Find a plan with little memory that fits; if there is none, raise an error with the details.

    All plans that were tried are considered: without microbatches, with stages and microbatches,
    and with a loss by rows.

    Args:
        error: error of the search.
        chooser: the call, and the search over its plans.

    Raises:
        InfeasibleError: with the memory that a plan needs, and a smallest set of constraints that
            do not fit the budget.
    """
    shortage, clock = _Shortage(chooser), Clock(chooser.progress)
    with clock.phase("least"):
        proven, planned = shortage.sizes()
    smallest = None if planned is None else need_of(planned.plan)
    if planned is not None and smallest is not None and smallest.fits:
        log.warning(
            "%s; using a plan with little memory that was not optimized for speed: %s",
            error.what,
            planned.plan,
        )
        return planned
    with clock.phase("conflict"):
        between = _describe_need(proven, smallest)
        stages = pipeline_in(chooser.options.constraints, chooser.mesh)
        tried = (
            f"; {error.what}" if stages is not None and stages.axis else ""
        )  # names the stage that needs most
        message = between + shortage.describe_conflict(proven) + tried if between else error.what
    remedy = error.remedy + ("" if stages is not None else _advise_stages(chooser))
    needed = error.needed_bytes if smallest is None else smallest.num_bytes
    raise InfeasibleError(message, where=error.where, remedy=remedy, needed_bytes=needed) from error


def _advise_stages(chooser: Chooser) -> str:
    """Return text on how to try stages that were not tried; empty if they are not possible."""
    if chooser.mesh.num_devices == 1 or not chooser.trace.differentiable:
        return ""
    if chooser.trace.loss is None:
        return "; return the loss from forward to allow microbatches and stages"
    return "; stages were not tried: pass constraints=(autopar.constraints.pipeline(),)"


def _describe_need(proven: Need | None, smallest: Need | None) -> str:
    """Return an error text with what is known of the minimum memory; empty if nothing is known."""
    if proven is None:
        return ""
    fits = "was found that fits" if proven.fits else "fits"
    of = (
        f" of {proven.where}" if proven.where else ""
    )  # names the type of unequal device that lacks memory
    message = f"no plan {fits} into {size_text(proven.budget_bytes)} per device{of}"
    least = (
        f"{size_text(proven.num_bytes)} ({proven.num_bytes} bytes, proven for all alternatives "
        "tried)"
    )
    if smallest is not None:
        small = (
            f"{size_text(smallest.num_bytes)} ({smallest.num_bytes} bytes, the smallest plan found)"
        )
        if smallest.where:
            return (
                f"{message}: at least {least} is needed; the smallest plan found needs {small} on "
                f"{smallest.where}"
            )
        return f"{message}: the minimum that would suffice is between {least} and {small}"
    return "" if proven.fits else f"{message}: at least {least} is needed"


@dataclass
class _Shortage:
    """A call that does not fit, and the memory of its plans under subsets of the constraints."""

    chooser: Chooser
    _proven: dict[tuple[Constraint, ...], Need | None] = field(default_factory=dict)

    @property
    def requests(self) -> tuple[Constraint, ...]:
        """The constraints, followed by the requested number of microbatches, if any."""
        num, constraints = self.chooser.options.num_microbatches, self.chooser.options.constraints
        return (
            constraints if num == "auto" else (replace(ONE_STAGE, microbatches=num), *constraints)
        )

    def sizes(self) -> tuple[Need | None, Planned | None]:
        """Return the proven minimum memory of all requested plans (None if unknown), and a plan
        with little memory.
        """
        kinds = sorted(
            self._kinds(self.requests), key=lambda kind: kind.proven.share
        )  # ties in the order of trying
        if not kinds:
            return None, None
        proven = kinds[0].proven
        self._proven[self.requests] = proven
        plans = [
            planned
            for planned in (kind.lightest() for kind in kinds[: _MOST if proven.fits else 1])
            if planned is not None
        ]
        return proven, prefer_fastest(plans, needs)

    def describe_conflict(self, proven: Need | None) -> str:
        """Return text on which requests need more memory than the budget.

        It is empty if `proven` fits, or if no plan needs less without the requests.
        """
        requested = self.requests
        if not requested or proven is None or proven.fits or not self._fits(()):
            return ""

        def hold(chosen: Sequence[Constraint]) -> None:
            if not self._fits(chosen):
                raise ConstraintError("it needs more than the budget")

        conflicting = find_conflict(requested, hold)
        rest = [c for c in requested if c not in conflicting]
        names, without = (
            " and ".join(map(in_words, conflicting)),
            "it" if len(conflicting) == 1 else "them",
        )
        need = self._least(rest)
        least = size_text(need.num_bytes) if need else "nothing"
        ask = "asks" if len(conflicting) == 1 else "together ask"
        return (
            f"; {names} {ask} for more than the budget: without {without} at least {least} is "
            "needed"
        )

    def _least(self, constraints: Sequence[Constraint]) -> Need | None:
        """Return the memory that any plan under these constraints needs; None if there is no
        plan."""
        key = tuple(constraints)
        if key not in self._proven:
            self._proven[key] = min(
                (kind.proven for kind in self._kinds(key)),
                key=lambda need: need.share,
                default=None,
            )
        return self._proven[key]

    def _fits(self, constraints: Sequence[Constraint]) -> bool:
        """Return whether a plan under these constraints may fit."""
        need = self._least(constraints)
        return need is not None and need.fits

    def _kinds(self, constraints: Sequence[Constraint]) -> Iterator[PlanKind]:
        """Yield the kinds of plans that `Chooser.plan` tries under these constraints, without those
        that the constraints exclude.
        """
        rest = tuple(c for c in constraints if not _is_number(c))
        num = "auto" if len(rest) == len(constraints) else self.chooser.options.num_microbatches
        options = replace(self.chooser.options, constraints=rest)
        chooser = replace(
            self.chooser,
            options=options if num != "auto" else replace(options, num_microbatches="auto"),
        )
        requested = chooser.options.loss_rows
        rows = (0 if requested == "auto" else requested, *chooser.row_choices(None))
        for num_rows in rows:
            yield from _of_pipelines(replace(chooser, rows=num_rows))
        if num == "auto" and pipeline_in(rest, chooser.mesh) is None:
            yield from _known(
                replace(chooser, rows=rows[-1]), (("", part) for part in chooser.parts()), ONE_STAGE
            )


def _is_number(constraint: Constraint) -> bool:
    return isinstance(constraint, Pipelined) and constraint.axis == ""


def _of_pipelines(chooser: Chooser) -> Iterator[PlanKind]:
    requested = pipeline_in(chooser.options.constraints, chooser.mesh)
    alone = requested is None and chooser.options.num_microbatches in (1, "auto")
    yield from _known(
        chooser,
        [("", 0)] if alone else chooser.candidates(requested or ONE_STAGE),
        requested or ONE_STAGE,
    )


def _known(
    chooser: Chooser,
    ways: Iterator[tuple[str, int]] | Sequence[tuple[str, int]],
    pipelined: Pipelined,
) -> Iterator[PlanKind]:
    """Yield one kind per axis and number of microbatches (0 for the whole batch), without
    impossible ones.
    """
    for axis, num in ways:
        try:
            kind = (
                _of_stages(chooser, replace(pipelined, axis=axis), num)
                if num
                else _of_one_piece(chooser)
            )
        except ConstraintError as error:
            log.info("no plan with %d microbatches along %r: %s", num, axis, error.what)
            continue
        yield replace(kind, lightest=partial(_plan_with_marks, chooser, kind))


def _plan_with_marks(chooser: Chooser, kind: PlanKind) -> Planned | None:
    planned = kind.lightest()
    return None if planned is None else chooser.note_loss_rows(planned)


def _of_one_piece(chooser: Chooser) -> PlanKind:
    trace, clock = by_rows(chooser.trace, chooser.rows), Clock(chooser.progress)
    return in_one_piece(
        trace,
        chooser.mesh,
        chooser.hardware,
        chooser.options_without_stages(),
        type(chooser.model).__name__,
        clock,
    )


def _of_stages(chooser: Chooser, pipelined: Pipelined, num: int) -> PlanKind:
    here = replace(pipelined, schedule="1f1b" if pipelined.schedule == AUTO else pipelined.schedule)
    return in_stages(chooser.pipeline_request(here, num).resolve(), Clock(chooser.progress))
