"""Plan files: they round-trip, and damaged files, files of other versions and plans for other
models are refused with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed import with_options
from made_plan import made_plan
from mlp import traced

from autopar.api.plan_options import _first, check_fits
from autopar.certificate.marks import identity
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import PlanError
from autopar.planner import PlanOptions, make_plan
from autopar.plans import FORMAT, VERSION, Plan
from benchmarks.faults.damage import places

Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a field is missing": (lambda d: d["entries"][0].pop("kind"), "kind"),
    "a field is not known": (lambda d: d["proof"].update(certainty=1), "certainty"),
    "a name is a number": (
        lambda d: d["entries"][0]["nodes"][0].update(node=7),
        r"entries\[0\]\.nodes\[0\]\.node must be a text, not 7",
    ),
    "a layout is no layout": (
        lambda d: d["entries"][0]["nodes"][0]["strategy"].update(outputs=["S(0) Q"]),
        "cannot read 'Q'",
    ),
    "an instance lacks its index": (
        lambda d: next(e for e in d["entries"] if e["instances"][0])["instances"].append([]),
        r"does not match the indices \(\)",
    ),
    "an instance has an index too many": (
        lambda d: d["kept"][0]["instances"][0].append(7),
        r"does not match the indices \(.*7\)",
    ),
    "a dtype that there is not": (
        lambda d: d["communications"][0]["collective"].update(dtype="float32x"),
        "a collective has the unknown dtype 'float32x'",
    ),
    "a balance beyond its range": (
        lambda d: d["proof"].update(balance=[1.0, 1.5]),
        r"its proof's balance is \(1.0, 1.5\)",
    ),
    "a phase is a list": (
        lambda d: d["communications"][0].update(phase=["forward"]),
        r"communications\[0\]\.phase must be a text, not \['forward'\]",
    ),
    "a result is a table": (
        lambda d: d["kept"][0].update(result={}),
        r"kept\[0\]\.result must be an integer, not \{\}",
    ),
    "a mesh has no axes": (lambda d: d["mesh"].clear(), "axes"),
    "a time is a word": (
        lambda d: d["prediction"].update(step_s="long"),
        r"prediction\.step_s must be a number, not 'long'",
    ),
    "a size is true": (
        lambda d: d["kept"][0].update(bytes=True),
        r"kept\[0\]\.bytes must be an integer, not True",
    ),
    "a collective is unknown": (
        lambda d: d["communications"][1]["collective"].update(kind="gossip"),
        r"kind must be one of .*'all_gather'.*, not 'gossip'",
    ),
    "a size by kind is no number": (
        lambda d: d["prediction"]["memory_bytes"].update(inputs="x"),
        r"memory_bytes\['inputs'\] must be an integer, not 'x'",
    ),
    "a bar of the time line is short": (
        lambda d: d["prediction"]["timeline"][0].pop(),
        r"timeline\[0\] must have 5 values",
    ),
    "an axis is none of the mesh": (
        lambda d: d["communications"][0]["collective"].update(axis=2),
        "axis 2, but mesh node=2,gpu=4 has 2 axes",
    ),
    "a layout is of another mesh": (
        lambda d: d["kept"][0].update(layouts=["R"]),
        "'R' has 1 placements, but mesh node=2,gpu=4 has 2 axes",
    ),
    "a key is none": (lambda d: d["kept"][0].update(node="up"), "'up' is not a node key"),
    "a decision is about nothing": (lambda d: d["entries"][2].update(nodes=[]), "has no nodes"),
    "there are no decisions": (lambda d: d.update(entries=[]), "no decisions"),
    "options are no table": (lambda d: d.update(options=[]), "options must be an object"),
    "room is not in order": (
        lambda d: d["overlap"].update(backward_room=[[7, 10], [3, 20]]),
        "its room for early collectives is",
    ),
    "room is less than none": (
        lambda d: d["overlap"].update(forward_room=[[0, -1]]),
        "its room for early collectives is",
    ),
    "room is of no place": (
        lambda d: d["overlap"].update(forward_room=[[1]]),
        r"overlap.forward_room\[0\] must have 2 values, not \[1\]",
    ),
    "a layout is not as it is written": (
        lambda d: d["entries"][2]["nodes"][0]["strategy"].update(outputs=["R  R"]),
        r"nodes\[0\].strategy.outputs\[0\] is 'R  R', which must be written 'R R'",
    ),
    "a number is a truth value": (
        lambda d: d["entries"][2].update(time_s=True),
        r"entries\[2\].time_s must be a number, not True",
    ),
    "the gap is missing": (lambda d: d["proof"].pop("gap"), "proof.gap is missing"),
    "a word is none of several": (
        lambda d: d["communications"][0].update(slack="some"),
        r"communications\[0\].slack must be one of 'critical', .*, not 'some'",
    ),
    "a phase is none": (
        lambda d: d["communications"][0].update(phase="R"),
        "has the unknown phase 'R'",
    ),
    "a decision is of no phase": (
        lambda d: d["entries"][2].update(phase="later"),
        "has the unknown phase 'later'",
    ),
    "it has a field more": (
        lambda d: d.update(bucket=d["buckets"]),
        "it has the unknown field 'bucket'",
    ),
    "a node has a field more": (
        lambda d: d["entries"][2]["nodes"][0].update(x=1),
        r"entries\[2\].nodes\[0\] has the unknown field 'x'",
    ),
    "a mapping for a list": (lambda d: d.update(starts=[]), r"starts must be an object, not \[\]"),
    "an object for a list": (
        lambda d: d["proof"].update(versions={}),
        r"proof.versions must be a list, not \{\}",
    ),
    "a text for a list": (
        lambda d: d["proof"].update(covers="all"),
        "proof.covers must be a list, not 'all'",
    ),
    "a number for a text": (lambda d: d.update(capture=7), "capture must be a text, not 7"),
    "the budget is a word": (
        lambda d: d["options"].update(memory_bytes="80 GiB"),
        r"options.memory_bytes must be an integer, not '80 GiB'",
    ),
}


@pytest.mark.parametrize(("damage", "complaint"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_refused_as_a_malformed_plan_with_the_reason(
    damage: Damage, complaint: str
) -> None:
    data = json.loads(made_plan().dumps())
    assert Plan.loads(json.dumps(data)) == made_plan()
    damage(data)
    with pytest.raises(
        PlanError,
        match=rf"plan is malformed: .*{complaint}(.|\n)*where: some\.json(.|\n)*plan again",
    ):
        Plan.loads(json.dumps(data), "some.json")


@pytest.mark.slow
def test_a_change_of_any_single_value_gives_a_valid_plan_or_an_error() -> None:
    data = json.loads(made_plan().dumps())
    num_refused = num_read = 0
    for path in list(places(data)):
        part = data
        for key in path[:-1]:
            part = part[key]
        there = part[path[-1]]
        for other in (None, "x", 7, []):
            part[path[-1]] = other
            text = json.dumps(data)
            part[path[-1]] = there
            try:
                plan = Plan.loads(text)
            except PlanError:
                num_refused += 1
                continue
            num_read += 1
            assert Plan.loads(plan.dumps()) == plan
            assert plan.hash
    assert num_refused > 4 * num_read > 0


def _with_budget(number: str) -> str:
    """Write the plan with another budget, which may be invalid JSON."""
    data = json.loads(made_plan().dumps())
    data["options"]["memory_bytes"] = "here"
    return json.dumps(data).replace('"here"', number)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "plan is not JSON"),
        ("{", "plan is not JSON"),
        ("[1, 2]", "not an autopar plan"),
        ('"plan"', "not an autopar plan"),
        ("{}", "not an autopar plan"),
        ('{"format": "autopar-hardware", "version": 1}', "not an autopar plan"),
        (
            json.dumps({"format": FORMAT}),
            f"plan version None is not supported; this autopar reads version {VERSION}",
        ),
        (
            json.dumps({"format": FORMAT, "version": VERSION + 1}),
            f"plan version {VERSION + 1} is not supported; this autopar reads version {VERSION}",
        ),
        (json.dumps({"format": FORMAT, "version": VERSION}), "plan is malformed"),
        (made_plan().dumps()[:-200], "plan is not JSON"),
        ("[" * 200_000, "nested more than 100 levels deep: line 1"),
        (
            _with_budget('{"x": ' * 900 + "1" + "}" * 900),
            "nested more than 100 levels deep: line 1",
        ),
        (_with_budget("9" * 400), "integer 999999999999… with 400 digits has more than 64 bits"),
        (_with_budget("9" * 5000), "integer 999999999999… with 5000 digits has more than 64 bits"),
        (_with_budget("1e400"), "number 1e400 is too large"),
        (
            made_plan().dumps().replace('"capture"', '"format": "x", "capture"', 1),
            "the key 'format' occurs twice",
        ),
        (_with_budget('"\\u001b[31mred"'), r"contains the control character '\\x1b'"),
        (_with_budget("NaN"), "NaN is not a JSON number"),
        (_with_budget("-Infinity"), "-Infinity is not a JSON number"),
    ],
)
def test_a_plan_of_another_version_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=rf"{complaint}(.|\n)*plan\.json"):
        Plan.load(file)


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan '.*none\.json': No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"cannot read plan .* directory"):
        Plan.load(tmp_path)
    (tmp_path / "weights.bin").write_bytes(bytes(range(128, 256)))
    with pytest.raises(
        PlanError, match=r"cannot read plan '.*weights\.bin': it is not a text file"
    ):
        Plan.load(tmp_path / "weights.bin")


def test_a_plan_round_trips_and_its_file_is_deterministic(
    tmp_path: Path,
) -> None:
    plan = made_plan()
    plan.save(tmp_path / "a.json")
    Plan.load(tmp_path / "a.json").save(tmp_path / "b.json")
    assert Plan.load(tmp_path / "b.json") == plan
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert Plan.load(tmp_path / "b.json").hash == plan.hash


def test_different_plans_have_different_hashes() -> None:
    plan = made_plan()
    kept = (replace(plan.kept[0], layouts=(Layout.parse("R R"),)), *plan.kept[1:])
    others = [made_plan(recompute=False), with_options(plan, strict=True), replace(plan, kept=kept)]
    assert len({plan.hash, *(other.hash for other in others)}) == 4
    assert with_options(plan, strict=True).options["optimizer"] == "adamw"


def test_choices_kept_layouts_and_steps_apply_to_every_instance() -> None:
    plan = made_plan(recompute=True)
    choices, again = plan.node_choices(), plan.recomputed_choices()
    ups = [key for key in choices if ".up/dot/forward/0" in key]
    assert len(ups) == 3 and len({choices[key] for key in ups}) == 1
    assert set(ups) <= set(again) and len(again) < len(choices)
    copies = [
        k
        for k, layouts in plan.kept_layouts().items()
        if ".up.weight" in k[0] and list(map(str, layouts)) == ["R S(1)"]
    ]
    assert sorted(key.split(".")[2] for key, _ in copies) == ["0", "1", "2"]
    assert len(plan.steps()) == sum(len(c.instances) for c in plan.communications)


# Plans for other models, meshes and options


def planned(width: int = 8, batch: int = 8, num_layers: int = 2) -> Plan:
    trace = traced(width, 16, batch, num_layers=num_layers, dtype=torch.float32)
    return make_plan(trace, Mesh(2), HardwareProfile.load("cpu-gloo"), PlanOptions()).plan


def test_a_plan_for_another_model_is_refused_with_the_exact_difference() -> None:
    trace, mesh = traced(8, 16, 8, num_layers=2, dtype=torch.float32), Mesh(2)
    check_fits(planned(), trace, mesh)
    with pytest.raises(
        PlanError, match=r"2 parameters in the plan, not in the model: layers\.2\.down\.weight, lay"
    ):
        check_fits(planned(num_layers=3), trace, mesh)
    with pytest.raises(
        PlanError, match=r"2 parameters in the model, not in the plan: layers\.1\.down\.weight, lay"
    ):
        check_fits(planned(num_layers=1), trace, mesh)
    for other, shape in ((planned(width=4), r"\[8, 4\]"), (planned(batch=4), r"\[4, 8\]")):
        with pytest.raises(
            PlanError,
            match=rf"another batch: x is float32 {shape} in the plan and float32 \[8, 8\] in",
        ):
            check_fits(other, trace, mesh)
        assert Plan.loads(other.dumps()) == other and other.fingerprint.inputs
        (found,) = identity(trace, other, HardwareProfile.load("cpu-gloo"))
        assert "another batch: x is float32" in found.what
    same = planned()
    unnamed = replace(same, fingerprint=replace(same.fingerprint, model="another"))
    with pytest.raises(
        PlanError, match="names agree, but shapes, dtypes or arguments of ops differ"
    ):
        check_fits(unnamed, trace, mesh)
    named = replace(
        same, fingerprint=replace(same.fingerprint, model="another", model_name="GPT2LMHeadModel")
    )
    with pytest.raises(
        PlanError,
        match="model: the plan is for GPT2LMHeadModel, but the model is LlamaForCausalLM\n",
    ):
        check_fits(named, trace, mesh, "LlamaForCausalLM")
    with pytest.raises(PlanError, match="does not fit this call:\n    model: the names agree"):
        check_fits(named, trace, mesh, "GPT2LMHeadModel")
    older = json.loads(same.dumps())
    del older["fingerprint"]["inputs"]
    assert Plan.loads(json.dumps(older)).fingerprint.other_batch(trace.batch_in_words) == ""
    biased = traced(8, 16, 8, num_layers=2, bias=True, dtype=torch.float32)
    with pytest.raises(PlanError) as refused:
        check_fits(planned(batch=4), biased, Mesh(4))
    first, on_mesh, batch, parameters, ops, *_, last = str(refused.value).splitlines()
    assert first == "the plan does not fit this call:" and last.startswith(
        "  what to do: plan again"
    )
    assert on_mesh == "    mesh: the plan is for gpu=2, but the mesh is gpu=4" and batch.startswith(
        "    the plan is for another batch: x is "
    )
    assert (
        parameters
        == "    4 parameters in the model, not in the plan: layers.*.down.bias (2 times),"
        " layers.*.up.bias (2 times)"
    )
    assert re.match(r"    \d+ ops in the .*: .*layers\.\*\.\S+ \(2 times\)", ops)


def test_of_many_differences_the_first_are_named_and_the_others_counted() -> None:
    names = {
        f"layers.{i}.{name}"
        for i in range(4)
        for name in ("up.weight", "down.weight", "up.bias", "down.bias")
    } | {"head.weight"}
    assert (
        _first(names)
        == "head.weight, layers.*.down.bias (4 times), layers.*.down.weight (4 times) and 8"
        " more"
    )
    assert (
        _first({"0.weight", "2.weight"}) == "*.weight (2 times)"
        and _first({"up2/dot/forward/0"}) == "up2/dot/forward/0"
    )


@pytest.mark.parametrize("mesh", [Mesh(4), Mesh({"data": 2}), Mesh({"gpu": 2, "node": 1})])
def test_a_plan_for_another_mesh_is_refused_with_its_mesh(mesh: Mesh) -> None:
    trace = traced(8, 16, 8, num_layers=2, dtype=torch.float32)
    with pytest.raises(
        PlanError, match=f"mesh: the plan is for gpu=2, but the mesh is {mesh}(.|\n)*plan again"
    ):
        check_fits(planned(), trace, mesh)
