"""Faults planted in emission and in emitted programs: memory, numbers, collectives and buckets.
Validation refuses each and names the node, the tensor or the setting.

Each row breaks one thing at one place. Without it, the program of the same plan is valid and
matches the plain model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_edits import (
    between,
    changed,
    dropped,
    exchanged,
    first_for_second,
    repeated,
    returning,
    without,
)
from planted_faults import Fault, Patch, refused_by_validation

from autopar.emit import phase, program_builder
from autopar.emit import program_builder as step
from autopar.emit.context import CALLS, LoweringContext
from autopar.emit.phase import PhaseBuilder
from autopar.kernels import collectives
from autopar.ops.in_place import in_place_form

aten = torch.ops.aten
BF16, FP32 = {"dtype": torch.bfloat16}, {"dtype": torch.float32}


def write_everywhere(patch: Patch) -> None:
    patch.setattr(phase, "operand_written", lambda node: 0 if in_place_form(node.target) else None)
    patch.setattr(phase, "_may_be_overwritten", lambda *_: True)


def one_element_less(node: Any) -> int:
    return int(node.kwargs["length"]) - 1


MEMORY = {
    "two gradients share memory": Fault(
        "twins",
        "the gradients of 'first' and 'second' share memory",
        plant=lambda p: p.setattr(
            PhaseBuilder, "_copy_shared_gradients", lambda self, found: found
        ),
    ),
    "two gradients share memory after a step": Fault(
        "sums",
        "step graph .* 'first' and 'second' share memory",
        returning("end", first_for_second),
    ),
    "a gradient lies over itself": Fault(
        "row",
        "elements of the gradient of 'first' share memory",
        plant=lambda p: p.setattr(
            PhaseBuilder, "_copy_shared_gradients", lambda self, found: found
        ),
    ),
    "an op writes into what is read later": Fault(
        "split", "writes into memory of .* reads later", plant=write_everywhere
    ),
    "an op writes into the batch": Fault(
        "row",
        "writes into primals_3, which it does not own",
        changed("mul.Tensor", target=aten.mul.out, out=lambda n: n.args[1]),
    ),
    "an op writes into what lies over itself": Fault(
        "row",
        "which it writes into, share memory",
        changed("mul.Tensor", "backward", 1, target=aten.mul.out, out=lambda n: n.args[0]),
    ),
}

NUMBERS = {
    "partial sums are reduced in bfloat16": Fault(
        "replicas",
        "partial sums are reduced in bfloat16, expected float32",
        plant=lambda p: (
            p.setattr(program_builder, "apply_buckets", lambda program, plan: program),
            p.setattr(LoweringContext, "dtype", lambda *_: torch.float32),
        ),
    ),
    "a bucket of gradients is in bfloat16": Fault(
        "replicas",
        "reduced in bfloat16, expected float32",
        changed("into_bucket", "backward", arg_4=torch.bfloat16),
    ),
    "gradients add up in bfloat16": Fault(
        "sums",
        "are accumulated in torch.bfloat16",
        plant=lambda p: p.setattr(step, "sum_dtype", lambda dtype: dtype),
    ),
    "a value is rounded and widened again": Fault(
        "split",
        "rounds dot.* but its dtype in the model is torch.float32",
        between("dot", "backward", [(aten._to_copy.default, BF16), (aten._to_copy.default, FP32)]),
    ),
    "partial sums are rounded": Fault(
        "split",
        "rounds partial sums",
        between(
            "mean_part", "forward", [(aten._to_copy.default, BF16), (aten._to_copy.default, FP32)]
        ),
    ),
    "a mean is over what a rank has": Fault(
        "split", "argument 3 is 32, expected 64", changed("mean_part", arg_3=32)
    ),
    "a product sums over another dim": Fault(
        "split",
        "argument 0 is ab,bc->ac, expected ab,cb->ac",
        changed("dot", arg_0="ab,bc->ac", at=0),
    ),
    "attention sees what is to come": Fault(
        "attention", "argument 4 is False, expected True", changed("attention", arg_4=False)
    ),
    "attention begins at no query of its rank": Fault(
        "attention", "argument q_start", without("attention", "q_start")
    ),
    "a bias is added by every rank": Fault(
        "split", "argument starts", without("dot", "starts", at=1)
    ),
    "rows of a table are looked up from the first on": Fault(
        "vocabulary", "argument start is missing", without("embedding", "start")
    ),
}

COLLECTIVES = {
    "a reduction is left out": Fault("split", r"operand 1 is .* as .*P", dropped("all_reduce")),
    "a gradient is not reduced": Fault(
        "images", "the gradient of", dropped("all_reduce", "backward")
    ),
    "a reduction is done twice": Fault("split", "is not possible from", repeated("all_reduce")),
    "a reduction is along another axis": Fault(
        "split", "is not possible from", changed("all_reduce", arg_2=0)
    ),
    "a reduction takes the maximum": Fault(
        "split",
        "a all_reduce with settings .'max'",
        plant=lambda p: p.setitem(
            CALLS, "all_reduce", lambda c, _: (collectives.all_reduce, ("max", c.axis))
        ),
    ),
    "what should be scattered is sliced": Fault(
        "attention",
        "is not possible from",
        changed(
            "reduce_scatter", "backward", target=collectives.shard, args=lambda n: (n.args[0], 2, 0)
        ),
    ),
    "keys are gathered along another dim": Fault(
        "attention", "is not possible from", changed("all_gather", arg_1=1)
    ),
    "uneven parts are gathered as even ones": Fault(
        "uneven",
        "shards are unequal, with length=None",
        plant=lambda p: p.setattr(PhaseBuilder, "_length", lambda *_: {}),
    ),
    "an uneven dim is cut short": Fault(
        "uneven",
        "shards are unequal, with length=9",
        changed("all_gather", length=one_element_less),
    ),
    "a rank's place is on another axis": Fault(
        "attention", "argument q_start", changed("local_start", arg_1=((1, 2),))
    ),
    "a rank's place is its length": Fault(
        "attention", "argument q_start", changed("local_start", target=collectives.local_length)
    ),
    "a halo is on the other side": Fault(
        "images", "operand 0", changed("halo", at=1, arg_2=1, arg_3=3)
    ),
    "a halo has the lowest value at the ends": Fault(
        "images", "operand 0", changed("halo", at=0, arg_4=True)
    ),
    "a halo is too narrow": Fault("images", "operand 0", changed("halo", at=1, arg_2=1, arg_3=1)),
    "a step finishes another": Fault(
        "again", "not started with these settings", changed("finish", "backward", arg_2="max")
    ),
    "a step is read before it is finished": Fault(
        "again", "InFlight", dropped("finish", "backward")
    ),
}

BUCKETS = {
    "two tensors of a bucket change places": Fault(
        "split", "gradient of", exchanged("getitem", "backward", (0, 2), 1)
    ),
    "a bucket is unpacked in another order": Fault(
        "split",
        "bucket/unpack",
        changed("from_bucket", "backward", arg_1=lambda n: n.args[1][::-1]),
    ),
    "a bucket has rows of another rank": Fault(
        "split",
        "unpacks a bucket that was packed differently",
        changed("from_bucket", "backward", arg_3=4),
    ),
    "a bucket is scattered along its rows": Fault(
        "split", "does not support reduce_scatter", changed("reduce_scatter", "backward", arg_1=1)
    ),
    "a bucket is gathered, not reduced": Fault(
        "split",
        "bucket",
        changed(
            "reduce_scatter",
            "backward",
            target=collectives.all_gather,
            args=lambda n: (n.args[0], 0, 0),
        ),
    ),
    "a member of a bucket is cut along another dim": Fault(
        "split", "bucket", changed("into_bucket", "backward", arg_1=lambda n: [0] * len(n.args[1]))
    ),
}

KERNELS = {
    "a kernel multiplies otherwise": Fault(
        "kernels",
        "it computes 'abc,cd->abd', expected 'abc,dc->abd'",
        changed("matmul_reduce_scatter", arg_3="abc,cd->abd"),
    ),
    "a kernel adds its bias on every rank": Fault(
        "kernels", "its shards start at", without("matmul_reduce_scatter", "starts")
    ),
    "a kernel scatters along another dim": Fault(
        "kernels",
        "matmul_reduce_scatter|operand",
        changed("matmul_reduce_scatter", arg_4=lambda n: n.args[4]._replace(dim=2)),
    ),
    "a kernel gathers its other factor": Fault(
        "kernels", "all_gather", changed("all_gather_matmul", "backward", arg_3=1)
    ),
    "a kernel gathers another tensor": Fault(
        "kernels",
        "operand 0",
        changed("all_gather_matmul", "backward", arg_0=lambda n: n.graph._root.next),
    ),
    "what a kernel gathers is taken for its product": Fault(
        "kernels", "operand", exchanged("getitem", "backward", (0, 1), 1)
    ),
}

FAULTS = {**MEMORY, **NUMBERS, **COLLECTIVES, **BUCKETS, **KERNELS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_emission_is_refused_by_validation(
    name: str, monkeypatch: Patch
) -> None:
    refused_by_validation(FAULTS[name], monkeypatch)
