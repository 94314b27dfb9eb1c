"""Graphs over lists of ranks, in one process, without process groups.

Every node is run once per rank and holds a list of one result per rank; ranks whose operands are the very same tensors
share the result. Communication steps act on the whole list, group by group. Graphs are functional, so sharing is safe;
an operator that writes into its operand is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autopar.capture.execute import placed, promoted, promoted_dtype
from autopar.collective import HOST_KINDS, Collective, Kind
from autopar.errors import AutoparError, VerificationError
from autopar.halo import Halo
from autopar.kernels import collectives as steps
from autopar.kernels import dispatched
from autopar.kernels.collectives import fake_groups
from autopar.kernels.fused import KERNELS
from autopar.mesh import Mesh
from autopar.ops.dispatched import Together
from autopar.ops.in_place import functional_form
from autopar.rules import where_of
from autopar.run.group_steps import check_parts, step, with_halos
from autopar.run.lockstep_kernels import run_kernel

Observer = Callable[[str, fx.Node, list[Any]], None]
Record = tuple[str, str, Collective]
_TENSORS = 4  # a kernel's first arguments, which are tensors or none
_KINDS: dict[Any, Kind] = {
    steps.all_gather: "all_gather",
    steps.reduce_scatter: "reduce_scatter",
    steps.all_reduce: "all_reduce",
    steps.all_to_all: "all_to_all",
    steps.halo: "halo",
    steps.swap: "swap",
    steps.shard: "slice",
    steps.fetch: "fetch",
    steps.store: "store",
}


def node_name(node: fx.Node) -> str:
    """The node in the user's words where it has a key, else its name in the graph."""
    return str(node.meta.get("key") or node.name)


def moved_name(node: fx.Node) -> str:
    """As `node_name`, of the collective that a node does."""
    return str(node.meta["kernel"].key) if "kernel" in node.meta else node_name(node)


@dataclass(slots=True)
class Handed:
    """What an early step made, from its start to its finish, which takes it; `settings` are those of the start."""

    settings: tuple[Any, ...]
    result: Tensor | None


class Ranks:
    """Runs graphs over lists of ranks, all on one device, and records their communication steps."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype | None, observe: Observer | None, device: torch.device) -> None:
        self.mesh, self.dtype, self.observe, self.device = mesh, dtype, observe, device
        self.ranks = range(mesh.num_devices)
        self.records: list[Record] = []
        self._instead: Mapping[Any, Any] = {}

    def __call__(
        self, graph_module: fx.GraphModule, phase: str, operands: Sequence[list[Any]], instead: Mapping[Any, Any] | None = None
    ) -> list[list[Any]]:
        """The results in the order of the graph's output tuple, each a list by rank.

        Args:
            instead: by a node's target what runs in its place.
        """
        self._instead = instead or {}
        env: dict[fx.Node, list[Any]] = {}
        remaining = iter(operands)
        uses = {node: len(node.users) for node in graph_module.graph.nodes}
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return [env[result] if isinstance(result, fx.Node) else [result for _ in self.ranks] for result in node.args[0]]
            env[node] = next(remaining) if node.op == "placeholder" else self._run_node(graph_module, phase, node, env)
            if self.observe is not None:
                self.observe(phase, node, env[node])
            for operand in node.all_input_nodes:
                uses[operand] -= 1
                if not uses[operand]:
                    del env[operand]
        raise VerificationError(f"the {phase} graph has no output")

    def _run_node(self, graph_module: fx.GraphModule, phase: str, node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
        try:
            if node.op == "get_attr":
                constant = promoted(_attribute(graph_module, node), self.dtype)
                constant = constant.to(self.device) if isinstance(constant, Tensor) else constant
                return [constant for _ in self.ranks]
            if node.target in _KINDS:
                return self._run_step(phase, node, env, _KINDS[node.target], steps.positional(node))
            if node.target is steps.start:
                x, kind, *settings = node.args
                return [Handed(node.args[1:], part) for part in self._run_step(phase, node, env, kind, (x, *settings))]
            if node.target is steps.finish:
                return _handed_over(node, env)
            if node.target in KERNELS:
                return self._run_kernel(phase, node, env)
            if node.target in dispatched.TOGETHER:
                return self._run_dispatched(phase, node, env)
            if node.target in steps.PLACES:
                return [self._range(rank, *node.args)[steps.PLACES.index(node.target)] for rank in self.ranks]
            return self._run_op(node, env)
        except (RuntimeError, ValueError, TypeError, IndexError, AutoparError) as error:
            raise VerificationError(f"{node_name(node)} fails in the {phase} graph: {error}", where=where_of(node)) from error

    def _run_op(self, node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
        # virtual ranks share tensors that are alike, which none may write into
        target, without = functional_form(node.target) or (self._instead.get(node.target, node.target), "")  # type: ignore[arg-type]
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise VerificationError("an operator of the program writes into its operand")
        kwargs = {name: value for name, value in node.kwargs.items() if name != without}
        args, kwargs = tree_map(lambda a: promoted_dtype(a, self.dtype), (node.args, kwargs))
        operands = node.all_input_nodes
        results: dict[tuple[int, ...], Any] = {}
        by_rank = []
        for rank in self.ranks:
            key = tuple(id(env[operand][rank]) for operand in operands)
            if key not in results:
                here = fx.node.map_arg((args, kwargs), partial(_of_rank, env, rank))
                results[key] = tree_map(lambda x: promoted(x, self.dtype), target(*here[0], **placed(here[1], self.device)))
            by_rank.append(results[key])
        return by_rank

    def _run_kernel(self, phase: str, node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
        operands = [env[x] if isinstance(x, fx.Node) else None for x in node.args[:_TENSORS]]
        named = [fx.node.map_arg(dict(node.kwargs), partial(_of_rank, env, rank)) for rank in self.ranks]
        biases = [None if any(given.get("starts", ())) else given.get("bias") for given in named]
        in_dtype = partial(tree_map, partial(promoted_dtype, dtype=self.dtype))
        return run_kernel(node, operands, biases, partial(self._moved, phase, node), in_dtype)

    def _run_dispatched(self, phase: str, node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
        """Experts with their tokens, of all ranks of an axis together; recorded are the rows that were expected."""
        *operands, split, _, axis, _ = node.args
        self.records += [(phase, node_name(node), c.collective) for c in node.meta.get("own", ())]
        result: list[Any] = [None for _ in self.ranks]
        for group in self.mesh.groups(axis):  # type: ignore[arg-type]
            ranks = []
            for rank in group:
                places = fake_groups(self.mesh, self.mesh.coordinate(rank))
                given = fx.node.map_arg(tuple(operands), partial(_of_rank, env, rank))
                ranks.append((*given, dispatched.starts_of(split, axis, places)))  # type: ignore[arg-type]
            for rank, made in zip(group, dispatched.TOGETHER[node.target](ranks, Together()), strict=True):  # type: ignore[index]
                result[rank] = tree_map(lambda x: promoted(x, self.dtype), made)
        return result

    def _run_step(self, phase: str, node: fx.Node, env: Mapping[fx.Node, list[Any]], kind: Kind, arguments: Sequence[Any]) -> list[Any]:
        x, *settings = arguments
        return self._moved(phase, node, kind, env[x], settings)

    def _moved(self, phase: str, node: fx.Node, kind: Kind, locals: list[Any], settings: Sequence[Any]) -> list[Any]:
        """What a step makes of tensors by rank."""
        if kind in HOST_KINDS:
            return self._copied(phase, node, kind, locals)
        *rest, axis = settings
        reduce_op = rest[-1] if kind in ("all_reduce", "reduce_scatter") else ""
        dim, to_dim = rest[0] if kind != "all_reduce" else -1, rest[1] if kind == "all_to_all" else -1
        num_bytes = locals[0].numel() * locals[0].element_size()
        around = Halo(*rest) if kind == "halo" else None
        halo_bytes = num_bytes // locals[0].shape[dim] * around.length if around else 0
        dtype = str(locals[0].dtype).removeprefix("torch.")
        self.records.append((phase, moved_name(node), Collective(kind, axis, dim, to_dim, reduce_op, dtype, num_bytes, halo_bytes)))
        result: list[Any] = [None for _ in self.ranks]
        for group in self.mesh.groups(axis):
            parts = [locals[rank] for rank in group]
            alike = [part.narrow(dim, 0, 0) for part in parts] if around else parts  # with halos, parts may differ along the dim
            check_parts(alike, dim if kind in ("all_gather", "all_to_all") else -1, node.kwargs.get("length"))
            results = with_halos(parts, around) if around else step(kind, parts, dim, to_dim, reduce_op)
            for rank, part in zip(group, results, strict=True):
                result[rank] = part
        return result

    def _copied(self, phase: str, node: fx.Node, kind: Kind, locals: list[Any]) -> list[Any]:
        """Between the ranks and their hosts."""
        dtype, num_bytes = str(locals[0].dtype).removeprefix("torch."), locals[0].numel() * locals[0].element_size()
        self.records.append((phase, moved_name(node), Collective(kind, -1, -1, -1, "", dtype, num_bytes)))
        copies = {id(x): x.clone(memory_format=torch.contiguous_format) for x in locals}
        return [copies[id(x)] for x in locals]

    def _range(self, rank: int, size: int, splitters: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        coordinate = self.mesh.coordinate(rank)
        return steps.range_of(size, splitters, [coordinate[axis] for axis, _ in splitters])


def _handed_over(node: fx.Node, env: Mapping[fx.Node, list[Any]]) -> list[Any]:
    """What the start of an early step made, once."""
    results = []
    for handed in env[node.args[0]]:  # type: ignore[index]
        if not isinstance(handed, Handed) or handed.settings != node.args[1:] or handed.result is None:
            raise VerificationError("it finishes what was not started with these settings, or was finished before")
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
