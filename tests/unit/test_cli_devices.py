"""The command line states nodes, dtypes and constraints, so that figures cannot be misread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar import api
from autopar.core.units import seconds
from autopar.errors import PlanError
from autopar.plans import Plan
from tests.unit.test_cli import Command, command, here

__all__ = ["command", "here"]  # fixtures
SMALL = ("plan", "--hardware", "h100-sxm", "--module", "model.py:small")
TINY = 'gpt2:{"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 64, "n_positions": 16}'


def test_a_plan_states_its_number_of_nodes_if_the_axes_do_not(here: Path, command: Command) -> None:
    two, one, named = (
        command(*SMALL, "--mesh", mesh, *more)[1]
        for mesh, *more in (
            ("data=2,tensor=2",),
            ("data=2,tensor=2", "--devices-per-node", "4"),
            ("node=2,gpu=2",),
        )
    )
    assert (
        "(4 devices, 2 nodes of 2)" in two
        and "(4 devices, one node)" in one
        and "(4 devices)," in named
    )


def test_axes_within_one_node_are_priced_with_intra_node_links(
    here: Path, command: Command
) -> None:
    forced = ("--mesh", "data=2,tensor=2", "--constraint", "fsdp")
    assert command(*SMALL, *forced, "--out", "far.json")[0] == 0
    assert command(*SMALL, *forced, "--devices-per-node", "4", "--out", "near.json")[0] == 0
    far, near = (Plan.load(f"{name}.json") for name in ("far", "near"))
    assert (
        near.mesh.devices_per_node == 4
        and near.prediction.communication_s < far.prediction.communication_s
    )
    there = ("--mesh", "data=2,tensor=2", "--devices-per-node", "4")
    code, said, complaint = command("what-if", "far.json", "--module", "model.py:small", *there)
    assert code == 0, complaint
    assert (
        f"the plan takes {seconds(near.prediction.step_s)} per step there"
        f" ({seconds(far.prediction.step_s)} on" in said
    )


def test_devices_per_node_must_divide_the_devices_and_be_given_once(
    here: Path, command: Command
) -> None:
    uneven = "is not a multiple of 3"
    for mesh, complaint in (
        ("data=2,tensor=2", uneven),
        ("4", uneven),
        ("1x4", "already specifies the number of devices per node"),
    ):
        code, _, said = command(*SMALL, "--mesh", mesh, "--devices-per-node", "3")
        assert code == 1 and complaint in said
    assert command(*SMALL, "--mesh", "4", "--devices-per-node", "2", "--out", "p.json")[0] == 0
    assert Plan.load("p.json").mesh.devices_per_node == 2


@pytest.mark.slow
def test_with_a_precision_parameters_are_stored_in_fp32_for_every_command(
    here: Path, command: Command
) -> None:
    model = ("--hf", TINY, "--batch", "4", "--seq", "8")
    planned = (
        "plan",
        "--mesh",
        "node=2,gpu=2",
        "--hardware",
        "cpu-gloo",
        "--constraint",
        "ddp",
        *model,
    )
    for name, more in (
        ("wide", ("--precision", "bf16")),
        ("narrow", ()),
        ("asked", ("--precision", "bf16", "--dtype", "bfloat16")),
    ):
        code, _, complaint = command(*planned, *more, "--out", f"{name}.json")
        assert code == 0, complaint
    resting = {
        name: Plan.load(f"{name}.json").prediction.memory_bytes["parameters"]
        for name in ("wide", "narrow", "asked")
    }
    assert resting["wide"] == 2 * resting["narrow"] == 2 * resting["asked"]
    for name, says in (
        ("check", "certified"),
        ("verify", "equal to the plain model"),
        ("what-if", "regret"),
    ):
        code, said, complaint = command(name, "wide.json", *model)
        assert code == 0 and says in said, complaint


def test_what_if_names_the_constraints_that_both_plans_obey(here: Path, command: Command) -> None:
    assert command(*SMALL, "--mesh", "4", "--out", "free.json")[0] == 0
    assert (
        command(
            *SMALL, "--mesh", "node=2,gpu=2", "--constraint", "ddp('node')", "--out", "forced.json"
        )[0]
        == 0
    )
    asked = ("--hardware", "a100-sxm-80gb", "--module", "model.py:small")
    assert "forced as well" not in command("what-if", "free.json", *asked)[1]
    assert (
        "the plan made for a100-sxm-80gb, ddp(axes=['node']) forced as well, takes"
        in command("what-if", "forced.json", *asked)[1]
    )


@pytest.mark.slow
def test_what_if_removes_and_adds_constraints_with_the_syntax_of_plan(
    here: Path, command: Command
) -> None:
    asked = ("--module", "model.py:small")
    forced = (
        "--mesh",
        "node=2,gpu=2",
        "--constraint",
        "ddp('node')",
        "--constraint",
        "tensor_parallel('1d', axes='gpu')",
    )
    assert command(*SMALL, *forced, "--out", "forced.json")[0] == 0
    assert command(*SMALL, "--mesh", "node=2,gpu=2", "--out", "free.json")[0] == 0
    forced_s, free_s = (
        seconds(Plan.load(name).prediction.step_s) for name in ("forced.json", "free.json")
    )
    _, said, complaint = command(
        "what-if",
        "forced.json",
        *asked,
        "--without",
        "ddp",
        "--without",
        "tensor_parallel('1d', axes='gpu')",
    )
    assert (
        "evaluated on h100-sxm without ddp(axes=['node']) and tensor_parallel('1d', axes=['gpu'])"
        in said
    ), complaint
    assert (
        f"the plan takes {forced_s} per step there" in said
        and f"the plan made for h100-sxm, nothing forced, takes {free_s} " in said
    )
    _, said, complaint = command(
        "what-if", "forced.json", *asked, "--without", "ddp", "--constraint", "fsdp('node')"
    )
    assert "evaluated on h100-sxm without ddp(axes=['node']), with fsdp(axes=['node'])" in said, (
        complaint
    )
    assert (
        "h100-sxm, tensor_parallel('1d', axes=['gpu']), fsdp(axes=['node']) forced, takes" in said
    )
    for more, complains in (
        (("--without", "fsdp"), "the plan has no constraint fsdp"),
        (("--without", "ddp('gpu')"), "the plan has no constraint ddp(axes=['gpu'])"),
        (("--without", "ddp("), "is not a constraint"),
        (("--constraint", "ddp('node')"), "the plan already has the constraint ddp(axes=['node'])"),
    ):
        code, _, complaint = command("what-if", "forced.json", *asked, *more)
        assert code == 1 and complains in complaint
    assert (
        "one of its constraints: ddp(axes=['node']), tensor_parallel("
        in command("what-if", "forced.json", *asked, "--without", "fsdp")[2]
    )
    assert (
        "the plan has no constraints"
        in command("what-if", "free.json", *asked, "--without", "fsdp")[2]
    )


def test_diff_compares_the_simulated_steps(here: Path, command: Command) -> None:
    for name in ("ddp", "fsdp"):
        assert (
            command(
                *SMALL, "--mesh", "node=2,gpu=2", "--constraint", name, "--out", f"{name}.json"
            )[0]
            == 0
        )
    a, b = (Plan.load(f"{name}.json").prediction.simulated_s for name in ("ddp", "fsdp"))
    said = command("diff", "ddp.json", "fsdp.json")[1]
    assert (
        a != b
        and "simulated as emitted" in said
        and f"{(b - a) / a * 100:+.1f}".replace("-", "−") in said
    )


def test_explain_says_if_constraints_leave_no_choice(here: Path, command: Command) -> None:
    forced = ("--mesh", "node=2,gpu=2", "--constraint", "megatron(tp=2, dp=2)", "--out", "p.json")
    assert command(*SMALL, *forced)[0] == 0
    assert "the constraints leave no choice" in command("explain", "p.json")[1]


def test_a_script_without_a_launcher_is_refused_with_the_command() -> None:
    """A plan for several devices is refused in one process."""
    model, batch = torch.nn.Linear(4, 4), (torch.randn(8, 4),)
    plan = api.plan(model, {"node": 2, "gpu": 2}, example_inputs=batch, hardware="cpu-gloo")
    with pytest.raises(PlanError, match="autopar run -n 4 SCRIPT"):
        api.compile(model, example_inputs=batch, plan=plan)
