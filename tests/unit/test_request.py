"""Planning options: the budget, the recorded options, and invalid options."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.constraints import Constraint, fsdp, layout, megatron, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.errors import AutoparError, ConstraintError
from autopar.planner import PlanOptions

H100 = HardwareProfile.load("h100-sxm")


def test_the_budget_is_the_requested_one_or_ninety_percent_of_the_device_memory() -> None:
    assert PlanOptions(memory_bytes=123).budget(H100) == 123
    assert PlanOptions().budget(H100) == int(H100.device_memory_bytes * 0.9)


def test_the_plan_records_the_options_that_affect_it_without_the_time_limit() -> None:
    options = PlanOptions(
        memory_bytes=7,
        optimizer="sgd",
        constraints=(layout("up", weight="R"),),
        strict=True,
        gap=0.5,
        batch="local",
    )
    recorded = options.to_json(H100)
    assert (
        json.loads(json.dumps(recorded))
        == recorded
        == {
            "memory_bytes": 7,
            "optimizer": "sgd",
            "constraints": [{"pattern": "up", "weight": "R"}],
            "strict": True,
            "gap": 0.5,
            "num_microbatches": "auto",
            "loss_rows": "auto",
            "precision": None,
            "inference": False,
            "batch": "local",
            "outputs": "auto",
        }
    )
    assert options.of_a_trace().to_json(H100) == {**recorded, "outputs": "dtensor"}, (
        "outputs that are to be whole are so in the trace"
    )
    assert PlanOptions(outputs="full").of_a_trace() == PlanOptions(outputs="full")
    assert PlanOptions(time_limit_s=1.0).to_json(H100) == PlanOptions(time_limit_s=2.0).to_json(
        H100
    )


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"optimizer": "adamW"}, r"optimizer 'adamW' is not known(.|\n)*adamw, adam, sgd"),
        ({"memory_bytes": 0}, r"memory_bytes=0 is not a memory budget(.|\n)*bytes per device"),
        ({"memory_bytes": -5}, "memory_bytes=-5"),
        ({"gap": 1.0}, r"gap=1\.0 is not a relative gap(.|\n)*at least 0 and below 1"),
        ({"gap": -0.1}, r"gap=-0\.1"),
        ({"gap": float("nan")}, "gap=nan"),
        ({"gap": False}, "gap=False is not a relative gap"),
        ({"memory_bytes": True}, "memory_bytes=True is not a memory budget"),
        ({"memory_bytes": math.inf}, "memory_bytes=inf is not a memory budget"),
        ({"num_microbatches": True}, "num_microbatches=True is not a number of microbatches"),
        ({"strict": 1}, "strict=1 is neither True nor False"),
        ({"gap": "1 %"}, "gap=1 % is not a relative gap"),
        ({"time_limit_s": "60"}, "time_limit_s=60 is not a time limit"),
        ({"strict": "no"}, r"strict='no' is neither True nor False(.|\n)*pass True or False"),
        ({"inference": None}, "inference=None is neither True nor False"),
        ({"optimizer": ["sgd"]}, r"optimizer \['sgd'\] is not known"),
        (
            {"precision": torch.bfloat16},
            r"precision=torch\.bfloat16 is not known(.|\n)*bf16, fp16, or None",
        ),
        ({"constraints": layout("up", weight="R")}, "is not a sequence"),
        ({"solver": 3}, r"solver=3 is not the name of a solver(.|\n)*pass a name"),
        ({"constraints": ("up",)}, r"'up' is not a constraint(.|\n)*autopar\.constraints"),
        ({"constraints": [fsdp]}, r"fsdp is a function(.|\n)*call it: fsdp\(\.\.\.\)"),
        ({"memory_bytes": "80 apples"}, "'80 apples' is not a size"),
        ({"memory_bytes": "0GB"}, "memory_bytes=0 is not a memory budget"),
    ],
)
def test_an_invalid_option_is_refused_with_the_valid_values(
    option: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(AutoparError, match=complaint):
        PlanOptions(**option)


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), (8e9, 8 * 10**9), (None, None)],
)
def test_a_memory_budget_is_a_number_or_a_text(budget: Any, num_bytes: int | None) -> None:
    recorded = PlanOptions(memory_bytes=budget).memory_bytes
    assert recorded == num_bytes and type(recorded) is type(num_bytes)


@pytest.mark.parametrize(
    "asked",
    [pipeline("a", microbatches=2), megatron(pp=2, microbatches=2), megatron(microbatches=2)],
    ids=str,
)
def test_two_numbers_of_microbatches_are_refused_with_both_named(asked: Constraint) -> None:
    said = re.escape(f"{asked} and num_microbatches=4 request different numbers")
    with pytest.raises(ConstraintError, match=said + r"(.|\n)*the same number in both"):
        PlanOptions(num_microbatches=4, constraints=(layout("up", weight="R"), asked))
    for num in (2, "auto"):
        PlanOptions(num_microbatches=num, constraints=(asked,))
    PlanOptions(num_microbatches=4, constraints=(pipeline("a"), megatron(pp=2)))


def test_a_time_limit_applies_to_the_whole_planning() -> None:
    free = PlanOptions()
    assert (
        free.begun().solve_s == math.inf and not free.begun().is_late and not free.begun().is_over
    )
    given = PlanOptions(time_limit_s=1000.0)
    assert given.solve_s == 1000.0, "nothing has begun"
    begun = given.begun()
    assert begun == given and begun.begun() is begun
    assert 0.0 < begun.solve_s <= 750.0, "the rest is for what comes behind"
    late = replace(begun, ends=time.monotonic() + 100.0)
    assert late.is_late and late.solve_s == 0.0 and not late.is_over
    assert replace(late, ends=time.monotonic() - 1.0).is_over
    with pytest.raises(AutoparError, match="time_limit_s=0 is not a time limit"):
        PlanOptions(time_limit_s=0)
