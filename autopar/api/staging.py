"""Stages along one axis: numbers of microbatches and schedules, each tried for less time than what was found before."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.api.captured import CapturedCall
from autopar.api.tracing import batch_size
from autopar.api.tries import Tries, numbers_of, walk
from autopar.constraints import Pipelined
from autopar.errors import AutoparError, ConstraintError, CoupledError, InfeasibleError
from autopar.planning import Planned, TooSlow
from autopar.run.orders import num_rounds
from autopar.schedules import AUTO, INTERLEAVED

log = logging.getLogger("autopar")
_WORTH = 0.01  # share of a step: a further stage per device is to save as much


@dataclass(frozen=True, slots=True)
class Staging(CapturedCall):
    """A captured call, and what pipelines it may have.

    Attributes:
        coupled: why the batch is not cut, once that is known: then stages work on one microbatch, unless more are asked for.
    """

    coupled: list[CoupledError] = field(default_factory=list)

    def along(self, wish: Pipelined, limit_s: float, tries: Tries) -> AutoparError | TooSlow | None:
        """Try numbers of microbatches along one axis; why one has no plan that is faster than what was found."""
        axis, found_s, alone_s = wish.axis or "", dict[int, float](), 0.0  # what they take at least if no stage waits, however many
        refusal: AutoparError | TooSlow | None = None
        for num in self.numbers(wish, found_s):
            if self.options.is_late and (tries.best is not None or math.isfinite(limit_s)):  # a limit is what another plan takes
                log.warning("the time was over before %d microbatches along %r were tried", num, axis)
                return refusal or TooSlow(0.0)
            limit = self.beating(tries.best, limit_s)
            if alone_s >= limit and num > min(found_s):
                log.info("more microbatches along %r are not tried: with nothing to wait for they take %.4g s", axis, alone_s)
                continue
            try:
                found_s[num] = tries.add(axis, num, self._scheduled(wish, num, limit))
            except TooSlow as error:
                refusal = refusal or error
                found_s[num], bound_s = math.inf, tries.too_slow(axis, num, error)
                log.info("no plan of %d microbatches along %r is faster: at least %.4g s", num, axis, bound_s)
                if axis:  # a smaller microbatch takes no smaller share of its time: launches and latencies stay as they are
                    alone_s = max(alone_s, bound_s * num / (num + self.num_ranks(wish) - 1))
            except (InfeasibleError, ConstraintError) as error:
                log.info("no plan of %d microbatches along %r: %s", num, axis, error.what)
                refusal, found_s[num] = error, tries.refused(axis, num)
                self.coupled.extend([error] if isinstance(error, CoupledError) else [])
        return refusal

    def _scheduled(self, wish: Pipelined, num: int, limit_s: float) -> Planned:
        """The plan of the schedule that is asked for, or of the fastest: 1F1B, then more and more stages a device.

        A step of 1F1B is M microbatches on each of P devices and P − 1 that these wait for; with v stages a device they wait for the
        v-th part. So interleaving is tried where 1F1B, or what bounds it, would be fast enough with so much less to wait for.
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
            fast_enough = limit_s if best is None else min(limit_s, best.plan.prediction.step_s * (1.0 - _WORTH))
            if plain_s * (num + (ranks - 1) / chunks) / (num + ranks - 1) >= fast_enough:
                break
            try:
                found = self.in_stages(replace(wish, schedule=INTERLEAVED, chunks=chunks), num, fast_enough)
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
        """(axis, number of microbatches) of what is tried at first; 0 for no pipeline at all."""
        if wish.axis is None and self.number(wish) is None:
            yield "", 0
        for axis in self.axes(wish):
            for num in self.numbers(replace(wish, axis=axis), {}):
                yield axis, num

    def numbers(self, wish: Pipelined, found_s: Mapping[int, float]) -> Iterator[int]:
        """Of microbatches along an axis, as `walk` has them. More than one no longer come once samples are known to be coupled; one alone
        does where a constraint asks for stages."""
        asked, samples, stages = self.number(wish), batch_size(self.args, self.kwargs), self.num_ranks(wish)
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        divisors = [n for n in divisors if num_rounds(stages, n)] if wish.chunks > 1 else divisors
        free = numbers_of(divisors or [samples], stages) if wish.axis else (1,)
        for num in walk((asked,) if asked is not None else free, found_s):
            if asked is not None or not self.coupled:
                yield num
        if self.coupled and asked is None and wish.chunks == 1 and 1 not in found_s and self.options.constraints:
            yield 1

    def axes(self, wish: Pipelined) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.mesh.axes if axis.size > 1) if wish.axis is None else (wish.axis,)

    def number(self, wish: Pipelined) -> int | None:
        """Of microbatches, where one is asked for."""
        return wish.microbatches or (self.options.num_microbatches if isinstance(self.options.num_microbatches, int) else None)

    def beating(self, best: Planned | None, limit_s: float) -> float:
        """What a plan is to take at most that is looked for beside the best, if there is one."""
        return limit_s if best is None else min(limit_s, self.options.worth_s(best.plan.prediction.step_s))
