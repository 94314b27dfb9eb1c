"""The mesh and the plan of a random program."""

from __future__ import annotations

import random
from collections.abc import Callable

MESHES = ((1,), (2,), (2,), (3,), (4,), (2, 2), (2, 2), (2, 3))
Choice = tuple[str, bool]  # (expression of a plan, whether it is for inference)


def random_choice(rng: random.Random) -> tuple[tuple[int, ...], str, bool]:
    """Return a mesh, an expression that plans with `arguments`, and whether the plan is for
    inference."""
    mesh = rng.choice(MESHES)
    options = ON_ONE if mesh == (1,) else ON_ONE + ON_SEVERAL
    plan, inference = rng.choice(options)(rng, "ab"[: len(mesh)], mesh)
    return mesh, plan, inference


def planned(options: str) -> str:
    """Return the expression of a plan with these options."""
    return f"autopar.plan(**arguments, {options})" if options else "autopar.plan(**arguments)"


def forced(constraint: str, others: str = "") -> str:
    """Return the expression of a plan under a constraint."""
    return planned(f"constraints=[autopar.constraints.{constraint}]{others}")


Chooser = Callable[[random.Random, str, tuple[int, ...]], Choice]


def own(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return planned(rng.choice(("", 'optimizer="none"', "loss_rows=2", "gap=0.1"))), False


def microbatches(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return planned(f'num_microbatches={rng.choice((2, 3, 4))}, outputs="loss"'), False


def tight(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return f"tight_plan(arguments, {rng.choice((0.5, 0.7, 0.85))})", False


def tight_loss(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return f'tight_plan(arguments, {rng.choice((0.4, 0.6, 0.8))}, outputs="loss")', False


def bf16(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return planned('precision="bf16"'), False


def outputs(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return planned(f'outputs="{rng.choice(("full", "local", "dtensor", "loss"))}"'), False


def inference(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return planned("inference=True"), True


def offload(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    constraint = "constraints=[autopar.constraints.offload()]"
    return f"tight_plan(arguments, {rng.choice((0.4, 0.6))}, {constraint})", False


def random_legal(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return f"random_legal_plan(arguments, {rng.randrange(1000)})", False


def ddp(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return forced(rng.choice(("ddp()", f'ddp("{rng.choice(axes)}")'))), False


def fsdp(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    several = rng.choice(("", f", num_microbatches={rng.choice((2, 3))}"))
    return forced(rng.choice(("fsdp()", f'fsdp("{rng.choice(axes)}")')), several), False


def tensor_parallel(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    sequence = rng.choice(("", ", sequence=True"))
    return forced(f'tensor_parallel(axes="{rng.choice(axes)}"{sequence})'), False


def context_parallel(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    return forced(f'context_parallel("{rng.choice(axes)}")'), False


def megatron(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    degrees = [f"tp={mesh[-1]}", *([f"dp={mesh[0]}"] if len(mesh) > 1 else [])]
    if len(mesh) == 1 and rng.random() < 0.5:
        degrees = [f"dp={mesh[0]}"]
    recompute = rng.choice(("", ', recompute="full"'))
    return forced(f"megatron({', '.join(degrees)}, zero={rng.randrange(4)}{recompute})"), False


def pipeline(rng: random.Random, axes: str, mesh: tuple[int, ...]) -> Choice:
    parts = f"microbatches={rng.choice((1, 2, 3, 4))}"
    schedule = rng.choice(("", ', schedule="gpipe"', ', schedule="1f1b"'))
    returned = rng.choice((', outputs="loss"', ""))
    return forced(f'pipeline("{axes[0]}", {parts}{schedule})', returned), False


ON_ONE: tuple[Chooser, ...] = (
    own,
    microbatches,
    tight,
    tight_loss,
    bf16,
    outputs,
    inference,
    offload,
)
ON_SEVERAL: tuple[Chooser, ...] = (
    random_legal,
    random_legal,
    random_legal,
    ddp,
    fsdp,
    tensor_parallel,
    context_parallel,
    megatron,
    pipeline,
    pipeline,
)
