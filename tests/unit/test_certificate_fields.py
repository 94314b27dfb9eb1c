"""Every field of a plan has an entry in the table of what `check` verifies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

import autopar
from autopar.certificate import report as table
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.errors import PlanError
from autopar.planner import PlanOptions
from autopar.plans import OPTIONS, Plan
from autopar.request import Batch, Outputs

LEAVES = (Layout,)  # stored as one string


def paths(hint: Any, path: str = "") -> Iterator[str]:
    """Return the path of every leaf of a typed structure, without nested plans."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        for arg in args:
            if arg is not NoneType:
                yield from paths(arg, path)
    elif origin is tuple:
        for arg in (arg for arg in args if arg is not ...):
            yield from paths(arg, path)
    elif path and hint is Plan:
        return
    elif is_dataclass(hint) and hint not in LEAVES:
        hints = get_type_hints(hint)
        for field in fields(hint):
            yield from paths(hints[field.name], f"{path}.{field.name}".lstrip("."))
    elif path == "options":
        yield from (f"options.{name}" for name in OPTIONS)
    else:
        assert origin in (None, Literal) or issubclass(origin, Mapping), f"{path}: {hint}"
        yield path


def test_every_field_of_a_plan_has_exactly_one_entry_in_the_table() -> None:
    entries = (*table.DERIVED, *table.COMPARED, *table.UNVERIFIED)
    assert len(entries) == len(set(entries))
    leaves = set(paths(Plan))
    for leaf in leaves:
        found = [entry for entry in entries if leaf == entry or leaf.startswith(f"{entry}.")]
        assert len(found) == 1, f"{leaf} has {found}: add it to autopar/certificate/report.py"
    stale = [e for e in entries if not any(f"{leaf}.".startswith(f"{e}.") for leaf in leaves)]
    assert not stale


def test_a_plan_records_exactly_the_options_that_the_planner_writes() -> None:
    written = PlanOptions().to_json(HardwareProfile.load("cpu-gloo"))
    assert set(written) == set(OPTIONS)
    assert get_args(OPTIONS["batch"]) == get_args(Batch)
    assert get_args(OPTIONS["outputs"]) == get_args(Outputs)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_recorded_option_of_another_type_is_refused(name: str) -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(2, 4),)
    plan = autopar.plan(model, 1, example_inputs=batch, hardware="cpu-gloo")
    text = replace(plan, options={**plan.options, name: {"no": "option"}}).dumps()
    with pytest.raises(PlanError, match=f"options.{name} must be"):
        Plan.loads(text)
    if name in ("num_microbatches", "loss_rows"):
        for wrong in (True, 2.5, "many", None, [1]):
            text = replace(plan, options={**plan.options, name: wrong}).dumps()
            with pytest.raises(PlanError, match=f"options.{name} must be an integer or 'auto'"):
                Plan.loads(text)
    with pytest.raises(PlanError, match="option 'unknown' is unknown"):
        Plan.loads(replace(plan, options={**plan.options, "unknown": 1}).dumps())


def test_the_certificate_lists_the_fields_that_it_does_not_verify() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(2, 4),)
    plan = autopar.plan(model, 1, example_inputs=batch, hardware="cpu-gloo")
    certificate = autopar.check(plan, model, batch)
    assert certificate.ok, str(certificate)
    assert not certificate.vouches_for(("proof", "solver"))
    assert not certificate.vouches_for(("pipeline", "stages", 3, "proof", "solver"))
    assert certificate.vouches_for(("prediction", "step_s"))
    assert certificate.vouches_for(("entries",))
    listed = [path for group in certificate.to_json()["unverified"] for path in group["fields"]]
    assert listed and set(listed) <= set(table.UNVERIFIED)
    assert all(path in str(certificate) for path in listed)
    assert "alone_s" not in listed  # this plan has none
