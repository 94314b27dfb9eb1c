"""An interpreter that runs a graph for all ranks in one process and joins their results.
`autopar.program.lockstep` runs the graphs of a whole step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autopar import ops
from autopar.capture.execute import place_on_device, promote, promoted_dtype
from autopar.core.collective import HOST_KINDS, JOINING, Collective, Kind
from autopar.core.layout import part_range
from autopar.core.mesh import Mesh
from autopar.core.placements import Halo, swap_parts, window
from autopar.errors import AutoparError, VerificationError
from autopar.kernels import collectives as steps
from autopar.kernels import dispatched
from autopar.kernels.bound_ops import part_of
from autopar.kernels.collectives import fake_groups
from autopar.kernels.fused import KERNELS, matmul_reduce_add_rmsnorm
from autopar.ops.expert_layers import Together
from autopar.ops.in_place import functional_form
from autopar.ops.norms import RmsNorm
from autopar.program.program import ProgramTensor
from autopar.program.splitting import join, reduce
from autopar.rules import where_of

# --------------------------------------------------------------------------------------------------
# Kernels of emitted graphs. A kernel fuses a product and a collective, which run one after the
# other here.

ByRank = list[Any]
Moved = Callable[[Kind, ByRank, Sequence[Any]], ByRank]
"""Runs a collective with its settings on tensors by rank."""


def run_kernel(
    node: fx.Node,
    operands: Sequence[ByRank | None],
    biases: ByRank,
    moved: Moved,
    in_dtype: Callable[[Any], Any],
) -> ByRank:
    """Run a kernel's node for all ranks. The product and the collective have the same results as
    separate ops.

    Args:
        node: the kernel's node.
        operands: the tensor operands in order, each by rank.
        biases: the bias of each rank's product, or None.
        moved: runs a collective.
        in_dtype: maps a requested dtype to the dtype to compute in.
    """
    a, b, *others = operands
    assert a is not None and b is not None, "the factors of a product"
    args: tuple[Any, ...] = node.args
    if node.target is matmul_reduce_add_rmsnorm:
        equation, over, norm = args[4:]
        products = _products(str(equation), a, b, biases)
        parts = moved("reduce_scatter", products, (over.dim, "sum", over.axis))
        return _norm_parts(parts, others, in_dtype(norm))
    *settings, over = args[2:]
    if KERNELS[node.target] == "all_gather":
        equation, operand = settings
        factors = [a, b]
        factors[operand] = gathered = moved("all_gather", factors[operand], (over.dim, over.axis))
        return list(
            zip(gathered, _products(str(equation), factors[0], factors[1], biases), strict=True)
        )
    _, equation = settings
    products = _products(str(equation), a, b, biases)
    if others and others[0] is not None:
        products = [x + product for x, product in zip(others[0], products, strict=True)]
    return moved("reduce_scatter", products, (over.dim, "sum", over.axis))


def _norm_parts(parts: ByRank, others: Sequence[ByRank | None], norm: RmsNorm) -> ByRank:
    """Return, for each rank, the sum with the residual, its square sum and its norm."""
    residuals, weights = others
    assert residuals is not None and weights is not None, "a norm has both"
    results = []
    for residual, part, weight in zip(residuals, parts, weights, strict=True):
        total = residual + part
        squares = ops.square_sum(total, norm.dtype)
        results.append((total, squares, ops.rms_norm(total, squares, weight, *norm)))
    return results


def _products(equation: str, a: ByRank, b: ByRank, biases: ByRank) -> ByRank:
    """Return each rank's product. Ranks with identical factors and bias share it."""
    products: dict[tuple[int, ...], Any] = {}
    calls = list(zip(a, b, biases, strict=True))
    for operands in calls:
        if tuple(map(id, operands)) not in products:
            products[tuple(map(id, operands))] = ops.dot(equation, *operands)
    return [products[tuple(map(id, operands))] for operands in calls]


# --------------------------------------------------------------------------------------------------
# One communication step within one group of virtual ranks, whose tensors are in one process.


def check_parts(parts: Sequence[Tensor], joined: int, length: int | None) -> None:
    """Check that the shards of the ranks of a group have matching shapes.

    Args:
        parts: one shard per rank.
        joined: the dim that is gathered, or −1.
        length: the full length of this dim if it is sharded unevenly.

    Raises:
        VerificationError: if the shapes do not match.
    """
    shapes = [tuple(part.shape) for part in parts]
    expected = [shapes[0]] * len(shapes)
    if length is not None:
        lengths_of_ranks = [
            part_range(length, [len(parts)], [index])[1] for index in range(len(parts))
        ]
        expected = [(*shapes[0][:joined], n, *shapes[0][joined + 1 :]) for n in lengths_of_ranks]
    if shapes != expected:
        raise VerificationError(f"ranks have different shapes: {shapes}")


def step(kind: Kind, parts: list[Tensor], dim: int, to_dim: int, reduce_op: str) -> list[Tensor]:
    """Run one communication step within one group.

    Results have the same strides as on real processes (`autopar.kernels.bound_ops`): they are
    contiguous, and along an axis of size 1 they are the operands. This matters because kernels may
    depend on strides.

    Args:
        kind: the kind of the step.
        parts: one tensor per rank.
        dim, to_dim: the dims that are gathered and sharded; see
            `autopar.core.collective.Collective`.
        reduce_op: the op of a reduction.
    """
    size = len(parts)
    if size == 1:
        return parts
    match kind:
        case "slice":
            return [_chunks(part, dim, size)[index] for index, part in enumerate(parts)]
        case "all_reduce":
            return [reduce(parts, reduce_op).contiguous()] * size
        case "swap":
            return [part.contiguous() for part in swap_parts(parts, dim)]
        case "reduce_scatter":
            return _chunks(reduce(parts, reduce_op), dim, size)
        case "all_gather":
            return [torch.cat(parts, dim=dim).contiguous()] * size
        case "all_to_all":
            return parts if dim == to_dim else _chunks(torch.cat(parts, dim=dim), to_dim, size)
        case "halo" | "fetch" | "store":
            raise AssertionError(f"{kind} is not a step on equal parts of one group")
        case _:
            assert_never(kind)


def with_halos(parts: list[Tensor], halo: Halo) -> list[Tensor]:
    """Return each shard with the neighboring elements of its halo."""
    lengths = [part.shape[halo.dim] for part in parts]
    joined = torch.cat(parts, dim=halo.dim)
    windows = (window(joined, halo, sum(lengths[:i]), length) for i, length in enumerate(lengths))
    return [part.contiguous() for part in windows]


def _chunks(x: Tensor, dim: int, size: int) -> list[Tensor]:
    return [chunk.contiguous() for chunk in x.split(part_of(x.shape[dim], size), dim)]


# --------------------------------------------------------------------------------------------------
# Graphs over lists of ranks, in one process, without process groups.
#
# Every node runs once per rank, and its value is a list of one result per rank. Ranks whose
# operands are identical objects share the result. Communication steps act on the list, group by
# group. Graphs are functional, so sharing is safe; an op that writes into its operand is refused.

Observer = Callable[[str, fx.Node, list[Any]], None]
Record = tuple[str, str, Collective]
_TENSORS = 4  # number of a kernel's first arguments, which are tensors or None


def node_name(node: fx.Node) -> str:
    """Return the node's key; without a key, its name in the graph."""
    return str(node.meta.get("key") or node.name)


def moved_name(node: fx.Node) -> str:
    """Return the key of the collective that a node runs; see `node_name`."""
    return str(node.meta["kernel"].key) if "kernel" in node.meta else node_name(node)


@dataclass(slots=True)
class Handed:
    """The value of a step between its start and its finish.

    Attributes:
        settings: the settings that the start has.
        result: the result; None after the finish.
    """

    settings: tuple[Any, ...]
    result: Tensor | None


class Ranks:
    """Runs graphs over lists of ranks, all on one device, and records their communication steps."""

    def __init__(
        self, mesh: Mesh, dtype: torch.dtype | None, observe: Observer | None, device: torch.device
    ) -> None:
        self.mesh, self.dtype, self.observe, self.device = mesh, dtype, observe, device
        self.ranks = range(mesh.num_devices)
        self.records: list[Record] = []
        self._instead: Mapping[Any, Any] = {}

    def __call__(
        self,
        graph_module: fx.GraphModule,
        phase: str,
        operands: Sequence[list[Any]],
        instead: Mapping[Any, Any] | None = None,
    ) -> list[list[Any]]:
        """Run a graph. Return its results in order, each as a list by rank.

        Args:
            graph_module: the graph.
            phase: the phase of the graph, for records and error messages.
            operands: the operands in order, each as a list by rank.
            instead: replacements for functions that nodes call.
        """
        self._instead = instead or {}
        env: dict[fx.Node, list[Any]] = {}
        remaining = iter(operands)
        uses = {node: len(node.users) for node in graph_module.graph.nodes}
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return [
                    env[result] if isinstance(result, fx.Node) else [result for _ in self.ranks]
                    for result in node.args[0]
                ]
            env[node] = (
                next(remaining)
                if node.op == "placeholder"
                else self._run_node(graph_module, phase, node, env)
            )
            if self.observe is not None:
                self.observe(phase, node, env[node])
            for operand in node.all_input_nodes:
                uses[operand] -= 1
                if not uses[operand]:
                    del env[operand]
        raise VerificationError(f"the {phase} graph has no output")

    def _run_node(
        self,
        graph_module: fx.GraphModule,
        phase: str,
        node: fx.Node,
        env: Mapping[fx.Node, list[Any]],
    ) -> list[Any]:
        try:
            if node.op == "get_attr":
                constant = promote(_attribute(graph_module, node), self.dtype)
                constant = constant.to(self.device) if isinstance(constant, Tensor) else constant
                return [constant for _ in self.ranks]
            if node.target in steps.KIND_OF:
                kind = steps.KIND_OF[node.target]
                return self._run_step(phase, node, env, kind, steps.positional(node))
            if node.target is steps.start:
                x, kind, *settings = node.args
                return [
                    Handed(node.args[1:], part)
                    for part in self._run_step(phase, node, env, kind, (x, *settings))
                ]
            if node.target is steps.finish:
                return _started_results(node, env)
            if node.target in KERNELS:
                return self._run_kernel(phase, node, env)
            if node.target in dispatched.TOGETHER:
                return self._run_dispatched(phase, node, env)
            if node.target in steps.PLACES:
                return [
                    self._range(rank, *node.args)[steps.PLACES.index(node.target)]
                    for rank in self.ranks
                ]
            return self._run_op(node, env)
        except (RuntimeError, ValueError, TypeError, IndexError, AutoparError) as error:
            raise VerificationError(
                f"{node_name(node)} fails in the {phase} graph: {error}", where=where_of(node)
            ) from error

    def _run_op(self, node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
        # virtual ranks share equal tensors, so no op may write into them
        target, without = functional_form(node.target) or (
            self._instead.get(node.target, node.target),
            "",
        )
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise VerificationError("an operator of the program modifies its operand in place")
        kwargs = {name: value for name, value in node.kwargs.items() if name != without}
        args, kwargs = tree_map(lambda a: promoted_dtype(a, self.dtype), (node.args, kwargs))
        operands = node.all_input_nodes
        results: dict[tuple[int, ...], Any] = {}
        by_rank = []
        for rank in self.ranks:
            key = tuple(id(env[operand][rank]) for operand in operands)
            if key not in results:
                here = fx.node.map_arg((args, kwargs), partial(_of_rank, env, rank))
                results[key] = tree_map(
                    lambda x: promote(x, self.dtype),
                    target(*here[0], **place_on_device(here[1], self.device)),
                )
            by_rank.append(results[key])
        return by_rank

    def _run_kernel(self, phase: str, node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
        operands = [env[x] if isinstance(x, fx.Node) else None for x in node.args[:_TENSORS]]
        named = [
            fx.node.map_arg(dict(node.kwargs), partial(_of_rank, env, rank)) for rank in self.ranks
        ]
        biases = [None if any(given.get("starts", ())) else given.get("bias") for given in named]
        in_dtype = partial(tree_map, partial(promoted_dtype, dtype=self.dtype))
        return run_kernel(node, operands, biases, partial(self._move, phase, node), in_dtype)

    def _run_dispatched(
        self, phase: str, node: fx.Node, env: Mapping[fx.Node, list[Any]]
    ) -> list[Any]:
        """Run experts on their tokens for all ranks of an axis together. The records contain the
        expected numbers of rows."""
        *operands, split, _, axis, _ = node.args
        self.records += [(phase, node_name(node), c.collective) for c in node.meta.get("own", ())]
        result: list[Any] = [None for _ in self.ranks]
        for group in self.mesh.groups(axis):
            ranks = []
            for rank in group:
                places = fake_groups(self.mesh, self.mesh.coordinate(rank))
                arguments = fx.node.map_arg(tuple(operands), partial(_of_rank, env, rank))
                ranks.append((*arguments, dispatched.starts_of(split, axis, places)))
            for rank, rank_result in zip(
                group, dispatched.TOGETHER[node.target](ranks, Together()), strict=True
            ):
                result[rank] = tree_map(lambda x: promote(x, self.dtype), rank_result)
        return result

    def _run_step(
        self,
        phase: str,
        node: fx.Node,
        env: Mapping[fx.Node, list[Any]],
        kind: Kind,
        arguments: Sequence[Any],
    ) -> list[Any]:
        x, *settings = arguments
        return self._move(phase, node, kind, env[x], settings)

    def _move(
        self, phase: str, node: fx.Node, kind: Kind, locals: list[Any], settings: Sequence[Any]
    ) -> list[Any]:
        """Run a communication step on tensors by rank, and record it."""
        if kind in HOST_KINDS:
            return self._copy_to_or_from_hosts(phase, node, kind, locals)
        *rest, axis = settings
        reduce_op = rest[-1] if kind in ("all_reduce", "reduce_scatter") else ""
        dim, to_dim = (
            rest[0] if kind != "all_reduce" else -1,
            rest[1] if kind == "all_to_all" else -1,
        )
        num_bytes = locals[0].numel() * locals[0].element_size()
        around = Halo(*rest) if kind == "halo" else None
        halo_bytes = num_bytes // locals[0].shape[dim] * around.length if around else 0
        dtype = str(locals[0].dtype).removeprefix("torch.")
        self.records.append(
            (
                phase,
                moved_name(node),
                Collective(kind, axis, dim, to_dim, reduce_op, dtype, num_bytes, halo_bytes),
            )
        )
        result: list[Any] = [None for _ in self.ranks]
        for group in self.mesh.groups(axis):
            parts = [locals[rank] for rank in group]
            same_layout = (
                [part.narrow(dim, 0, 0) for part in parts] if around else parts
            )  # with halos, parts may differ along the dim
            check_parts(
                same_layout,
                dim if kind in JOINING else -1,
                node.kwargs.get("length"),
            )
            results = (
                with_halos(parts, around) if around else step(kind, parts, dim, to_dim, reduce_op)
            )
            for rank, part in zip(group, results, strict=True):
                result[rank] = part
        return result

    def _copy_to_or_from_hosts(
        self, phase: str, node: fx.Node, kind: Kind, locals: list[Any]
    ) -> list[Any]:
        """Copy tensors between the ranks and their hosts."""
        dtype, num_bytes = (
            str(locals[0].dtype).removeprefix("torch."),
            locals[0].numel() * locals[0].element_size(),
        )
        self.records.append(
            (phase, moved_name(node), Collective(kind, -1, -1, -1, "", dtype, num_bytes))
        )
        copies = {id(x): x.clone(memory_format=torch.contiguous_format) for x in locals}
        return [copies[id(x)] for x in locals]

    def _range(
        self, rank: int, size: int, splitters: tuple[tuple[int, int], ...]
    ) -> tuple[int, int]:
        coordinate = self.mesh.coordinate(rank)
        return steps.range_of(size, splitters, [coordinate[axis] for axis, _ in splitters])


def _started_results(node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
    """Return the results of the start that a finish waits for. Each start has one finish."""
    results = []
    for handed in env[node.args[0]]:
        if (
            not isinstance(handed, Handed)
            or handed.settings != node.args[1:]
            or handed.result is None
        ):
            raise VerificationError(
                "it waits for a collective that was not started with these settings, or has"
                " already finished"
            )
        results.append(handed.result)
        handed.result = None
    return results


def _of_rank(env: Mapping[fx.Node, list[Any]], rank: int, node: fx.Node) -> Any:
    return env[node][rank]


def _attribute(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    value: Any = graph_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def join_results(
    graph_module: fx.GraphModule,
    results: Sequence[list[Any]],
    borders: Sequence[ProgramTensor],
    mesh: Mesh,
    tolerance: float | None,
    offset: int = 0,
) -> dict[str, Tensor]:
    """Join the results of a graph. Return full tensors by name.

    Args:
        graph_module: the graph.
        results: the results in order, each as a list by rank.
        borders: the name and layout of each result.
        mesh: the mesh of the ranks.
        tolerance: see `splitting.join`; None selects a tolerance by dtype.
        offset: the position of the first result among the graph's results.

    Raises:
        VerificationError: if a result cannot be joined. The message names the node that computes
            it.
    """
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    tensors = {}
    for index, (border, locals) in enumerate(zip(borders, results, strict=True)):
        try:
            tensors[border.name] = join(
                locals, border.layout, mesh, border.shape, _tolerance(locals[0], tolerance)
            )
        except (AutoparError, RuntimeError) as error:
            node = output.args[0][index + offset]
            raise VerificationError(
                f"{border.name!r} cannot be gathered from {node_name(node)}: {error}",
                where=where_of(node),
            ) from error
    return tensors


def _tolerance(x: Tensor, tolerance: float | None) -> float:
    if tolerance is not None:
        return tolerance
    return {torch.float64: 1e-11, torch.float32: 1e-5}.get(x.dtype.to_real(), 1e-2)
