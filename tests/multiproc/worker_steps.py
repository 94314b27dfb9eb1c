"""Run by four processes: communication steps compared with the lockstep interpreter, and their
memory compared with fake groups."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from handwritten import program_of_stage
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.kernels import collectives as steps
from autopar.kernels.bind import bind
from autopar.program.abstract_executor import LiveBytes
from autopar.program.lockstep import run_lockstep
from autopar.program.program import Program, ProgramTensor, StageProgram
from autopar.runtime.device_mesh import device_mesh, groups_of

MESH = Mesh({"data": 2, "tensor": 2})
SHAPE = (4, 6, 8)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        f"all_gather dim {dim} axis {axis}": (steps.all_gather, (dim, axis))
        for dim in range(3)
        for axis in range(2)
    },
    **{
        f"reduce_scatter {op} dim {dim}": (steps.reduce_scatter, (dim, op, 1))
        for dim in range(3)
        for op in ("sum", "max")
    },
    **{f"all_reduce {op}": (steps.all_reduce, (op, 0)) for op in ("sum", "max", "min", "product")},
    **{
        f"all_to_all {a} to {b}": (steps.all_to_all, (a, b, 1))
        for a in range(3)
        for b in range(3)
        if a != b
    },
    **{
        f"halo {b} {a} dim {dim} axis {axis}": (steps.halo, (dim, b, a, False, axis))
        for dim in range(3)
        for axis in range(2)
        for b, a in ((1, 1), (2, 0), (0, 3))
    },
    **{
        f"swap dim {dim} axis {axis}": (steps.swap, (dim, axis))
        for dim in range(3)
        for axis in range(2)
    },
    **{f"shard dim {dim}": (steps.shard, (dim, 0)) for dim in range(3)},
}


def program_of(
    target: Callable[..., Any], arguments: tuple[Any, ...], dtype: torch.dtype
) -> Program:
    """x → step(x) on a tensor that differs from rank to rank; each rank's result is seen through
    a leading dim of 4."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    own = graph.call_function(operator.getitem, (x, 0))
    result = graph.call_function(
        torch.ops.aten.unsqueeze.default, (graph.call_function(target, (own, *arguments)), 0)
    )
    graph.output((result,))
    border = ProgramTensor("x", (4, *SHAPE), (4, *SHAPE), dtype, Layout.parse("S(0) S(0)"))
    stage = StageProgram(
        MESH,
        fx.GraphModule(nn.Module(), graph),
        fx.GraphModule(nn.Module(), fx.Graph()),
        (),
        (),
        (border,),
        (),
        0,
        (),
        (),
    )
    return program_of_stage(stage)


def in_lockstep(target: Callable[..., Any], arguments: tuple[Any, ...], x: Tensor) -> list[Tensor]:
    """Return the result of the step on every rank, from the interpreter."""
    seen: list[Any] = []

    def observe(phase: str, node: fx.Node, locals: list[Any]) -> None:
        if node.target is target:
            seen.extend(locals)

    run_lockstep(program_of(target, arguments, x.dtype), {}, {}, [x], observe=observe)
    return seen


def peak(
    call: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return peak live bytes, shape and strides of a step on `x`."""
    with LiveBytes() as memory:
        memory.register([x])
        result = call(x)
    return memory.peak_bytes, tuple(result.shape), tuple(result.stride())


def run(rank: int) -> dict[str, Any]:
    groups = groups_of(device_mesh(MESH))
    facts: dict[str, Any] = {"wrong": [], "memory": [], "bound": []}
    for name, (target, arguments) in CALLS.items():
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.int64,
            torch.bool,
            torch.int16,
            torch.complex64,
        ):
            reduces = target in (steps.all_reduce, steps.reduce_scatter)
            if reduces and (
                dtype in (torch.bool, torch.int16) or (dtype.is_complex and "sum" not in arguments)
            ):
                continue
            x = torch.randint(
                0,
                2 if dtype == torch.bool else 4,
                (4, *SHAPE),
                generator=torch.Generator().manual_seed(3),
            ).to(dtype)
            x = torch.complex(x.real, x.real.flip(1)).conj() if dtype.is_complex else x
            expected = in_lockstep(target, arguments, x)[rank]
            with steps.use_groups(groups):
                got = target(x[rank].clone(), *arguments)
                transposed = target(
                    x[rank].clone().transpose(0, 2).contiguous().transpose(0, 2), *arguments
                )
            if not (torch.equal(got, expected) and torch.equal(transposed, expected)):
                facts["wrong"].append((name, dtype))
        facts["memory"] += memory_differences(name, target, arguments, rank, groups)
        facts["bound"] += [] if bound_equals_direct(target, arguments, rank, groups) else [name]
    return facts


def early(target: Callable[..., Any]) -> Callable[..., Any]:
    """Run the step as start and finish, with another op between them."""

    def call(x: Tensor, *arguments: Any) -> Tensor:
        started = steps.start(x, target.__name__, *arguments)
        between = torch.ones(SHAPE)
        result = steps.finish(started, target.__name__, *arguments)
        del between
        return result

    return call


def memory_differences(
    name: str,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    groups: steps.Groups,
) -> list[Any]:
    apart = (
        []
        if target is steps.shard
        else differences(f"{name} apart", early(target), arguments, rank, groups)
    )
    return differences(name, target, arguments, rank, groups) + apart


def differences(
    name: str,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    groups: steps.Groups,
) -> list[Any]:
    with FakeTensorMode(), steps.use_groups(steps.fake_groups(MESH, MESH.coordinate(rank))):
        fake = peak(lambda x: target(x, *arguments), torch.ones(SHAPE))
    # gloo's thread may hold an operand for a moment after the wait, so the least of many runs
    # counts. Their number is fixed: the ranks run together.
    with steps.use_groups(groups):
        real = min(peak(lambda x: target(x, *arguments), torch.ones(SHAPE)) for _ in range(20))
    return [] if real == fake else [(name, real, fake)]


def bound_equals_direct(
    target: Callable[..., Any], arguments: tuple[Any, ...], rank: int, groups: steps.Groups
) -> bool:
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"), *arguments)),))
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))
    bound = bind(fx.GraphModule(nn.Module(), graph), groups)
    with steps.use_groups(groups):
        return torch.equal(bound(x)[0], target(x, *arguments))
