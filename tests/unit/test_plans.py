"""A plan's file: damaged ones are refused as such, whatever is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from made_plan import made_plan

from autopar.errors import PlanError
from autopar.plans import Plan

Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, Damage] = {
    "a field is missing": lambda d: d["entries"][0].pop("kind"),
    "a name is a number": lambda d: d["entries"][0]["nodes"][0].update(node=7),
    "a layout is no layout": lambda d: d["entries"][0]["nodes"][0]["strategy"].update(outputs=["S(0) Q"]),
    "an instance lacks its index": lambda d: next(e for e in d["entries"] if e["instances"][0])["instances"].append([]),
    "a phase is a list": lambda d: d["communications"][0].update(phase=["forward"]),
    "a result is a table": lambda d: d["kept"][0].update(result={}),
    "a mesh axis has no size": lambda d: d["mesh"].clear(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_refused_as_a_malformed_plan_and_named(damage: Damage) -> None:
    data = json.loads(made_plan().dumps())
    assert Plan.loads(json.dumps(data)) == made_plan()
    damage(data)
    with pytest.raises(PlanError, match=r"plan is malformed(.|\n)*where: some\.json(.|\n)*plan again"):
        Plan.loads(json.dumps(data), "some.json")
