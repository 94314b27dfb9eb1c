"""Every loss in microbatches and in stages: the loss and every gradient are compared with the plain
model."""

from __future__ import annotations

import random
from functools import cache

import autopar
from benchmarks.faults.judging import Notes, WrongResult
from benchmarks.faults.losses import Loss, all_losses

VARIANTS = {
    "2 microbatches": ({"gpu": 1}, "num_microbatches=2"),
    "3 microbatches": ({"gpu": 1}, "num_microbatches=3"),
    "2 stages, 2 microbatches": (
        {"gpu": 2},
        'constraints=[autopar.constraints.pipeline("gpu", microbatches=2)]',
    ),
    "2 stages, 3 microbatches": (
        {"gpu": 2},
        'constraints=[autopar.constraints.pipeline("gpu", microbatches=3)]',
    ),
    "2 ranks, 2 microbatches": (
        {"gpu": 2},
        "constraints=[autopar.constraints.ddp()], num_microbatches=2",
    ),
}

TEXT = '''"""{title}"""

import autopar
from benchmarks.faults.losses import find_loss

loss = find_loss("{name}")
plan = autopar.plan(
    loss.build(), autopar.Mesh({mesh}), example_inputs=loss.batch(), hardware="h100-sxm", {options}
)
print(autopar.verify(plan, loss.build(), loss.batch()))
'''


@cache
def combinations() -> tuple[tuple[Loss, str], ...]:
    """Return every loss in every variant, in the order of seeds, which is shuffled."""
    made = [(loss, variant) for loss in all_losses() for variant in VARIANTS]
    random.Random(0).shuffle(made)
    return tuple(made)


def run(seed: int, notes: Notes) -> None:
    """Run the case of a seed.

    Raises:
        WrongResult: if the loss or gradients differ from the plain model's.
        AutoparError: if autopar refuses.
    """
    loss, variant = combinations()[seed]
    mesh, options = VARIANTS[variant]
    if not loss.has_outputs:
        options += ', outputs="loss"'
    title = f"losses:{seed} {loss.name}, {variant}"
    notes.entries |= {"mesh": str(autopar.Mesh(mesh)), "plan": variant, "loss": loss.name}
    notes.entries["expected"] = loss.expect
    notes.entries["program"] = TEXT.format(title=title, name=loss.name, mesh=mesh, options=options)
    arguments = eval(f"dict({options})", {"autopar": autopar})  # the text of the table above
    notes.phase = "plan"
    plan = autopar.plan(
        loss.build(),
        autopar.Mesh(mesh),
        example_inputs=loss.batch(),
        hardware="h100-sxm",
        **arguments,
    )
    notes.phase = "verify"
    found = autopar.verify(plan, loss.build(), loss.batch())
    if not found.ok:
        raise WrongResult(str(found))
    notes.entries["max_rel_err"] = found.max_error
