"""The border of a captured graph: from torch's description of placeholders and results to a
trace's."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.dynamo.joint import RawJoint
from autopar.capture.dynamo.preparing import Prepared
from autopar.capture.folding import Run, repeat
from autopar.capture.graphs import dtype_of, emit, is_tensor, shape_of, sweep
from autopar.capture.normalize.random_draws import next_state
from autopar.capture.normalize.tangents import add_tangents_last
from autopar.capture.precision import absorb_casts, before_cast, cast_input, widen_gradient
from autopar.capture.trace import Input, KnownBuffer, Output, Parameter, Trace
from autopar.errors import CaptureError, Where
from autopar.ops import random


class Border:
    """The placeholders and results of the graph; made before the passes, which keep their order.

    A tied tensor has one placeholder and one gradient, under its first name.
    """

    def __init__(self, raw: RawJoint, call: Prepared) -> None:
        self.raw, self.aliases, self.graph, self.stored = (
            raw,
            dict(call.aliases),
            raw.graph,
            dict(call.stored),
        )
        self.inference = call.inference
        self.first = {
            name: first for first, others in call.aliases.items() for name in (first, *others)
        }
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.nodes: dict[tuple[str, Any], fx.Node] = {}
        for node, (kind, name) in zip(placeholders, raw.placeholders, strict=True):
            self._enter(node, (kind, self.first.get(name, name)))
        self.results = self._results()

    def narrow(self) -> None:
        """Give inputs their own dtype, and read parameters in a narrower dtype if the graph reads
        no other; their gradients are then made in it."""
        for (kind, name), node in self.nodes.items():
            if kind == "input" and self.raw.in_leaves[name][1].dtype != dtype_of(node):
                cast_input(self.graph, node, self.raw.in_leaves[name][1].dtype)
            elif kind == "parameter":
                self.stored.setdefault(name, dtype_of(node))
                absorb_casts(self.graph, node)
        narrow = {
            name
            for (kind, name), node in self.nodes.items()
            if kind == "parameter" and dtype_of(node) != self.stored[name]
        }
        self.results = [
            ((kind, name), before_cast(node) if kind == "gradient" and name in narrow else node)
            for (kind, name), node in self.results
        ]
        self._output.args = (tuple(node for _, node in self.results),)

    def widen(self) -> None:
        """Cast gradients to the stored dtype of their parameters, or the dtype of their inputs;
        call it after the passes, which match the ops that make gradients."""
        made = list(self._output.args[0])
        for position, ((kind, name), _) in enumerate(self.results):
            if kind == "gradient":
                made[position] = widen_gradient(made[position], self.stored[name])
            elif kind == "input gradient":
                made[position] = widen_gradient(made[position], self.raw.in_leaves[name][1].dtype)
        self._output.args = (tuple(made),)
        sweep(self.graph)

    def state_placeholders(self) -> list[fx.Node]:
        """Return the placeholders of parameters and buffers."""
        return [node for (kind, _), node in self.nodes.items() if kind in ("parameter", "buffer")]

    @property
    def _output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def add_random_state(self, state: fx.Node) -> None:
        """Add the random state as a buffer that every step changes."""
        entry = ("buffer", random.STATE)
        self.nodes[entry], self.aliases[random.STATE] = state, ()
        now = zip(
            (kind for kind, _ in self.results), self._output.args[0], strict=True
        )  # a draw's backward may be a gradient itself
        self.results = [*now, (("mutation", random.STATE), next_state(self.graph, state))]
        self._output.args = (tuple(node for _, node in self.results),)
        resting = [node for node in self.state_placeholders() if node is not state]
        if resting:
            resting[-1].append(state)

    def _enter(self, node: fx.Node, kind: tuple[str, Any]) -> None:
        if kind in self.nodes:
            node.replace_all_uses_with(self.nodes[kind])
        if kind in self.nodes or not is_tensor(node):
            assert not node.users, (
                f"{kind} is no tensor, and torch's graph holds the values of others"
            )
            self.graph.erase_node(node)
            return
        self.nodes[kind] = node
        if kind[0] in ("parameter", "buffer"):
            node.meta["module"] = kind[1]

    def _results(self) -> list[tuple[tuple[str, Any], fx.Node]]:
        output = self._output
        found: dict[tuple[str, Any], fx.Node] = {}
        for (kind, name), node in zip(self.raw.results, output.args[0], strict=True):
            entry = (kind, self.first.get(name, name))
            if node is None:
                continue
            if entry in found:
                with self.graph.inserting_before(output):
                    node = emit(
                        node, torch.ops.aten.add.Tensor, (found[entry], node), shape_of(node)
                    )
            found[entry] = node
        results = [
            (entry, node) for group in _GROUPS for entry, node in found.items() if entry[0] == group
        ]
        output.args = (tuple(node for _, node in results),)
        return results

    def repeat(self, runs: Iterable[Run], model: nn.Module) -> None:
        """Repeat the layers of a shortened model's runs in the finished graph, which becomes that
        of `model`.

        Raises:
            NotFoldable: the layers are not alike.
        """
        results = dict(zip((kind for kind, _ in self.results), self._output.args[0], strict=True))
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        ranks = {self.first.get(name, name): rank for rank, (name, _) in enumerate(named)}
        for run in runs:
            self.nodes, results = repeat(run, self.graph, self.nodes, results, ranks)
        self.results = list(results.items())

    def add_tangents_last(self) -> None:
        """Add tangents last in sums of gradients, if the model returns no loss."""
        if self.raw.loss is None:
            add_tangents_last(
                self.graph, [node for (kind, _), node in self.nodes.items() if kind == "tangent"]
            )

    def trace(self, model: nn.Module) -> Trace:
        """Return the trace of the finished graph."""
        positions = {kind: position for position, (kind, _) in enumerate(self.results)}
        final = self._output.args[0]
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        tensors |= {
            name: node.meta["val"]
            for (kind, name), node in self.nodes.items()
            if kind == "buffer" and name == random.STATE
        }
        entries = {
            group: self._parameters(group, tensors, positions) for group in ("parameter", "buffer")
        }
        paths = dict(enumerate(path for path, _ in self.raw.in_leaves))
        inputs = tuple(
            Input(
                paths[kind[1]],
                *_describe_node(node),
                gradient=positions.get(("input gradient", kind[1])),
                requires_grad=self.raw.in_leaves[kind[1]][1].requires_grad and not self.inference,
            )
            for kind, node in self.nodes.items()
            if kind[0] == "input"
        )
        leaves = self.raw.out_leaves
        tangents = {
            name: node.name for (kind, name), node in self.nodes.items() if kind == "tangent"
        }
        outputs = tuple(
            Output(
                leaves[kind[1]][0],
                *_describe_node(final[position]),
                kind[1] == self.raw.loss,
                tangents.get(kind[1], ""),
                requires_grad=leaves[kind[1]][1].requires_grad,
            )
            for kind, position in positions.items()
            if kind[0] == "output"
        )
        return Trace(
            graph=self.graph,
            parameters=entries["parameter"],
            buffers=entries["buffer"],
            inputs=inputs,
            outputs=outputs,
            mutated={
                kind[1]: position for kind, position in positions.items() if kind[0] == "mutation"
            },
            in_spec=self.raw.in_spec,
            out_spec=self.raw.out_spec,
            constants={
                position: leaf
                for position, (_, leaf) in enumerate(leaves)
                if not isinstance(leaf, torch.Tensor)
            },
            settings={
                position: leaf
                for position, (_, leaf) in enumerate(self.raw.in_leaves)
                if not isinstance(leaf, torch.Tensor)
            }
            | {
                position: value
                for position, value in self.raw.known.items()
                if isinstance(position, int)
            },
            fingerprint=_fingerprint(
                self.graph, entries["parameter"] + entries["buffer"], self.raw.known
            ),
            attributes=(
                *self.raw.attributes,
                *self.raw.outside,
                *self._known_buffers({kind[1] for kind in positions if kind[0] == "mutation"}),
            ),
            code=self.raw.code,
        )

    def _known_buffers(self, mutated: Collection[str]) -> Iterator[KnownBuffer]:
        """Yield the buffers whose values forward reads.

        Raises:
            CaptureError: forward also changes one of them.
        """
        for name, value in self.raw.known.items():
            if isinstance(name, int):
                continue
            if name in mutated:
                raise CaptureError(
                    f"forward reads the values of the buffer {name!r}, on which a branch or a shape"
                    " depends, and changes them",
                    where=Where(module=name.rpartition(".")[0]),
                    remedy=(
                        "count in the training loop, and pass the number as a plain argument: each"
                        " value has a program of its own; or compute with the buffer as a tensor"
                        " (torch.where)"
                    ),
                )
            yield KnownBuffer(name, value)

    def _parameters(
        self,
        group: str,
        tensors: Mapping[str, torch.Tensor],
        positions: Mapping[tuple[str, Any], int],
    ) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(
                name=name,
                aliases=self.aliases[name],
                node=node.name,
                shape=tuple(tensors[name].shape),
                view=shape_of(node),
                dtype=self.stored.get(name, tensors[name].dtype),
                requires_grad=tensors[name].requires_grad and not self.inference,
                gradient=positions.get(("gradient", name)),
                compute_dtype=node.meta["val"].dtype,
            )
            for (kind, name), node in self.nodes.items()
            if kind == group
        )


_GROUPS = ("output", "gradient", "mutation", "input gradient")  # of results, in their order


def _describe_node(node: fx.Node) -> tuple[str, tuple[int, ...], torch.dtype]:
    return node.name, shape_of(node), node.meta["val"].dtype


def _fingerprint(
    graph: fx.Graph, parameters: tuple[Parameter, ...], known: Mapping[int | str, torch.Tensor]
) -> str:
    digest = hashlib.sha256()
    for key, value in sorted(known.items(), key=lambda entry: str(entry[0])):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)} ".encode() + content)
    for entry in parameters:
        read = f" read as {entry.compute_dtype}" if entry.is_narrowed else ""
        digest.update(
            f"{entry.name} {entry.shape} {entry.dtype}{read} {entry.requires_grad}\n".encode()
        )
    for node in graph.nodes:
        value = node.meta.get("val")
        shapes = [
            tuple(item.shape)
            for item in (value if isinstance(value, (tuple, list)) else [value])
            if isinstance(item, torch.Tensor)
        ]
        arguments = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["key"])
        digest.update(f"{node.meta['key']} {shapes} {arguments}\n".encode())
    return digest.hexdigest()
