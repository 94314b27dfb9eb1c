"""Faults planted in execution: the order of a step, random numbers, calls of a rank, and kernels.

Validation runs the order of a step on symbols, draws few numbers, and tries each op on small
shards. `verify`, which runs all ranks, finds the remaining faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from planted_faults import Fault, Patch, refused_by_validation, sound
from planted_subjects import SUBJECTS

from autopar.errors import VerificationError
from autopar.kernels import collectives, packing
from autopar.kernels import packing as bucketed
from autopar.ops import random, vocabulary
from autopar.program import schedule, stage_work
from autopar.program.program import Count, Microbatches
from autopar.program.stage_work import StageWork
from autopar.rules import localization

_bits = random._bits
_begin, _arriving, _leaving = (
    StageWork.begin,
    StageWork.arriving_gradients,
    StageWork.leaving_outputs,
)


def bits_of(change: Callable[..., tuple[Any, ...]]) -> Callable[[Patch], Any]:
    """Draw random bits with changed arguments: state, shape, draw, window or stream."""

    def bits(state: Any, shape: Any, draw: Any, window: Any, stream: int = 0) -> Any:
        return _bits(*change(state, shape, draw, window, stream))

    return lambda patch: patch.setattr(random, "_bits", bits)


def first_part(
    self: StageWork,
    wanted: Any,
    parameters: Any,
    buffers: Any,
    parts: Any,
    weight: float,
    *,
    keep: bool,
) -> None:
    _begin(self, wanted, parameters, buffers, [parts[0]] * len(parts), weight, keep=keep)


ORDER = {
    "each microbatch's gradient is written over the sum": Fault(
        "sums",
        "stage 0 at microbatch 1 of 2: backward writes over sums",
        plant=lambda p: p.setattr(
            StageWork, "_added", property(lambda _: False, lambda *_: None), raising=False
        ),
    ),
    "the first gradient is added to what was there": Fault(
        "sums",
        "backward adds to sums of 0 microbatches",
        plant=lambda p: p.setattr(
            StageWork, "_added", property(lambda _: True, lambda *_: None), raising=False
        ),
    ),
    "every microbatch is the first": Fault(
        "stages",
        "at microbatch 1 of 2: forward reads",
        plant=lambda p: p.setattr(StageWork, "begin", first_part),
    ),
    "gradients are received in another order": Fault(
        "stages",
        "backward reads .*, expected",
        plant=lambda p: p.setattr(
            StageWork, "arriving_gradients", lambda self, number: _arriving(self, number)[::-1]
        ),
    ),
    "a stage sends one tensor twice": Fault(
        "stages",
        "forward reads .*, expected",
        plant=lambda p: p.setattr(
            StageWork, "leaving_outputs", lambda self, number: _leaving(self, number)[:1] * 2
        ),
    ),
    "a stage sends less": Fault(
        "stages",
        "it receives 1 tensors, expected 2",
        plant=lambda p: p.setattr(
            StageWork, "leaving_outputs", lambda self, number: _leaving(self, number)[:1]
        ),
    ),
    "a loss weighs nothing": Fault(
        "stages",
        "the weight of the loss is 0.0, expected 0.5",
        plant=lambda p: p.setattr(
            stage_work.torch, "full", lambda shape, *_, **how: torch.zeros(shape, **how)
        ),
    ),
    "backward comes before its forward": Fault(
        "stages",
        "ranks wait for each other",
        plant=lambda p: p.setattr(schedule, "_ahead", lambda *_: 0),
    ),
    "a microbatch is left out": Fault(
        "stages",
        "forward runs 0 times",
        plant=lambda p: p.setattr(schedule, "_one_stage", lambda *a: ()),
    ),
}

DRAWS = {
    "all draws of a step are one": Fault(
        "dropout",
        "draw 0 of step 0 and draw 1 of step 0 are correlated",
        plant=bits_of(lambda s, n, d, w, t: (s, n, 0, w, t)),
    ),
    "all steps draw alike": Fault(
        "dropout",
        "step 0 and .* step 1 are correlated",
        plant=bits_of(lambda s, n, d, w, t: (s * 0, n, d, w, t)),
    ),
    "a step's second draw is the next step's first": Fault(
        "dropout", "correlated", plant=bits_of(lambda s, n, d, w, t: (s + d, n, 0, w, t))
    ),
    "all ranks draw alike": Fault(
        "dropout",
        "does not match the full tensor",
        plant=bits_of(lambda s, n, d, w, t: (s, n, d, None, t)),
    ),
    "rows draw alike": Fault(
        "dropout",
        "random numbers of keep_mask: draw 0 of step 0",
        plant=lambda p: p.setattr(random, "_bits", lambda *a: _bits(*a)[:1].repeat(a[1][0], 1)),
    ),
    "too much is kept": Fault(
        "dropout",
        "has mean",
        plant=lambda p: p.setattr(random, "_bits", lambda *a: _bits(*a).abs_()),
    ),
}

CALLS = {
    "a mean over what a rank has": Fault(
        "split",
        "mean/forward/0 .* is not justified",
        plant=lambda p: p.setattr(
            localization,
            "mean_part",
            lambda x, dims, keepdim, count, dtype: torch.mean(x, dims, keepdim, dtype=dtype),
        ),
        anew=True,
    ),
}

JUDGED = {**ORDER, **DRAWS, **CALLS}


@pytest.mark.parametrize("name", JUDGED)
def test_a_planted_fault_at_run_time_is_refused_by_validation(
    name: str, monkeypatch: Patch
) -> None:
    refused_by_validation(JUDGED[name], monkeypatch)


@dataclass(frozen=True)
class Run:
    """A fault in the run of a subject that only numbers reveal."""

    subject: str
    plant: Callable[[Patch], Any]


def only_first(self: Microbatches, inputs: Any) -> list[dict[str, Any]]:
    return [_split(self, inputs)[0]] * self.num


_split, _of, _join = Microbatches.split, Count.of, Microbatches.join
RUNS = {
    "sums are written over by the function that adds to them": Run(
        "sums", lambda p: p.setattr(collectives.add_to, "__code__", collectives.write_to.__code__)
    ),
    "every microbatch is the first one": Run(
        "sums", lambda p: p.setattr(Microbatches, "split", only_first)
    ),
    "what is counted is one microbatch's": Run(
        "counts",
        lambda p: p.setattr(
            Count, "of", lambda self, parts, buffers: _of(self, parts[:1], buffers)
        ),
    ),
    "losses are not averaged": Run(
        "sums",
        lambda p: p.setattr(
            Microbatches, "join", lambda self, path, parts: _join(self, path, parts) * self.num
        ),
    ),
    "rows of a table begin elsewhere": Run(
        "vocabulary",
        lambda p: p.setattr(
            vocabulary, "_local_index", lambda index, start, size: (index % size, index >= 0)
        ),
    ),
    "a bucket is packed in another order": Run(
        "split",
        lambda p: p.setattr(
            bucketed, "unpack_op", lambda bucket, *a: packing.unpack_op(bucket.flip(-1), *a)
        ),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_planted_fault_at_run_time_is_detected_by_verify(name: str, monkeypatch: Patch) -> None:
    fault = RUNS[name]
    subject = SUBJECTS[fault.subject]
    sound(fault.subject)
    with monkeypatch.context() as patch:
        fault.plant(patch)
        with pytest.raises(VerificationError):
            subject.verify(subject.emit())
