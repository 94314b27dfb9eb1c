"""Checks that all ranks have equal values where a program requires it: weights, global batches,
random states, and gradients of a loss that is computed outside the program."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.layout import Layout
from autopar.core.placements import splits
from autopar.errors import RuntimeStateError
from autopar.program.program import ProgramTensor
from autopar.runtime.backward import refuse_transforms
from autopar.runtime.rank_comm import of_all_alike

log = logging.getLogger("autopar")
_ROUNDED = 1e-3  # relative difference of norms that rounding may cause


def share_weights(model: nn.Module, devices: DeviceMesh) -> None:
    """Overwrite parameters and buffers that differ between ranks with those of the mesh's first
    rank, and log a warning.

    Args:
        model: the plain model.
        devices: the mesh that the model runs on.

    Raises:
        RuntimeStateError: if shapes or dtypes differ, or some ranks have values and others do not.
    """
    if devices.size() == 1:
        return
    tensors = dict(_tensors(model))
    every = _gather_facts("weights", [(name, _digest(x)) for name, x in tensors.items()], devices)
    facts_by_rank = [dict(facts) for facts in every]
    # all ranks need the names in the same order, since the following code uses collectives
    names = dict.fromkeys(name for facts in facts_by_rank for name in facts)
    different = [name for name in names if len({facts.get(name) for facts in facts_by_rank}) > 1]
    if not different:
        return
    if any(facts.get(name) is None for name in different for facts in facts_by_rank):
        raise RuntimeStateError(
            f"{different[0]!r} has values on some ranks and is missing or on the meta device on"
            " others",
            remedy=(
                "build the model in the same way on every rank: with weights, or on the meta device"
                " followed by load_state_dict of the compiled module"
            ),
        )
    other = next(
        (name for name in different if len({facts[name][:2] for facts in facts_by_rank}) > 1), None
    )
    if other is not None:
        kinds = " and ".join(
            dict.fromkeys(f"{facts[other][1]} {facts[other][0]}" for facts in facts_by_rank)
        )
        remedy = "build the model with the same configuration and dtype on every rank"
        raise RuntimeStateError(f"{other!r} is {kinds} on different ranks", remedy=remedy)
    source = _ranks(devices)[0]
    for name in different:
        value = tensors[name].detach()
        received = value.to(devices.device_type).contiguous()
        dist.broadcast(received, source)
        with torch.no_grad():
            value.copy_(received)
    if dist.get_rank() == source:
        log.warning(
            "%d parameters or buffers differ between ranks, first %r: all ranks use those of rank"
            " %d (set the same seed on every rank to avoid this)",
            len(different),
            different[0],
            source,
        )


def check_batch(names: Sequence[str], values: Sequence[Tensor], devices: DeviceMesh) -> None:
    """Check that the global batch is equal on all ranks.

    Args:
        names: the names of the inputs.
        values: the inputs of this rank.
        devices: the mesh that the model runs on.

    Raises:
        RuntimeStateError: on every rank, naming the inputs that differ.
    """
    if devices.size() == 1 or dist.get_world_size() != devices.size():
        return
    every = _gather_facts("batch", [_digest(x) for x in values], devices)
    if different := _names_that_differ(names, every):
        odd, usual = _odd_and_usual(_ranks(devices), every)
        raise RuntimeStateError(
            f"{odd} got a different batch from {usual}: {', '.join(map(repr, different))}",
            remedy=(
                "pass the same batch on every rank, which uses its shard of it; or compile with"
                ' batch="local" and pass each rank its own shard (see pm.sampler and'
                " pm.input_layouts)"
            ),
        )


def check_parts(
    names: Sequence[str], values: Sequence[Tensor], layouts: Sequence[Layout], devices: DeviceMesh
) -> None:
    """Check that ranks which hold the same shard of an input pass equal tensors for it.

    Args:
        names: the names of the inputs.
        values: this rank's shard of each input.
        layouts: the layout of each input on the mesh.
        devices: the mesh that the model runs on.

    Raises:
        RuntimeStateError: on every rank, naming the ranks and the inputs.
    """
    if devices.size() == 1 or dist.get_world_size() != devices.size():
        return
    sharing = [_group_sharers(layout, devices) for layout in layouts]
    if not any(sharing):
        return
    digests = [_digest(x) if groups else None for x, groups in zip(values, sharing, strict=True)]
    facts = dict(zip(_ranks(devices), _gather_facts("batch", digests, devices), strict=True))
    different: dict[tuple[int, ...], list[str]] = {}
    for place, (name, groups) in enumerate(zip(names, sharing, strict=True)):
        for group in groups:
            if len({facts[rank][place] for rank in group}) > 1:
                different.setdefault(group, []).append(name)
    if different:
        ranks, inputs = next(iter(different.items()))
        places = [names.index(name) for name in inputs]
        group_facts = [[facts[rank][place] for place in places] for rank in ranks]
        odd, usual = _odd_and_usual(ranks, group_facts)
        raise RuntimeStateError(
            f"{odd} got a different batch from {usual}: {', '.join(map(repr, inputs))}, which the"
            f" plan does not shard between {_list_ranks(ranks)}",
            remedy=(
                "pass the same tensors on these ranks (pm.input_layouts lists the axes that shard"
                ' each input); or compile with batch="global" and pass the whole batch as'
                " example_inputs and on every rank"
            ),
        )


def check_random_state(state: int, devices: DeviceMesh) -> None:
    """Check that all ranks have the same random state.

    Args:
        state: the random state of this rank.
        devices: the mesh that the model runs on.

    Raises:
        RuntimeStateError: on every rank, naming the ranks that differ.
    """
    if devices.size() == 1 or dist.get_world_size() != devices.size():
        return
    ranks, states = _ranks(devices), _gather_facts("random state", state, devices)
    if len(set(states)) > 1:
        odd, usual = _odd_and_usual(ranks, states)
        raise RuntimeStateError(
            f"{odd} began with a different random state from {usual}",
            remedy=(
                "set the same state on every rank: pm.manual_seed(seed) or pm.random_state = state;"
                " each rank then draws the numbers of its own shard"
            ),
        )


class CopiedWeights:
    """Checks that ranks which hold the same shard of a parameter hold equal values.

    If only one rank changes its parameters, for example by loading a file, it would continue
    training with other values than the ranks that hold copies. The norms of copies are compared in
    calls 2, 4, 8 and so on, so that each rank reads its parameters only once. Ranks that compute
    the same gradient may round it differently, so norms may differ slightly.
    """

    def __init__(self) -> None:
        self._num_calls = 0

    def check(self, held: Iterable[tuple[ProgramTensor, Tensor]], devices: DeviceMesh) -> None:
        """Compare the copies in calls 2, 4, 8 and so on. All ranks must call this.

        Args:
            held: pairs of the program's tensor and the local tensor of each parameter on this rank.
            devices: the mesh of the parameters.

        Raises:
            RuntimeStateError: on every rank, naming the ranks and a parameter that differs.
        """
        self._num_calls += 1
        is_turn = self._num_calls > 1 and self._num_calls & (self._num_calls - 1) == 0
        if not is_turn or dist.get_world_size() == 1:
            return
        refuse_transforms()  # before it runs ops on parameters
        here = tuple(devices.get_coordinate() or ())
        norms = {
            tensor.name: (_part_of(tensor.layout, here), _norm(local)) for tensor, local in held
        }
        facts: list[dict[str, tuple[object, float]]] = of_all_alike("compares its weights", norms)
        copies: dict[tuple[str, object], dict[int, float]] = {}
        for rank, rank_norms in enumerate(facts):
            for name, (part, norm) in rank_norms.items():
                copies.setdefault((name, part), {})[rank] = norm
        for (name, _), norms_of_part in copies.items():
            largest = max(norms_of_part.values())
            if largest - min(norms_of_part.values()) > _ROUNDED * largest:
                odd, usual = _odd_and_usual(
                    list(norms_of_part),
                    [round(norm / largest / _ROUNDED) for norm in norms_of_part.values()],
                )
                raise RuntimeStateError(
                    f"{odd} holds different values of {name!r} from {usual}, although both store"
                    " the same shard",
                    remedy=(
                        "change parameters in the same way on every rank: call load_state_dict,"
                        " Checkpoints.load and the optimizer's step on all ranks"
                    ),
                )


def _part_of(layout: Layout, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return a key for the shard of a tensor that a rank holds. Ranks that hold copies of the same
    shard have equal keys."""
    return tuple(
        index if splits(placement) else 0
        for placement, index in zip(layout.placements, coordinate, strict=True)
    )


def _norm(local: Tensor) -> float:
    """Return the norm of a local tensor; 0 if it has no values, or the norm is not finite."""
    if local.is_meta:
        return 0.0
    values = torch.view_as_real(local.detach()) if local.is_complex() else local.detach()
    dtype = torch.promote_types(torch.float32, values.dtype)
    norm = float(torch.linalg.vector_norm(values, dtype=dtype))
    return norm if math.isfinite(norm) else 0.0


class PlainTensorCheck:
    """Checks plain tensors that scripts combine with distributed parameters. Ops treat them as
    equal on all ranks.

    For each function and each combination of shapes, calls 1, 2, 4, 8 and so on are checked.
    """

    def __init__(self) -> None:
        self._num_calls: Counter[tuple[str, tuple[torch.Size, ...]]] = Counter()

    def check(self, function: str, given: Sequence[Tensor], devices: DeviceMesh) -> None:
        """Check that the tensors are equal on all ranks. Tensors that require a gradient, such as a
        loss, are skipped, since `check_tangents` checks them.

        Args:
            function: the name of the function, for error messages.
            given: the plain tensors that are passed to the function.
            devices: the mesh of the distributed operands.

        Raises:
            RuntimeStateError: on every rank, if they differ.
        """
        given = [x for x in given if not x.requires_grad and not x.is_meta]
        if not given or devices.size() == 1 or dist.get_world_size() != devices.size():
            return
        key = function, tuple(x.shape for x in given)
        self._num_calls[key] += 1
        if self._num_calls[key] & (self._num_calls[key] - 1):
            return
        every = _gather_facts(f"tensors passed to {function}", [_digest(x) for x in given], devices)
        if any(digests != every[0] for digests in every):
            odd, usual = _odd_and_usual(_ranks(devices), every)
            message = (
                f"{odd} passed a different tensor to {function} from {usual}, together with a"
                " sharded parameter or gradient"
            )
            raise RuntimeStateError(
                message,
                remedy=(
                    "use the same tensor on every rank: set the same seed for random tensors"
                    " (torch.manual_seed)"
                ),
            )


def check_tangents(returned: Sequence[tuple[str, Tensor | None]], devices: DeviceMesh) -> None:
    """Check that backward begins with the same gradients on all ranks. Each rank computed its loss
    from full outputs.

    Args:
        returned: pairs of the name of an output and the gradient of the loss with respect to it.
            The gradient is None if the loss does not depend on the output. It is an empty tensor if
            the output is sharded.
        devices: the mesh that the model runs on.

    Raises:
        RuntimeStateError: on every rank, naming the outputs whose gradients differ.
    """
    if devices.size() == 1 or dist.get_world_size() != devices.size():
        return
    every = _gather_facts(
        "gradients of outputs", [None if x is None else _digest(x) for _, x in returned], devices
    )
    different = _names_that_differ([name or "the result" for name, _ in returned], every)
    if different:
        odd, usual = _odd_and_usual(_ranks(devices), every)
        raise RuntimeStateError(
            f"{odd} computed a different loss from the same outputs than {usual}: the gradients of"
            f" {', '.join(different)} differ",
            remedy=(
                "compute the same loss on every rank, with the same labels and the same seed for"
                " random numbers; or let the model compute its loss"
            ),
        )


def _names_that_differ(names: Sequence[str], facts: Sequence[Sequence[object]]) -> list[str]:
    """Return the names whose facts differ between ranks.

    Args:
        names: the names.
        facts: the facts of each rank, one per name.
    """
    return [name for name, *each in zip(names, *facts, strict=True) if len(set(each)) > 1]


def _odd_and_usual(ranks: Sequence[int], facts: Sequence[object]) -> tuple[str, str]:
    """Divide ranks into those whose facts differ from the most common fact, and the others. If
    several facts are equally common, the first of them counts as usual.

    Args:
        ranks: the ranks.
        facts: the fact of each rank, compared by `==`. They are not all equal.

    Returns:
        Both groups in words, such as ``rank 1`` and ``ranks 0, 2 and 3``.
    """
    counts = [sum(fact == other for other in facts) for fact in facts]
    usual = facts[counts.index(max(counts))]
    usual_ranks = [rank for rank, fact in zip(ranks, facts, strict=True) if fact == usual]
    return _list_ranks([rank for rank in ranks if rank not in usual_ranks]), _list_ranks(
        usual_ranks
    )


def _list_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words, such as ``rank 3`` or ``ranks 0 and 1``. Of more than eight ranks, the
    first eight are listed and the others are counted."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _group_sharers(layout: Layout, devices: DeviceMesh) -> list[tuple[int, ...]]:
    """Group the ranks that hold the same shard of a tensor.

    Args:
        layout: the layout of the tensor on the mesh.
        devices: the mesh.

    Returns:
        The ranks of each group that has more than one rank.
    """
    copied_axes = [
        axis for axis, placement in enumerate(layout.placements) if not splits(placement)
    ]
    others = [axis for axis in range(devices.mesh.ndim) if axis not in copied_axes]
    parts = math.prod(devices.mesh.shape[axis] for axis in others)
    groups = devices.mesh.permute(*others, *copied_axes).reshape(parts, -1).tolist()
    return [tuple(group) for group in groups if len(group) > 1]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(x: Tensor) -> tuple[tuple[int, ...], str, str] | None:
    """Return the shape, the dtype and a hash of the values in row-major order; None if the tensor
    has no values."""
    if x.is_meta:
        return None
    shape, dtype = tuple(x.shape), str(x.dtype)
    # `contiguous` first, since `reshape` keeps the stride of a tensor of one dim
    x = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
    return shape, dtype, hashlib.blake2b(x.view(torch.uint8).numpy(), digest_size=16).hexdigest()


def _gather_facts(what: str, fact: object, devices: DeviceMesh) -> list[list]:
    """Gather the facts of the mesh's ranks, in mesh order."""
    facts = of_all_alike(f"compares its {what}", fact)
    return [facts[rank] for rank in _ranks(devices)]


def _ranks(devices: DeviceMesh) -> list[int]:
    return [int(rank) for rank in devices.mesh.flatten()]
