"""A capture computes the results of the plain model for all memory formats of operands and
gradients.

A kernel may give other results or fail in another format than the one that autograd or functions of
torch create by copies that are not in the graph. Therefore, many modules are captured several times
in one model, with operands and gradients of different formats, and run on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from format_cases import Case
from formats import EXPANDED, GRADIENTS, OPERANDS, Branch, Branches
from further_format_cases import CASES, GROUPS
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.capture import Trace, capture, execute
from autopar.capture.trees import flatten_call, flatten_with_paths
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.verification import verify_program
from autopar.verification.comparison import Results, compare
from benchmarks.random_plans import prepared_trace, random_plan

FAST = ("group 2d", "attention", "weight norm")
IN_FLOAT32 = (  # too, one of each kind
    "conv2d",
    "transposed2d",
    "max2d",
    "bilinear 2d",
    "batch 2d",
    "group 2d",
    "attention",
    "attention grouped causal",
    "bag mean",
    "cross entropy 2d",
    "lstm",
    "scatter add",
    "weight norm",
    "cholesky",
    "rfft2",
)
SPATIAL = (
    "convolutions",
    "pooling",
    "space",
    "norms",
    "attention",
)  # groups of ops whose kernels depend on formats
# formats of operands and of gradients that kernels treat differently from contiguous ones
PAIRS = (
    ("contiguous", "channels last"),
    ("channels last", "contiguous"),
    ("channels last", "averaged"),
    ("reversed", "part"),
    ("swapped", "expanded"),
    ("every second", "reversed"),
    ("expanded", "every second"),
    ("part of channels", "one number"),
)
TOLERANCES = {torch.float64: 1e-9, torch.float32: 3e-4}
SHARES = {
    torch.float64: 1e-4,
    torch.float32: 1e-2,
}  # share of the largest gradient below which differences are rounding errors


def made(case: Case, dtype: torch.dtype) -> tuple[Branches, list[Tensor], list[Tensor]]:
    """Return the model, its inputs, and the weights of its results."""
    torch.manual_seed(0)
    xs = [case.prepare(torch.randn(shape, dtype=dtype)) for shape in case.shapes]
    inner = case.make().to(dtype)
    with torch.no_grad():
        results = tree_leaves(copy.deepcopy(inner)(*xs))
    weights = [torch.randn(y.shape, dtype=y.dtype) for y in results]
    pairs = PAIRS if any(case in GROUPS[group].values() for group in SPATIAL) else PAIRS[1:4]
    names = [(lay, read) for lay, read in pairs if not (case.ties and lay in EXPANDED)]
    branches = [branch(inner, [lay] * len(xs), read) for lay, read in names]
    if len(xs) > 1:
        mixed = [name for name, _ in names][: len(xs)]
        branches += [branch(inner, mixed, "reversed"), branch(inner, mixed[::-1], "contiguous")]
    return Branches(branches).to(dtype), xs, weights


def branch(inner: Any, lay: Sequence[str], read: str) -> Branch:
    return Branch(copy.deepcopy(inner), [OPERANDS[name] for name in lay], GRADIENTS[read])


def plain(model: Branches, xs: Sequence[Tensor], weights: list[Tensor], trace: Trace) -> Results:
    model, leaves = copy.deepcopy(model), [x.detach().clone().requires_grad_() for x in xs]
    outputs = dict(flatten_with_paths(model(leaves, weights))[0])
    outputs["loss"].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients |= {i.gradient_name: x.grad for i, x in zip(trace.given_back, leaves, strict=True)}
    buffers = dict(model.named_buffers())
    kept = {name: buffers[name] for name in trace.mutated}
    known = {name: torch.zeros(()) if value is None else value for name, value in gradients.items()}
    return Results(
        {name: x.detach() for name, x in outputs.items()},
        kept,
        {k: v for k, v in known.items() if gradients[k] is not None},
    )


def captured(case: Case, dtype: torch.dtype) -> tuple[Trace, Branches, list[Tensor], list[Tensor]]:
    model, xs, weights = made(case, dtype)
    xs = [x.requires_grad_() for x in xs]
    return capture(model, (xs, weights)), model, xs, weights


CALLED = [
    pytest.param(
        name,
        dtype,
        id=f"{name} {dtype}".replace("torch.", ""),
        marks=[] if name in FAST and dtype == torch.float64 else pytest.mark.slow,
    )
    for name in CASES
    for dtype in TOLERANCES
    if dtype == torch.float64 or name in IN_FLOAT32
]


@pytest.mark.parametrize(("name", "dtype"), CALLED)
def test_a_capture_matches_the_plain_model_for_all_memory_formats(
    name: str, dtype: torch.dtype
) -> None:
    trace, model, xs, weights = captured(CASES[name], dtype)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = dict(flatten_call((xs, weights), {})[0])
    outputs, gradients, buffers = execute(
        trace, tensors, tensors, [given[i.path].detach() for i in trace.inputs]
    )
    ours = Results(
        {o.path: x for o, x in zip(trace.outputs, outputs, strict=True)}, buffers, gradients
    )
    errors = compare(ours, plain(model, xs, weights, trace), SHARES[dtype])
    assert errors.worst < TOLERANCES[dtype], errors


SPLIT = [
    pytest.param(name, seed % 3, id=name, marks=[] if name in FAST[:2] else pytest.mark.slow)
    for group in ("convolutions", "pooling", "norms", "attention", "tables", "losses")
    for seed, name in enumerate(GROUPS[group])
]


@pytest.mark.parametrize(("name", "seed"), SPLIT)
def test_random_plans_match_the_plain_model_for_all_memory_formats(name: str, seed: int) -> None:
    trace, model, xs, weights = captured(CASES[name], torch.float64)
    ready = prepared_trace(trace, Mesh.parse("2"), HardwareProfile.load("cpu-gloo"))
    _, program = random_plan(ready, seed, recompute_otherwise=True)
    found = verify_program(trace, program, model, (xs, weights), {})
    assert found.ok and found.tolerance == 1e-9
