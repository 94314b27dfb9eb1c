"""Numerical check of one strategy of a call: split → run → join.

The operands are split by the layouts of the strategy; a partial sum is split into random addends.
Every rank runs its local call on its parts. The results are joined by the layouts of the strategy,
where replicated results must agree, and compared with those of the full op.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from autopar.core.layout import Layout, Strategy, local_range
from autopar.core.placements import second_start, window
from autopar.errors import RuleError
from autopar.ops.expert_layers import DISPATCHED, Together
from autopar.rules.call import NO_TENSOR, Call, Operand, op_name
from autopar.rules.localization import localize
from autopar.rules.notation import AxisOption
from autopar.rules.site import Length, Local, Start, Starts

Coordinate = tuple[int, ...]
Parts = dict[Coordinate, torch.Tensor]
_JOIN: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check_option(call: Call, inputs: Sequence[torch.Tensor], option: AxisOption, n: int) -> None:
    """Check one option on one axis.

    Args:
        call: the call.
        inputs: its operands.
        option: the option.
        n: number of devices on the axis.

    Raises:
        RuleError: as for `check_strategy`.
    """
    strategy = Strategy(
        tuple(Layout((p,)) for p in option.inputs), tuple(Layout((p,)) for p in option.outputs)
    )
    check_strategy(call, inputs, strategy, (n,))


def check_strategy(
    call: Call, inputs: Sequence[torch.Tensor], strategy: Strategy, mesh_shape: Sequence[int]
) -> None:
    """Check one strategy on a mesh.

    Args:
        call: the call.
        inputs: its operands.
        strategy: the strategy.
        mesh_shape: number of devices on each axis of the mesh.

    Raises:
        RuleError: a rank cannot run the op, replicated results differ, or the joined result differs
            from that of the full op.
    """
    ranks, random = (
        list(itertools.product(*map(range, mesh_shape))),
        torch.Generator("cpu").manual_seed(0),
    )
    parts = [
        split(x, layout, mesh_shape, random)
        for x, layout in zip(inputs, strategy.inputs, strict=True)
    ]
    local, tolerance = localize(call, strategy, mesh_shape), tolerance_of(call)
    operands = {rank: [p[rank] for p in parts] for rank in ranks}
    expected = run(call.target, call.args, call.kwargs, inputs, (), ())
    try:
        if local.target in DISPATCHED:
            results = run_together(local, operands, mesh_shape)
        else:
            results = {
                rank: run(local.target, local.args, local.kwargs, operands[rank], mesh_shape, rank)
                for rank in ranks
            }
    except Exception as error:  # a custom op may raise any error
        raise _law_error(call, strategy, f"a rank cannot run the op: {error}") from error
    for number, full_result in enumerate(expected):
        if call.outputs[number] == NO_TENSOR:
            continue
        joined = join(
            {rank: results[rank][number] for rank in ranks},
            full_result,
            strategy.outputs[number],
            mesh_shape,
            tolerance,
        )
        if isinstance(joined, str) or not close(joined, full_result, tolerance):
            raise _law_error(
                call,
                strategy,
                joined if isinstance(joined, str) else _difference(number, joined, full_result),
            )


def run(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    mesh_shape: Sequence[int],
    rank: Coordinate,
) -> tuple[torch.Tensor, ...]:
    """Run a call on tensors, with its tokens replaced by the numbers of a rank.

    Args:
        target: the op.
        args: its positional arguments, with an `Operand` for each tensor and tokens as in `Local`.
        kwargs: its keyword arguments, likewise.
        tensors: the operands.
        mesh_shape: number of devices on each axis of the mesh.
        rank: position of the rank on each axis.

    Returns:
        A tuple of the results, also if there is one.
    """
    if target is operator.getitem:
        return (tensors[0],)
    filled = [_fill_arguments(a, tensors, mesh_shape, rank) for a in args]
    return _results(
        target(
            *filled, **{k: _fill_arguments(v, tensors, mesh_shape, rank) for k, v in kwargs.items()}
        )
    )


def run_together(
    local: Local, operands: Mapping[Coordinate, Sequence[torch.Tensor]], mesh_shape: Sequence[int]
) -> dict[Coordinate, tuple[torch.Tensor, ...]]:
    """Run a call that the ranks along a mesh axis compute together (`autopar.ops.expert_layers`).

    Args:
        local: the call; its second last argument is the axis.
        operands: rank → its operands.
        mesh_shape: number of devices on each axis of the mesh.

    Returns:
        Rank → its results.
    """
    *args, _, axis, _ = local.args
    results: dict[Coordinate, tuple[torch.Tensor, ...]] = {}
    for first in (rank for rank in operands if not rank[axis]):
        group = [(*first[:axis], place, *first[axis + 1 :]) for place in range(mesh_shape[axis])]
        outputs = local.target(
            [
                tuple(_fill_arguments(a, operands[rank], mesh_shape, rank) for a in args)
                for rank in group
            ],
            Together(),
        )
        results.update(zip(group, map(_results, outputs), strict=True))
    return results


def _fill_arguments(
    value: Any, tensors: Sequence[torch.Tensor], mesh_shape: Sequence[int], rank: Coordinate
) -> Any:
    if isinstance(value, Operand):
        return tensors[value.index]
    if isinstance(value, Start | Length | Starts):
        return value.at(mesh_shape, rank)
    return (
        [_fill_arguments(v, tensors, mesh_shape, rank) for v in value]
        if isinstance(value, tuple)
        else value
    )


def _results(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, list | tuple) else (result,)


def split(
    x: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], random: torch.Generator
) -> Parts:
    """Split a tensor into the parts of all ranks; ranks that differ only on replicated axes get the
    same addends of a partial sum.

    Args:
        x: the full tensor.
        layout: its layout.
        mesh_shape: number of devices on each axis of the mesh.
        random: a generator on the CPU for the addends of a partial sum. The default generator is
            not used, since this would change the random numbers of the user's script.

    Returns:
        Rank → its part.
    """
    partial = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Partial)]
    addends: Parts = {(): x}
    for axis in partial:
        reduce_op, size = layout.placements[axis].reduce_op, mesh_shape[axis]
        pieces = {at: _addends(part, reduce_op, size, random) for at, part in addends.items()}
        addends = {(*at, i): pieces[at][i] for at in addends for i in range(size)}
    ranks = itertools.product(*map(range, mesh_shape))
    return {
        rank: (
            _part(addends[tuple(rank[axis] for axis in partial)], layout, mesh_shape, rank).clone()
        )
        for rank in ranks
    }


def _part(
    x: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], rank: Coordinate
) -> torch.Tensor:
    """Return a rank's part including its halo; for a mirrored layout, both halves."""
    for dim in range(x.dim()):
        start, length = local_range(x.shape[dim], layout, dim, mesh_shape, rank)
        halo = layout.halo(dim)
        if layout.is_mirrored(dim):
            x = torch.cat(
                [
                    x.narrow(dim, at, length // 2)
                    for at in (start, second_start(x.shape[dim], length, start))
                ],
                dim=dim,
            )
        else:
            x = x.narrow(dim, start, length) if halo is None else window(x, halo, start, length)
    return x


def _indices(
    shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], rank: Coordinate
) -> tuple[torch.Tensor, ...]:
    """Return the indices, per dim, of the elements of the full tensor in a rank's part without
    halo."""
    indices = []
    for dim, size in enumerate(shape):
        start, length = local_range(size, layout, dim, mesh_shape, rank)
        positions = torch.arange(start, start + length)
        if layout.is_mirrored(dim):
            positions[length // 2 :] += second_start(size, length, start) - start - length // 2
        indices.append(positions)
    return torch.meshgrid(*indices, indexing="ij") if indices else ()


def _addends(
    x: torch.Tensor, reduce_op: str, size: int, random: torch.Generator
) -> list[torch.Tensor]:
    """Return random tensors that reduce to `x`; for a sum, they have the magnitude of `x` and all
    but the last are nonzero."""
    size_of_x = float(x.abs().max()) if x.numel() and x.is_floating_point() else 8.0
    unit = (
        2.0 ** math.floor(math.log2(size_of_x) - 2) if 0 < size_of_x < math.inf else 1.0
    )  # a power of two, so that products are exact
    drawn = [
        torch.randint(1, 9, x.shape, generator=random, device="cpu").to(x.device)
        for _ in range(size)
    ]
    noise = [(numbers * unit * (-1) ** i).to(x.dtype) for i, numbers in enumerate(drawn)]
    if reduce_op == "sum":
        rest = noise[:-1]
        return [*rest, x - sum(rest, torch.zeros_like(x))]
    sign = -1 if reduce_op == "max" else 1
    holder = torch.randint(0, size, x.shape, generator=random, device="cpu").to(x.device)
    return [torch.where(holder == i, x, x + sign * n.abs()) for i, n in enumerate(noise)]


def join(
    parts: Parts, whole: torch.Tensor, layout: Layout, mesh_shape: Sequence[int], tolerance: float
) -> torch.Tensor | str:
    """Join the parts of all ranks.

    Args:
        parts: rank → its part.
        whole: a tensor with the shape and dtype of the result.
        layout: layout of the parts.
        mesh_shape: number of devices on each axis of the mesh.
        tolerance: relative and absolute tolerance for the equality of replicated parts.

    Returns:
        The full tensor, or an error message about the parts.
    """
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Shard):
            continue
        merged: Parts = {}
        for rank, part in parts.items():
            at = (*rank[:axis], 0, *rank[axis + 1 :])
            if at not in merged:
                merged[at] = part
            elif isinstance(placement, Partial):
                merged[at] = _JOIN[placement.reduce_op](merged[at], part)
            elif not close(merged[at], part, tolerance):
                return f"ranks disagree on a result that is replicated on axis {axis}"
        parts = merged
    result = torch.zeros_like(whole)
    for rank, part in parts.items():
        part_indices = _indices(whole.shape, layout, mesh_shape, rank)
        if result[part_indices].shape != part.shape or part.dtype != whole.dtype:
            return (
                f"a rank has {part.dtype} {tuple(part.shape)}, expected {whole.dtype}"
                f" {tuple(result[part_indices].shape)}"
            )
        result[part_indices] = part
    return result


def tolerance_of(call: Call) -> float:
    """Return the relative and absolute tolerance for the results of a call. It covers rounding in
    float32, but not in half precision: a rule that needs that tolerance is refused."""
    single = any(info.dtype == torch.float32 for info in (*call.inputs, *call.outputs))
    return 1e-5 if single else 1e-9


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Return whether shapes and values of two tensors agree; NaNs are equal.

    Args:
        a: a tensor.
        b: another tensor.
        tolerance: relative and absolute tolerance.
    """
    if a.shape != b.shape:
        return False
    wide = torch.complex128 if a.is_complex() else torch.float64
    return torch.allclose(a.to(wide), b.to(wide), rtol=tolerance, atol=tolerance, equal_nan=True)


def _difference(number: int, joined: torch.Tensor, whole: torch.Tensor) -> str:
    """Return a message about the largest difference."""
    differences = (
        (joined.to(torch.complex128) - whole.to(torch.complex128)).abs().nan_to_num(math.inf)
    )
    at = tuple(int(i) for i in torch.unravel_index(differences.argmax(), differences.shape))
    return (
        f"result {number} differs from that of the full op: {joined[at].item():.6g} at {list(at)},"
        f" expected {whole[at].item():.6g}"
    )


def _law_error(call: Call, strategy: Strategy, what: str) -> RuleError:
    return RuleError(
        f"strategy {strategy} is wrong on shapes {[info.shape for info in call.inputs]}: {what}",
        where=call.where if call.where.op else op_name(call.target),
    )
