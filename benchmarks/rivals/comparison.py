"""All variants of one model in one process: measured separately, then timed in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from autopar.errors import InfeasibleError
from benchmarks.common import Row, failed
from benchmarks.models import ModelSpec
from benchmarks.rivals import compiled
from benchmarks.rivals.checkpointing import chunked_loss, methods
from benchmarks.rivals.claims import AIMS, MIB, PEAKS, to_beat
from benchmarks.rivals.measuring import Measured, Variant, gradient_error, measure, time_ratios
from benchmarks.rivals.plans import METHOD, Compiled, Planner, least

TOLERANCE = 1e-4  # relative error of gradients in float32: the default of autopar.verify
PEAK_TOLERANCE = 0.01
ALL, ACTIVATIONS = "all", "activations"  # bytes that a budget counts
GRID = {ACTIVATIONS: 8, ALL: 4}  # number of budgets between the least and an ample one
Make = Callable[[], Variant]


@dataclass
class _Comparison:
    """One model with its variants so far, each with its row."""

    model: nn.Module
    batch: Mapping[str, Tensor]
    base: Row
    variants: list[Variant] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    places: dict[object, int] = field(default_factory=dict)
    plain: tuple[Measured, dict[str, Tensor]] | None = None

    def variant(self, method: str, forward: Callable[[], Tensor], **how: Any) -> Variant:
        """Return a variant that runs the model itself."""
        return Variant(
            method,
            dict(self.model.named_parameters()),
            [*self.model.buffers(), *self.batch.values()],
            forward,
            **how,
        )

    def eager_loss(self) -> Tensor:
        loss: Tensor = self.model(**self.batch)["loss"]
        return loss

    def rival(self, method: str, kind: str, make: Make) -> None:
        """Measure another method. The first one is eager, with which the others are compared."""
        row = {**self.base, "method": method, "kind": kind, "counts": None, "budget_bytes": None}
        try:
            self._measured(row, replace(make(), method=method))
        except Exception as error:  # the others are still measured
            self.rows.append({**row, **failed(error)})

    def plan(self, counts: str, budget: int, made: Compiled) -> Row:
        """Measure a plan under a budget in bytes, in addition to the resident ones."""
        row = {
            **self.base,
            "method": METHOD,
            "kind": METHOD,
            "counts": counts,
            "budget_bytes": budget,
        }
        measured = self._measured(row, made.variant, made.decisions)
        row = self.rows[-1]
        peak = (
            measured.activation_peak_bytes
            if counts == ACTIVATIONS
            else measured.peak_above_parameters_bytes
        )
        off = abs(made.predicted_peak_bytes - measured.peak_bytes) / measured.peak_bytes
        row |= {"predicted_peak_bytes": made.predicted_peak_bytes, "peak_rel_err": off}
        row |= {"num_recomputed": made.num_recomputed, "gap": made.gap}
        if peak > budget or off > PEAK_TOLERANCE:
            what = (
                f"the measured peak is {peak / budget - 1:+.1%} from the budget, the predicted one"
                f" {off:.1%} from the measured"
            )
            row |= {"ok": False, "error": what}
        return row

    def _measured(self, row: Row, variant: Variant, decisions: object = None) -> Measured:
        measured, gradients = measure(variant)
        self.plain = self.plain or (measured, gradients)
        error = gradient_error(gradients, self.plain[1])
        good = error <= TOLERANCE
        self.rows.append(
            {
                **row,
                "ok": good,
                "error": None if good else f"gradients are {error:.1e} from eager's",
                "peak_bytes": measured.peak_bytes,
                "peak_above_parameters_bytes": measured.peak_above_parameters_bytes,
                "activation_peak_bytes": measured.activation_peak_bytes,
                "end_of_forward_bytes": measured.end_of_forward_bytes,
                "flops": measured.flops,
                "extra_flops": measured.flops / self.plain[0].flops - 1,
                "gradient_error": error,
                "variant": self._place(variant, decisions),
            }
        )
        return measured

    def _place(self, variant: Variant, decisions: object) -> int:
        """Return the position of a variant among those to be timed. Equal plans share the position
        of the first."""
        if decisions is None or decisions not in self.places:
            self.variants.append(variant)
            self.places[decisions] = len(self.variants) - 1
        return self.places[decisions]

    def timed(self, rounds: int) -> list[Row]:
        """Return all rows, with the time ratios of the measured ones."""
        ratios = (
            time_ratios(self.variants, rounds) if rounds else [(None, None)] * len(self.variants)
        )
        found = []
        for row in self.rows:
            place = row.pop("variant", None)
            found.append(
                row
                if place is None
                else row | dict(zip(("wall_ratio", "cpu_ratio"), ratios[place], strict=True))
            )
        return found


def row(
    spec: dict[str, Any],
    mesh: str,
    batch: int,
    seq: int,
    hardware: str,
    rounds: int,
    inductor: bool,
) -> list[Row]:
    """Return all rows of one model."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    compiled.show_buffers()
    built = ModelSpec(**spec)
    model, data = built.build(batch=batch, seq=seq)
    if hasattr(model, "config"):
        model.config.use_cache = False
    told = _Comparison(model, data, {"model": built.name, "mesh": mesh, "batch": batch, "seq": seq})
    _rivals(told, inductor)
    _plans(told, Planner.of(model, data, hardware))
    return told.timed(rounds)


def _rivals(told: _Comparison, inductor: bool) -> None:
    around = methods(told.model)
    for name, patch in around.items():
        told.rival(name, "eager", partial(told.variant, name, told.eager_loss, around=patch))
    in_chunks = partial(chunked_loss, told.model, told.batch)
    for name, patch in (("eager", around["eager"]), ("ckpt_layer", around["ckpt_layer"])):
        method = "+".join(dict.fromkeys([name, "chunkedCE"])).removeprefix("eager+")
        told.rival(method, "chunked", partial(told.variant, method, in_chunks, around=patch))
    for share in compiled.BUDGETS:
        told.rival(
            f"aot b={share}", "graph", partial(_compiled, told, "aot_eager_decomp_partition", share)
        )
    why_not = compiled.why_not_inductor() if inductor else "not requested"
    for share in compiled.INDUCTOR_BUDGETS:
        if why_not:
            told.rows.append(
                {
                    **told.base,
                    "ok": True,
                    "error": None,
                    "method": f"inductor b={share}",
                    "kind": "fused",
                    "skipped": why_not,
                }
            )
        else:
            told.rival(f"inductor b={share}", "fused", partial(_compiled, told, "inductor", share))


def _compiled(told: _Comparison, backend: str, share: float) -> Variant:
    return told.variant(backend, compiled.compiled(told.model, told.batch, backend, share))


def _plans(told: _Comparison, planner: Planner) -> None:
    """Plan under each budget that another method needed, and under several between the least
    feasible and an ample one."""
    makers = {ACTIVATIONS: planner.activations_within, ALL: planner.within}
    rivals = [row for row in told.rows if "variant" in row]
    for counts, key in PEAKS.items():
        enough = 2 * max(row[key] for row in rivals)
        ample = told.plan(counts, enough, makers[counts](enough))[key]
        smallest = least(makers[counts], 0, ample + MIB)
        between = [
            smallest + (ample + MIB - smallest) * i // GRID[counts] for i in range(GRID[counts] + 1)
        ]
        aimed = [size * MIB for size in AIMS.get(told.base["model"], ()) if counts == ACTIVATIONS]
        wanted = {*between, *aimed, *(row[key] for row in to_beat(rivals, key))}
        for budget in sorted((b for b in wanted if smallest <= b <= ample + MIB), reverse=True):
            for made in _feasible_plan(makers[counts], budget):
                told.plan(counts, budget, made)


def _feasible_plan(make: Callable[[int], Compiled], budget: int) -> Iterator[Compiled]:
    """Yield the plan within a budget, if there is one. Feasibility is not quite monotonic in the
    budget (see the claims)."""
    try:
        yield make(budget)
    except InfeasibleError:
        return
