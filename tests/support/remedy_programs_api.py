"""Programs for the remedies of arguments: meshes, hardware, options, and damaged plan files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar import HardwareProfile, Mesh, Plan
from autopar.api.arguments import as_call, as_mesh, check_model
from autopar.api.mesh_search import shapes
from autopar.api.tracing import microbatch_of, refuse_wrapped
from autopar.api.what_if import change_options
from autopar.checkpoint.manager import Checkpoints
from autopar.constraints import fsdp, pipeline
from autopar.core.layout import Layout
from autopar.core.mesh import hardware_of, read_mesh
from autopar.request import PlanOptions, as_constraints
from tests.support.made_plan import made_plan
from tests.support.mlp import Mlp
from tests.support.remedy_programs import Program

MODEL, BATCH = Mlp(4, 8, 2), {"x": torch.ones(8, 4)}
_BY_STAGE: Any = {"stage": ["cpu-gloo", "cpu-gloo"]}
_STAGES = Mesh({"stage": 2})


def _options(**options: Any) -> Callable[[], object]:
    return lambda: PlanOptions(**options)


def _alone(**options: Any) -> object:
    """Plan a model with a loss for one device."""
    model = Mlp(4, 8, 1)
    return autopar.plan(
        model, Mesh(1), example_inputs=BATCH, hardware="cpu-gloo", outputs="loss", **options
    )


def _hardware(hardware: Any, mesh: Any = _STAGES) -> Callable[[], object]:
    return lambda: hardware_of(hardware, mesh)


def _file(text: str | None, read: Callable[[str], object]) -> Callable[[], object]:
    """Load a file that contains `text`; None for a missing file."""

    def program() -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file.json")
            if text is not None:
                path.write_text(text)
            return read(str(path))

    return program


def _plan(**change: Any) -> str:
    """Return the text of a plan with changed fields."""
    return json.dumps({**json.loads(made_plan().dumps()), **change})


def _without(text: str, name: str) -> str:
    data = json.loads(text)
    del data[name]
    return json.dumps(data)


_PROFILE = HardwareProfile.read("cpu-gloo")
_OBEYS = PlanOptions(constraints=(fsdp(),))


def _compiled(**options: Any) -> Callable[[], object]:
    return lambda: autopar.compile(MODEL, 1, **options)


def _deferred(called: bool) -> Callable[[], object]:
    def program() -> object:
        module = autopar.compile(Mlp(4, 8, 1), 1, hardware="cpu-gloo")
        if called:
            module(**BATCH)
        return list(module.parameters())

    return program


MESHES: dict[str, Program] = {
    "core/mesh.py Mesh.__init__ 0": Program(
        lambda: Mesh("node=4,gpu=8"),  # type: ignore[arg-type]
        "Mesh.parse('node=4,gpu=8')",
        lambda: Mesh.parse("node=4,gpu=8"),
    ),
    "core/mesh.py Mesh.__init__ 1": Program(
        lambda: Mesh(8, devices_per_node=0),
        "the number of ranks per node",
        lambda: Mesh(8, devices_per_node=4),
    ),
    "core/mesh.py _named_axes 0": Program(
        lambda: Mesh({"node": 2}, device_per_node=2),
        "did you mean devices_per_node?",
        lambda: Mesh({"node": 2}, devices_per_node=2),
    ),
    "core/mesh.py _named_axes 1": Program(
        lambda: Mesh({"node": 2}, gpu=2), "Mesh(node=4, gpu=8)", lambda: Mesh(node=2, gpu=2)
    ),
    "core/mesh.py Mesh.without 0": Program(
        lambda: Mesh(8).without("node"), "its axes are gpu", lambda: Mesh(8).without("gpu")
    ),
    "core/mesh.py Mesh.parse 0": Program(
        lambda: Mesh.parse("gpu=2,gpu=4"),
        "each axis a unique name",
        lambda: Mesh.parse("node=2,gpu=4"),
    ),
    "core/mesh.py Mesh.parse 1": Program(
        lambda: Mesh.parse("4 by 8"), "as 4x8", lambda: Mesh.parse("4x8")
    ),
    "core/mesh.py _check_axes 0": Program(
        lambda: Mesh({}), '{"node": 4, "gpu": 8}', lambda: Mesh({"node": 4, "gpu": 8})
    ),
    "core/mesh.py _check_axes 1": Program(
        lambda: Mesh([*Mesh(2).axes, *Mesh(4).axes]),
        "each axis a unique name",
        lambda: Mesh([*Mesh({"node": 2}).axes, *Mesh(4).axes]),
    ),
    "core/mesh.py _check_axes 2": Program(
        lambda: Mesh({"my gpu": 8}), '{"node": 4, "gpu": 8}', lambda: Mesh({"gpu": 8})
    ),
    "core/mesh.py _check_axes 3": Program(
        lambda: Mesh({"gpu": 0}), "positive integers", lambda: Mesh({"gpu": 1})
    ),
    "core/mesh.py _check_axes 4": Program(
        lambda: Mesh(8, links={"gpu": "nvlink"}),
        '"intra" and "inter"',
        lambda: Mesh(8, links={"gpu": "intra"}),
    ),
    "api/arguments.py as_mesh 0": Program(
        lambda: as_mesh([4, 8]),  # type: ignore[arg-type]
        "as (4, 8)",
        lambda: as_mesh((4, 8)),
    ),
    "api/arguments.py as_mesh 0 | batch": Program(
        lambda: as_mesh(BATCH),  # type: ignore[arg-type]
        "pass the batch as example_inputs=",
        lambda: autopar.compile(MODEL, 1, example_inputs=BATCH, hardware="cpu-gloo"),
    ),
    "api/chooser.py Chooser._find_fastest 0": Program(
        lambda: _alone(constraints=(pipeline(microbatches=2),)),
        "remove the pipeline constraint; num_microbatches= splits the batch without stages",
        lambda: _alone(num_microbatches=2),
    ),
    "api/mesh_search.py _full_axes_of 0": Program(
        lambda: shapes((0, 8)), "positive numbers", lambda: shapes((1, 8))
    ),
    "api/mesh_search.py _in_nodes 0": Program(
        lambda: shapes(0), "a positive number", lambda: shapes(1)
    ),
    "api/mesh_search.py _in_nodes 1": Program(
        lambda: shapes(12), "as (3, 4)", lambda: shapes((3, 4))
    ),
    "core/mesh.py read_mesh 0": Program(
        lambda: read_mesh("4x8", 8), "omit --devices-per-node", lambda: read_mesh("4x8")
    ),
    "core/mesh.py read_mesh 1": Program(
        lambda: read_mesh("12", 8), "pass a divisor", lambda: read_mesh("12", 4)
    ),
    "core/layout.py read_layout 0": Program(
        lambda: Layout.parse("R X"), "S(", lambda: Layout.parse("R S(0)")
    ),
}

HARDWARE: dict[str, Program] = {
    "core/mesh.py hardware_of 0": Program(
        _hardware(_BY_STAGE, (1, 2)), 'autopar.Mesh({"stage": 2, ...})', _hardware(_BY_STAGE)
    ),
    "core/mesh.py _mixed_hardware 0": Program(
        _hardware(7), "the name of a profile", _hardware("cpu-gloo")
    ),
    "core/mesh.py _mixed_hardware 1": Program(
        _hardware({}), "devices may differ along one axis", _hardware(_BY_STAGE)
    ),
    "core/mesh.py _mixed_hardware 2": Program(
        _hardware({"stage": "cpu-gloo"}), "one profile per index along it", _hardware(_BY_STAGE)
    ),
    "core/mesh.py _mixed_hardware 3": Program(
        _hardware({"stage": ["cpu-gloo", 7]}),
        "one profile per index along it",
        _hardware(_BY_STAGE),
    ),
    "core/mesh.py _on 0": Program(
        _hardware({"node": ["cpu-gloo"] * 2}), "its axes are stage", _hardware(_BY_STAGE)
    ),
    "core/mesh.py _on 1": Program(
        _hardware({"stage": ["cpu-gloo"]}), "pass 2 profiles, one per index", _hardware(_BY_STAGE)
    ),
    "core/hardware/profile.py _path 1": Program(
        _hardware("cpu"), "cpu-gloo", _hardware("cpu-gloo")
    ),
    "core/hardware/profile.py HardwareProfile.read 0": Program(
        _file(None, HardwareProfile.load),
        "check the path",
        _file(json.dumps(_PROFILE), HardwareProfile.load),
    ),
    "core/hardware/profile.py HardwareProfile.read 1": Program(
        _file("{", HardwareProfile.load),
        "correct the file",
        _file(json.dumps(_PROFILE), HardwareProfile.load),
    ),
    "core/hardware/profile.py ProfileReader.error 0": Program(
        lambda: HardwareProfile.from_json({**_PROFILE, "name": ""}),
        "the shipped profiles show the form",
        lambda: HardwareProfile.from_json(_PROFILE),
    ),
}

PLANS: dict[str, Program] = {
    "plans/plan.py Plan.of 0": Program(
        lambda: Plan.of(None),  # type: ignore[arg-type]
        "an autopar.Plan or its file",
        lambda: Plan.of(made_plan()),
    ),
    "plans/plan.py Plan.load 0": Program(
        _file(None, Plan.load), "Plan.save writes plan files", _file(_plan(), Plan.load)
    ),
    "plans/plan.py Plan.loads 0": Program(
        _file(_plan()[:-9], Plan.load), "save it again", _file(_plan(), Plan.load)
    ),
    "plans/plan.py Plan.loads 1": Program(
        lambda: Plan.loads("{}"), "written by Plan.save", lambda: Plan.loads(_plan())
    ),
    "plans/plan.py Plan.loads 2": Program(
        lambda: Plan.loads(_plan(version=0)), "plan again", lambda: Plan.loads(_plan())
    ),
    "plans/plan.py Plan.loads 3": Program(
        lambda: Plan.loads(_without(_plan(), "mesh")), "plan again", lambda: Plan.loads(_plan())
    ),
    "plans/plan.py Plan.loads 4": Program(
        lambda: Plan.loads(_plan(loss_rows=-1)), "plan again", lambda: Plan.loads(_plan())
    ),
    "checkpoint/manager.py Checkpoints.__init__ 0": Program(
        lambda: Checkpoints(tempfile.gettempdir(), keep=0),
        "keep at least one",
        lambda: Checkpoints(tempfile.gettempdir(), keep=1),
    ),
}

OPTIONS: dict[str, Program] = {
    f"request.py {where}": Program(_options(**refused), says, _options(**followed))
    for where, refused, says, followed in (
        ("check_choice 0", {"optimizer": "lion"}, "adamw", {"optimizer": "adamw"}),
        ("check_choice 0 | batch", {"batch": "mine"}, "local", {"batch": "local"}),
        ("check_choice 0 | outputs", {"outputs": "none"}, "loss", {"outputs": "loss"}),
        ("check_choice 0 | precision", {"precision": "bfloat16"}, "bf16", {"precision": "bf16"}),
        ("_check_budget 0", {"memory_bytes": "80 GB"}, "80 * 2**30", {"memory_bytes": 80 * 2**30}),
        ("_at_least.check 0", {"num_microbatches": 0}, '"auto"', {"num_microbatches": "auto"}),
        ("_at_least.check 0 | rows", {"loss_rows": -1}, "at least 0", {"loss_rows": 0}),
        ("_check_gap 0", {"gap": 1.0}, "0.01", {"gap": 0.01}),
        ("_check_limit 0", {"time_limit_s": 0}, "60", {"time_limit_s": 60}),
        ("_check_switch 0", {"strict": "no"}, "True or False", {"strict": False}),
        (
            "_check_constraints 0",
            {"constraints": ("fsdp",)},
            "autopar.constraints",
            {"constraints": (fsdp(),)},
        ),
    )
}

CALLS: dict[str, Program] = {
    "api/arguments.py as_call 0": Program(
        lambda: as_call(7),  # type: ignore[arg-type]
        "a sequence of positional arguments",
        lambda: as_call([7]),
    ),
    "request.py as_constraints 0": Program(
        lambda: as_constraints(fsdp()), "constraints=[...]", lambda: as_constraints([fsdp()])
    ),
    "api/arguments.py check_model 0": Program(
        lambda: check_model(nn.ReLU),  # type: ignore[arg-type]
        "ReLU(...)",
        lambda: check_model(nn.ReLU()),
    ),
    "api/arguments.py check_model 1": Program(
        lambda: check_model(torch.relu),  # type: ignore[arg-type]
        "pass a torch.nn.Module",
        lambda: check_model(nn.ReLU()),
    ),
    "api/what_if.py change_options 0": Program(
        lambda: change_options(_OBEYS, [], [fsdp()]),
        "pass another constraint, or none",
        lambda: (change_options(_OBEYS, [], [fsdp(axes="gpu")]), change_options(_OBEYS, [], [])),
    ),
    "api/what_if.py _without 0": Program(
        lambda: change_options(_OBEYS, ["ddp"], []),
        "name one of its constraints: fsdp",
        lambda: change_options(_OBEYS, ["fsdp"], []),
    ),
    "api/compiling.py compile 0": Program(
        _compiled(batch="local"),
        "pass the global batch",
        _compiled(batch="local", example_inputs=BATCH, hardware="cpu-gloo"),
    ),
    "request.py check_choice 0 | backend": Program(
        _compiled(backend="xla"), "eager", _compiled(backend="eager")
    ),
    "api/compiling.py _check_options_with_plan 0": Program(
        _compiled(plan=made_plan(), gap=0.1), "omit these options", _compiled(plan=made_plan())
    ),
    "api/compiling.py Deferred._ready 0": Program(
        _deferred(False), "call the model once first", _deferred(True)
    ),
    "api/tracing.py _wrapper_error 0 | compiled by torch": Program(
        lambda: refuse_wrapped(torch.compile(nn.Linear(4, 4))),
        "`model._orig_mod`",
        lambda: refuse_wrapped(torch.compile(nn.Linear(4, 4))._orig_mod),
    ),
    "api/tracing.py _wrapper_error 0 | compiled by autopar": Program(
        lambda: autopar.compile(autopar.compile(MODEL, 1), 1),
        "the plain module that was given to autopar.compile",
        lambda: autopar.compile(MODEL, 1),
    ),
    "api/tracing.py _wrapper_error 0 | parallel": Program(
        lambda: refuse_wrapped(nn.DataParallel(MODEL)),
        "`model.module`",
        lambda: refuse_wrapped(nn.DataParallel(MODEL).module),
    ),
    "api/tracing.py batch_size 0": Program(
        lambda: microbatch_of((torch.ones(()),), {}, 2),
        "pass num_microbatches=1",
        lambda: autopar.plan(
            Mlp(4, 8, 1), 1, example_inputs=BATCH, num_microbatches=1, hardware="cpu-gloo"
        ),
    ),
    "api/tracing.py microbatch_of 0": Program(
        lambda: microbatch_of((torch.ones(8, 4),), {}, 3),
        "a divisor of 8",
        lambda: microbatch_of((torch.ones(8, 4),), {}, 4),
    ),
    "core/keywords.py _refusal 0": Program(
        _compiled(memory=2**30), "did you mean memory_bytes=?", _compiled(memory_bytes=2**30)
    ),
    "core/keywords.py _refusal 1": Program(
        lambda: autopar.compile(),  # type: ignore[call-arg]
        "pass model=",
        lambda: autopar.compile(model=MODEL, mesh=1),
    ),
    "core/keywords.py _refusal 2": Program(
        lambda: autopar.compile(MODEL, 1, BATCH),  # type: ignore[misc]
        "positional arguments are model, mesh, others are keywords",
        lambda: autopar.compile(MODEL, 1, example_inputs=BATCH, hardware="cpu-gloo"),
    ),
}

PROGRAMS: dict[str, Program] = {**MESHES, **HARDWARE, **PLANS, **OPTIONS, **CALLS}
