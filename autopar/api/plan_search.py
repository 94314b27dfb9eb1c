"""Search for a plan of a call over mesh shapes, stages, microbatches and losses by rows.

1. Plans without stages, for each mesh shape (`autopar.api.mesh_search`). The first plan is ready
   after one search. If memory is the bottleneck, losses by rows of the logits and sequential
   microbatches are tried.
2. Alternatives with stages, along every axis of every shape, in the order of their bounds
   (`autopar.api.alternatives`), within the budget of work set by `effort`.
3. If nothing fits, increasing numbers of sequential microbatches until the call fits.

A pipeline whose axis or number of microbatches is requested replaces step 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.api.alternatives import (
    Alternative,
    AlternativeSearch,
    Tries,
    WorkBudget,
)
from autopar.api.captured_call import NOT_REQUESTED
from autopar.api.chooser import Chooser, is_bound_by_memory, leaves_room, note_tries
from autopar.api.mesh_search import ShapeSearch
from autopar.core.mesh import Mesh
from autopar.core.units import seconds
from autopar.errors import AutoparError, CoupledError, InfeasibleError
from autopar.planner import Planned, TooSlow
from autopar.request import PlanOptions

# Share of the step time that stages which were not requested have to save: a pipeline is harder to
# run and to debug.
_SAVED = 0.05


@dataclass(frozen=True, slots=True)
class PlanSearch:
    """Search for the plan of a call over mesh shapes and stages.

    Attributes:
        choose: returns the call on a mesh shape.
        options: options of the call.
        meshes: the shapes, the simplest first.
        further: shapes to try if none of `meshes` has a plan for another reason than lack of
            memory.
        holds: whether a shape has the axes that the constraints name.
        budget: work for alternatives to the first plan.
    """

    choose: Callable[[Mesh], Chooser]
    options: PlanOptions
    meshes: Sequence[Mesh]
    further: Sequence[Mesh] = ()
    holds: Callable[[Mesh], bool] = lambda _: True
    budget: WorkBudget = field(default_factory=WorkBudget)

    def run(self) -> Planned:
        """Find the fastest plan.

        Raises:
            ConstraintError, InfeasibleError, MeshError: if there is no plan; the error of the most
                informative mesh shape (`autopar.api.mesh_search.ShapeSearch`).
        """
        shapes = ShapeSearch(self.budget, self.holds, self.choose(self.meshes[0]).status)
        for mesh in shapes.shapes_to_try(self.meshes, self.further):
            with shapes.attempt(mesh):
                shapes.add(mesh, self.choose(mesh).plan(shapes.best_s))
        best, refusal = self._with_stages(shapes)
        if best is None and isinstance(refusal, InfeasibleError):
            best, refusal = self._in_parts(refusal)
        if best is None:
            assert refusal is not None, "a search without a plan is refused"
            raise refusal
        return replace(shapes.note(best), was_interrupted=self.budget.was_interrupted)

    def _with_stages(self, shapes: ShapeSearch) -> tuple[Planned | None, AutoparError | None]:
        """Search for stages that improve on the plans of the mesh shapes.

        Returns:
            The best plan, and the reason if there is none.
        """
        alone = shapes.best
        refusal = shapes.refusal if alone is None else None
        choosers = self._choosers_with_stages(shapes)
        if not choosers:
            return alone, refusal
        is_unrequested = choosers[0].free_stages is NOT_REQUESTED
        if is_unrequested and alone is not None and not leaves_room(alone):
            return alone, refusal
        saved = _SAVED if is_unrequested else 0.0
        search = AlternativeSearch(
            self.budget if is_unrequested else self.budget.unlimited(),
            self._limit(alone, saved),
            len(self.meshes) > 1,
            choosers[0].status,
        )
        tries = Tries()
        error = search.run(_alternatives(choosers), tries)
        if tries.best is not None or alone is None:
            _by_fewer_rows(choosers, search, tries)
        if error is not None and not isinstance(error, TooSlow):
            refusal = error
        return _better(alone, tries, saved, search.coupled), refusal

    def _choosers_with_stages(self, shapes: ShapeSearch) -> list[Chooser]:
        """Return the call on each mesh shape that was tried, if it may have stages."""
        meshes = [m for m in self.meshes if m not in shapes.untried and self.holds(m)]
        return [c for c in map(self.choose, meshes) if c.free_stages is not None]

    def _limit(self, alone: Planned | None, saved: float) -> Callable[[float], float]:
        """Return a function that maps the step time of the fastest plan with stages to the step
        time that another plan has to beat.

        Args:
            alone: the best plan without stages.
            saved: share of the step time that stages have to save.
        """
        alone_s = math.inf if alone is None else alone.plan.prediction.step_s

        def limit(best_s: float) -> float:
            """Seconds of a step."""
            return min(self.options.worth_s(min(alone_s, best_s)), alone_s * (1.0 - saved))

        return limit

    def _in_parts(self, refusal: InfeasibleError) -> tuple[Planned | None, AutoparError]:
        """Search for sequential microbatches after everything else failed."""
        shapes = ShapeSearch(self.budget.unlimited(), self.holds)
        for mesh in shapes.shapes_to_try(self.meshes):
            with shapes.attempt(mesh):
                shapes.add(mesh, self.choose(mesh).in_parts(refusal, shapes.best_s))
        return shapes.best, refusal


def _by_fewer_rows(choosers: Sequence[Chooser], search: AlternativeSearch, tries: Tries) -> None:
    """Search for losses by fewer and fewer rows, with the best stages, or with all if no plan fits,
    as long as memory is the bottleneck.
    """
    for rows in choosers[0].row_choices(tries.best):
        if tries.best is not None and not is_bound_by_memory(tries.best.plan):
            return
        here = [replace(chooser, rows=rows) for chooser in choosers]
        search.run(_alternatives(here, tries.best), tries)


def _alternatives(
    choosers: Sequence[Chooser], reference: Planned | None = None
) -> Iterator[Alternative]:
    """Yield the alternatives with stages of some mesh shapes.

    Args:
        choosers: the call on each shape.
        reference: a plan; if given, only the alternative with its mesh, axis and number of
            microbatches.
    """
    for chooser in choosers:
        pipelined = chooser.free_stages
        assert pipelined is not None, "only calls without requested stages have alternatives"
        for alternative in chooser.alternatives(pipelined):
            reference_plan = reference.plan if reference is not None else None
            if reference_plan is None or (alternative.mesh, alternative.axis, alternative.num) == (
                reference_plan.mesh,
                reference_plan.stage_axis,
                reference_plan.num_microbatches,
            ):
                yield alternative


def _better(
    alone: Planned | None, tries: Tries, saved: float, coupled: CoupledError | None
) -> Planned | None:
    """Return the plan with stages if it saves enough, otherwise the plan without stages; with a
    note on both.

    Args:
        alone: the best plan without stages.
        tries: the plans with stages.
        saved: share of the step time that stages have to save.
        coupled: the reason why samples depend on each other, if they do.
    """
    summaries, best = list(tries.summaries), tries.best
    if alone is not None:
        alone_s = alone.plan.prediction.step_s
        summaries.insert(0, f"no stages ({seconds(alone_s)})")
        if best is None or best.plan.prediction.step_s > (1.0 - saved) * alone_s:
            if best is not None and best.plan.prediction.step_s < alone_s:
                summaries.append(
                    f"stages that save less than {100 * saved:g} % are used only on request"
                )
            best = alone
    return None if best is None else note_tries(best, summaries, coupled)
