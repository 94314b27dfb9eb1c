"""Faults planted in emission and in emitted programs: random draws, microbatches, stages, inputs
and outputs. Validation refuses each and names the node, the tensor or the setting.

Each row breaks one thing at one place. Without it, the program of the same plan is valid and
matches the plain model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_edits import (
    changed,
    dropped,
    exchanged,
    first_for_second,
    microbatched,
    reading,
    repeated,
    returning,
    saying,
    tensor,
    without,
)
from planted_faults import Fault, Patch, refused_by_validation
from planted_subjects import SUBJECTS
from torch.distributed.tensor import Shard

from autopar.core.layout import Layout
from autopar.emit import phase, program_builder
from autopar.emit import program_builder as staged
from autopar.kernels.collectives import write_to
from autopar.validation import whole

aten = torch.ops.aten


def without_sums(patch: Patch) -> None:
    emit_stage = program_builder.emit_stage

    def emitted(trace: Any, plan: Any, *, accumulates: bool = False) -> Any:
        return emit_stage(trace, plan)

    patch.setattr(program_builder, "emit_stage", emitted)


def crossed_otherwise(patch: Patch) -> None:
    """Cut the second stage so that it takes its crossing tensors in another order."""
    subject = SUBJECTS["stages"]
    part, how, made = subject.staged
    other = replace(made.stages[1], inputs=made.stages[1].inputs[::-1])
    made = replace(made, stages=(made.stages[0], other))
    patch.setitem(subject.__dict__, "staged", (part, how, made))
    patch.setattr(whole, "cut_trace", lambda *_: made)


DRAWS = {
    "two draws are one": Fault(
        "dropout", "argument draw is 0, expected 1", changed("keep_mask", at=1, draw=0)
    ),
    "every rank draws the first part": Fault(
        "dropout", "argument window", without("keep_mask", "window")
    ),
    "every rank draws of its own part": Fault(
        "dropout",
        "argument window",
        changed("keep_mask", window=lambda n: (n.kwargs["window"][0], (4, 8))),
    ),
    "more is dropped": Fault("dropout", "argument 2 is 0.5", changed("keep_mask", arg_2=0.5)),
    "the state of draws stays": Fault("dropout", "writes buffers", saying(mutated=())),
    "the new state is the old one": Fault(
        "dropout",
        "buffer 'autopar_random_state' is",
        returning("forward", lambda made: [made[0], made[0].graph._root.next, *made[2:]]),
    ),
}

TIME = {
    "the gradient of each microbatch replaces the sum": Fault(
        "sums", "the model has no such op", plant=lambda p: p.setattr(phase, "add_to", write_to)
    ),
    "a gradient is added twice": Fault(
        "sums", "is not a sum that expects", repeated("add_to", "backward")
    ),
    "a gradient is not added": Fault("sums", "the sum of", dropped("add_to", "backward")),
    "a gradient is added to another's sum": Fault(
        "stages", "to the sum of", exchanged("add_to", "backward", (0, 2))
    ),
    "nothing is added up": Fault("stages", "stage 0 does not sum gradients", plant=without_sums),
    "microbatches weigh too much": Fault(
        "sums",
        "does not add up over 2 microbatches",
        plant=lambda p: p.setattr(staged.Microbatches, "weight", 1.0),
    ),
    "microbatches weigh something else": Fault(
        "sums",
        r"weight of a microbatch's loss is 0\.25, with 2 microbatches",
        plant=lambda p: p.setattr(staged.Microbatches, "weight", 0.25),
    ),
    "a batch is cut along its features": Fault(
        "sums", "is not 2 times", microbatched(inputs={"x": 1})
    ),
    "a batch is not cut": Fault(
        "sums", "the output does not add up over 2 microbatches", microbatched(inputs={})
    ),
    "losses are added up": Fault(
        "sums",
        "the output does not add up",
        microbatched(outputs=lambda how: {**how.outputs, how.loss: ("sum", -1)}),
    ),
    "a loss is that of the last microbatch": Fault(
        "counts",
        "it is term, expected whole",
        microbatched(outputs=lambda how: {**how.outputs, how.loss: ("whole", -1)}),
    ),
    "counts are averaged": Fault(
        "counts",
        "a value of the batch that microbatches receive",
        microbatched(
            counts=lambda how: tuple(
                replace(c, given=dict.fromkeys(c.given, "mean")) for c in how.counts
            )
        ),
    ),
    "there are more microbatches": Fault(
        "sums", "has 4 microbatches, but the plan has 2", microbatched(num=4)
    ),
}

STAGES = {
    "two tensors cross in another order": Fault(
        "stages",
        "stage 1 at microbatch 0 of 2: forward reads .*, expected",
        plant=crossed_otherwise,
    ),
    "a stage hands over another tensor": Fault(
        "stages", "output .* is", returning("forward", first_for_second)
    ),
    "gradients come back in another order": Fault(
        "stages",
        "gradient of input",
        returning("backward", lambda made: [*made[:-2], made[-1], made[-2]], 1),
    ),
    "what stages share is not added": Fault(
        "tied", "is summed over stages", lambda program: replace(program, shared={})
    ),
    "what stages share rests otherwise": Fault(
        "tied",
        "'table.weight' has layout",
        saying(
            1,
            parameters=lambda p: tuple(
                replace(t, layout=Layout((Shard(0),))) for t in p.parameters
            ),
        ),
    ),
}

BORDERS = {
    "the loss is no loss": Fault(
        "split", "output '' has is_loss False", saying(**tensor("outputs", is_loss=False))
    ),
    "a parameter has another's name": Fault(
        "split", "parameter", saying(**tensor("parameters", 1, name="layers.1.0.weight"))
    ),
    "an input is not of the batch's shape": Fault(
        "split", "input 'x' has shape", saying(**tensor("inputs", shape=(4, 8)))
    ),
    "a frozen parameter is trained": Fault(
        "split", "has has_gradient False", saying(**tensor("parameters", has_gradient=False))
    ),
    "a parameter rests elsewhere than planned": Fault(
        "split",
        "has layout",
        saying(
            parameters=lambda p: (
                replace(p.parameters[0], layout=p.parameters[1].layout),
                *p.parameters[1:],
            )
        ),
    ),
    "what is kept is another value": Fault(
        "split",
        "operand",
        returning("forward", lambda made: [made[0], made[2], made[1], *made[3:]]),
    ),
    "less is kept": Fault(
        "split",
        "has more inputs than the program passes",
        saying(num_saved=lambda p: p.num_saved - 1),
    ),
    "what runs again reads another value": Fault(
        "again", "operand 0", reading("native_layer_norm.default", "backward", 0, of=6)
    ),
    "a buffer gets another value": Fault(
        "images",
        "buffer 'norm.",
        returning("forward", lambda made: [made[0], made[2], made[1], *made[3:]]),
    ),
    "two gradients change places": Fault(
        "replicas", "the gradient of", returning("backward", lambda made: [*made[:4], *made[:4]])
    ),
}

FAULTS = {**DRAWS, **TIME, **STAGES, **BORDERS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_a_step_is_refused_by_validation(name: str, monkeypatch: Patch) -> None:
    refused_by_validation(FAULTS[name], monkeypatch)
