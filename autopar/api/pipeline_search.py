"""Pipelines of a captured call: the numbers of microbatches to try along an axis, their bounds, and
the plan for one of them with the requested or the fastest schedule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations

from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.api.alternatives import Alternative, Splits
from autopar.api.captured_call import WITHOUT_ASKING, CapturedCall
from autopar.api.tracing import batch_size, by_rows
from autopar.capture.trace import Trace
from autopar.constraints import Pipelined
from autopar.core.mesh import Mesh
from autopar.core.schedules import AUTO, INTERLEAVED
from autopar.cost.op_times import TotalWork
from autopar.errors import ConstraintError, InfeasibleError
from autopar.planner import Planned, TooSlow
from autopar.planner.pipeline.pipeline_bound import least_batch_s
from autopar.program.schedule import num_rounds
from autopar.stages.placing import most_parts

log = logging.getLogger("autopar")
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

    def alternatives(self, wish: Pipelined) -> Iterator[Alternative]:
        """Yield the pipelines to try.

        Args:
            wish: the requested pipeline; axis, number of microbatches and schedule may be open.
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
        """Return a lower bound of the step of a pipeline with equal stages, from its compute."""
        ranks = self.num_ranks(wish)
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

    def _most_chunks(self, wish: Pipelined, num: int, num_parts: int) -> int:
        """Return the maximum number of stages per device that `_plan_schedules` may try.

        Args:
            wish: the pipeline, with its axis.
            num: number of microbatches.
            num_parts: maximum number of parts that the model can be cut into.
        """
        if wish.schedule != AUTO:
            return wish.chunks
        ranks, chunks = self.num_ranks(wish), 1
        if ranks > 1 and num_rounds(ranks, num):
            while 2 * chunks * ranks <= num_parts:
                chunks *= 2
        return chunks

    def _plan_schedules(self, wish: Pipelined, num: int, limit_s: float) -> Planned:
        """Plan the requested schedule or, if none is requested, the fastest: 1F1B, then increasing
        numbers of stages per device.

        With 1F1B, a step takes the time of M microbatches on each of P devices, and each device
        waits for the time of P − 1 microbatches. With v stages per device it waits 1/v of that.
        Interleaving is therefore tried if 1F1B, or its bound, would be fast enough with that much
        less waiting.
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
                log.info("no plan with %d stages per device along %r: %s", chunks, wish.axis, error)
                break
            if found.plan.prediction.step_s >= fast_enough:
                break
            best, chunks = found, chunks * 2
        if best is None:
            assert refusal is not None, "1F1B has a plan, or is too slow"
            raise refusal
        return best

    def candidates(self, wish: Pipelined) -> Iterator[tuple[str, int]]:
        """Yield the (axis, number of microbatches) that need least memory; 0 microbatches stand for
        no pipeline. These are the largest numbers, which have the smallest microbatches.
        """
        if wish.axis is None and self.number(wish) is None:
            yield "", 0
        for axis in self.axes(wish):
            for num in self.numbers(replace(wish, axis=axis))[-_NEEDY:]:
                yield axis, num

    def numbers(self, wish: Pipelined) -> tuple[int, ...]:
        """Return the numbers of microbatches to try along an axis, ascending."""
        if (asked := self.number(wish)) is not None:
            return (asked,)
        return self._free_numbers(wish, batch_size(self.args, self.kwargs))

    def _free_numbers(self, wish: Pipelined, samples: int) -> tuple[int, ...]:
        """Return the numbers of microbatches to try if none is requested, ascending."""
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
