"""The effect of communication steps, casts and buckets on states. Each has one rule, which reads
only the arguments of the node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Shard

from autopar.core.collective import Collective, Kind
from autopar.core.layout import Layout
from autopar.core.placements import Halo, Mirrored
from autopar.validation.shards import apply_collective, is_even, local_lengths
from autopar.validation.states import PackedState, Several, State
from autopar.validation.traced import TracedModel

_REDUCING = ("all_reduce", "reduce_scatter")
_JOINING = ("all_gather", "all_to_all")


class MoveError(Exception):
    """Raised if a node does not compute the value that it must compute."""


def move(
    traced: TracedModel,
    state: Any,
    kind: Kind,
    settings: Sequence[Any],
    length: int | None,
    mesh_shape: Sequence[int],
) -> Any:
    """Return the state that results from a communication step.

    Args:
        traced: the traced model.
        state: state of the operand.
        kind: kind of the step.
        settings: settings of the step; the mesh axis is the last.
        length: global length of the joined dim if its shards differ in length, else None.
        mesh_shape: sizes of the mesh axes.

    Raises:
        MoveError: if the result is not a part of the traced value, or if partial sums are reduced
            in too narrow a dtype.
    """
    if isinstance(state, PackedState):
        return _move_bucket(traced, state, kind, settings, mesh_shape)
    if not isinstance(state, State):
        raise MoveError("its operand is not a tensor of the model")
    shape = traced.shape(state.ref)
    step, target_layout = _step_of(state.layout, kind, settings)
    if step.axis >= len(mesh_shape):
        raise MoveError(f"the mesh has no axis {step.axis}")
    target = apply_collective(state.layout, step, target_layout)
    if target is None or not target.fits(shape, mesh_shape):
        raise MoveError(
            f"a {kind} with settings {tuple(settings)} is not possible from {state.layout}"
        )
    if kind in _REDUCING:
        _check_reduction(traced, state)
    if kind in _JOINING:
        uneven = shape[step.dim] % state.layout.num_shards(step.dim, mesh_shape)
        due = shape[step.dim] if uneven else None
        if length != due:
            raise MoveError(
                f"it joins a dim of {shape[step.dim]} elements whose shards are"
                f" {'un' if uneven else ''}equal, with length={length}"
            )
    return State(state.ref, target, state.dtype)


def _check_reduction(traced: TracedModel, state: State) -> None:
    due = traced.reduced_in(state.ref)
    if torch.promote_types(due, state.dtype) != state.dtype:
        dtype_text, due_text = (str(d).removeprefix("torch.") for d in (state.dtype, due))
        raise MoveError(f"partial sums are reduced in {dtype_text}, expected {due_text}")


def _step_of(layout: Layout, kind: Kind, settings: Sequence[Any]) -> tuple[Collective, Layout]:
    """Return the collective with these settings, and the layout that determines the halo and the
    direction of a swap."""
    if kind in ("fetch", "store"):
        return Collective(kind, -1, -1, -1, "", "", 0), layout
    *rest, axis = settings
    reduce_op = str(rest[-1]) if kind in _REDUCING else ""
    dim, to_dim = (
        -1 if kind == "all_reduce" else int(rest[0]),
        int(rest[1]) if kind == "all_to_all" else -1,
    )
    step = Collective(kind, int(axis), dim, to_dim, reduce_op, "", 0)
    target_layout = layout
    if kind == "halo":
        target_layout = layout.with_placement(step.axis, Halo(*rest))
    if kind == "swap":
        back = isinstance(layout.placements[step.axis], Mirrored)
        target_layout = layout.with_placement(step.axis, Shard(dim) if back else Mirrored(dim))
    return step, target_layout


def _move_bucket(
    traced: TracedModel,
    packed: PackedState,
    kind: Kind,
    settings: Sequence[Any],
    mesh_shape: Sequence[int],
) -> PackedState:
    """Return the state of a bucket after a collective. Each member moves as it would alone. A
    bucket that is gathered or scattered has a row for each rank of the axis."""
    *_, axis = settings
    size, rows = (
        mesh_shape[axis],
        {
            "all_gather": (1, mesh_shape[axis]),
            "reduce_scatter": (mesh_shape[axis], 1),
            "all_reduce": (1, 1),
        },
    )
    if (
        kind not in rows
        or (kind != "all_reduce" and (settings[0] != 0 or packed.parts != size))
        or packed.count != rows[kind][0]
    ):
        raise MoveError(
            f"a bucket with {packed.count} of {packed.parts} shards does not support {kind} with"
            f" settings {tuple(settings)}"
        )
    if kind == "all_reduce" and packed.parts != 1:
        raise MoveError(f"an all-reduced tensor is in {packed.parts} shards in its bucket")
    moved = []
    for member, dim in zip(packed.members, packed.dims, strict=True):
        member_settings = tuple(settings) if kind == "all_reduce" else (dim, *settings[1:])
        moved_member = move(
            traced,
            State(member.ref, member.layout, packed.dtype),
            kind,
            member_settings,
            None,
            mesh_shape,
        )
        if not all(
            is_even(at, traced.shape(member.ref), mesh_shape)
            for at in (member.layout, moved_member.layout)
        ):
            raise MoveError(f"{member.ref[0]} has shards of different lengths in a bucket")
        moved.append(moved_member)
    return PackedState(tuple(moved), packed.dims, packed.parts, rows[kind][1], packed.dtype)


def pack(node: fx.Node, states: Sequence[Any]) -> PackedState:
    """Return the bucket that a node packs."""
    _, dims, parts, count, dtype = node.args
    members = tuple(s for s in states if isinstance(s, State))
    if len(members) != len(states) or len(dims) != len(members):
        raise MoveError("it packs an operand that is not a tensor of the model")
    for member in members:
        before = member.dtype
        if torch.promote_types(before, dtype) != dtype:
            raise MoveError(f"{member.ref[0]} of {before} is packed as {dtype}")
    return PackedState(members, tuple(map(int, dims)), int(parts), int(count), dtype)


def unpack(traced: TracedModel, node: fx.Node, packed: Any, mesh_shape: Sequence[int]) -> Several:
    """Return the states of the tensors that a node unpacks from a bucket.

    Args:
        traced: the traced model.
        node: the node that unpacks.
        packed: state of the bucket.
        mesh_shape: sizes of the mesh axes.

    Raises:
        MoveError: if the bucket was packed differently.
    """
    _, sizes, dims, parts, dtypes = node.args
    if not isinstance(packed, PackedState) or (packed.dims, packed.parts) != (tuple(dims), parts):
        raise MoveError("it unpacks a bucket that was packed differently")
    if not len(packed.members) == len(sizes) == len(dtypes):
        raise MoveError(f"it unpacks {len(sizes)} tensors from a bucket of {len(packed.members)}")
    states = []
    for member, size, dim, dtype in zip(packed.members, sizes, dims, dtypes, strict=True):
        lengths = local_lengths(traced.shape(member.ref), member.layout, mesh_shape)
        actual_sizes = tuple(size) or (1,)
        if packed.count < packed.parts:  # the bucket has only some parts of each tensor
            actual_sizes = (
                *actual_sizes[:dim],
                actual_sizes[dim] * packed.count // packed.parts,
                *actual_sizes[dim + 1 :],
            )
        if actual_sizes != (lengths or (1,)):
            raise MoveError(f"{member.ref[0]} is unpacked as {actual_sizes}, expected {lengths}")
        states.append(_cast_to(traced, member, dtype))
    return Several(tuple(states))


def cast(traced: TracedModel, state: Any, dtype: torch.dtype) -> State:
    """Return the state of a tensor in another dtype.

    Args:
        traced: the traced model.
        state: state of the tensor.
        dtype: the new dtype.

    Raises:
        MoveError: if the cast rounds partial sums, or drops digits that the traced value has.
    """
    if not isinstance(state, State):
        raise MoveError("it casts an operand that is not a tensor of the model")
    return _cast_to(traced, state, dtype)


def _cast_to(traced: TracedModel, state: State, dtype: torch.dtype) -> State:
    narrows = torch.promote_types(state.dtype, dtype) != dtype
    if narrows and any(isinstance(p, Partial) for p in state.layout.placements):
        raise MoveError(f"it rounds partial sums of {state.ref[0]} to {dtype}")
    traced_dtype = traced.value(state.ref).dtype
    if torch.promote_types(traced_dtype, dtype) != dtype:
        raise MoveError(
            f"it rounds {state.ref[0]} to {dtype}, but its dtype in the model is {traced_dtype}"
        )
    return State(state.ref, state.layout, dtype)
