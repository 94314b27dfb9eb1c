"""One pass over an emitted graph: each node's state from those of the nodes that it reads.

A node that computes has to call what a rank calls of the traced node that its key names, on the
parts of what that node reads, in the layouts of a strategy of which `law` knows no counterexample.
All other nodes move, cast, pack or add, and have a rule each.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.core.layout import Strategy
from autopar.errors import AutoparError
from autopar.kernels import collectives as steps
from autopar.kernels.collectives import add_to
from autopar.kernels.fused import KERNELS
from autopar.kernels.packing import from_bucket, into_bucket
from autopar.rules import is_strategy
from autopar.validation.calls import differences, expected_call, node_operands, place_of
from autopar.validation.kernels import product_states
from autopar.validation.law import Verdict, judge
from autopar.validation.moves import KINDS, MoveError, cast, move, pack, unpack
from autopar.validation.states import InFlight, Ref, Several, State, Sum, shown, unjustified_error
from autopar.validation.traced import Traced

aten = torch.ops.aten


@dataclass
class Walk:
    """The states of one emitted graph.

    Attributes:
        phase: its name. chosen, again: per key the strategy that the plan has, and the one with
            which backward runs it again.
        how: how many nodes were justified in which way. open: keys of nodes of whose strategy only
            the op's rule says that it is right.
    """

    traced: Traced
    mesh_shape: tuple[int, ...]
    phase: str
    chosen: Mapping[str, Strategy]
    again: Mapping[str, Strategy]
    gradients: Mapping[str, tuple[Ref, tuple[Ref, ...]]] = field(default_factory=dict)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    how: Counter[str] = field(default_factory=Counter)
    open: dict[str, None] = field(default_factory=dict)

    def run(self, graph: fx.Graph, given: Sequence[Any]) -> list[Any]:
        """The states of what the graph returns.

        Args:
            given: those of its placeholders, in order.

        Raises:
            ValidationError: naming the first node that is not justified.
        """
        remaining = iter(given)
        for node in graph.nodes:
            if node.op == "output":
                return [
                    self.env[result] if isinstance(result, fx.Node) else None
                    for result in node.args[0]
                ]
            if node.op == "placeholder":
                self.env[node] = next(remaining, None)
                if self.env[node] is None:
                    raise unjustified_error(
                        node, self.phase, "the graph takes more than the program passes"
                    )
                continue
            try:
                self.env[node] = self._state(node)
            except MoveError as error:
                raise unjustified_error(node, self.phase, str(error)) from error
            except (IndexError, KeyError, TypeError, ValueError) as error:
                why = f"its arguments {node.args} are of no form that is known ({error})"
                raise unjustified_error(node, self.phase, why) from error
        raise AssertionError("a graph has an output")

    def _state(self, node: fx.Node) -> Any:
        place = place_of(node, self.env)
        if place is not None:
            return place
        for target, rule in self._rules().items():
            if node.target is target:
                return rule(node)
        if node.target in KINDS:
            x, *settings = steps.positional(node)
            return self._move(self.env[x], KINDS[node.target], settings, node)
        if node.target in KERNELS:
            return product_states(self, node)
        return self._compute(node)

    def _rules(self) -> dict[Callable[..., Any], Callable[[fx.Node], Any]]:
        return {
            operator.getitem: self._pick,
            steps.start: self._start,
            steps.finish: self._finish,
            add_to: self._add,
            into_bucket: lambda node: pack(node, [self.env[x] for x in node.args[0]]),
            from_bucket: lambda node: unpack(
                self.traced, node, self.env[node.args[0]], self.mesh_shape
            ),
        }

    def _move(self, state: Any, kind: str, settings: Sequence[Any], node: fx.Node) -> Any:
        self.how["step"] += 1
        return move(self.traced, state, kind, settings, node.kwargs.get("length"), self.mesh_shape)  # type: ignore[arg-type]

    def _pick(self, node: fx.Node) -> Any:
        source, number = self.env[node.args[0]], int(node.args[1])  # type: ignore[index, arg-type]
        if not isinstance(source, Several) or not 0 <= number < len(source.parts):
            raise MoveError("it picks a result of what has one")
        return source.parts[number]

    def _start(self, node: fx.Node) -> InFlight:
        x, kind, *settings = node.args
        return InFlight(
            self._move(self.env[x], str(kind), settings, node),
            (kind, *settings, node.kwargs.get("length")),
        )  # type: ignore[index]

    def _finish(self, node: fx.Node) -> Any:
        source, *settings = node.args
        flying = self.env[source]  # type: ignore[index]
        if not isinstance(flying, InFlight) or flying.settings != (
            *settings,
            node.kwargs.get("length"),
        ):
            raise MoveError("it finishes what was not started with these settings")
        if [user.target for user in source.users] != [steps.finish]:  # type: ignore[union-attr]
            raise MoveError("what it started is read by others as well")
        return flying.made

    def _add(self, node: fx.Node) -> Sum:
        total, gradient = (self.env[x] for x in node.args)  # type: ignore[index]
        if not isinstance(total, Sum) or total.is_added:
            raise MoveError(
                f"it adds to {shown(total)}, which is no sum that waits for this microbatch"
            )
        of, casts = self.gradients[total.parameter]
        if not isinstance(gradient, State) or gradient.ref not in (of, *casts):
            raise MoveError(f"it adds {shown(gradient)} to the sum of {total.parameter!r}")
        if gradient.layout.plain != total.layout:
            raise MoveError(f"it adds {shown(gradient)} to a sum in {total.layout}")
        return replace(total, is_added=True)

    def _compute(self, node: fx.Node) -> Any:
        key = str(node.meta.get("key"))
        origin = self.traced.by_key.get(key)
        if origin is None or (self._passes_on(node) and not self._reads_as(node, origin)):
            return self._passed_on(node)
        strategies = self.again if node.meta.get("recomputed") else self.chosen
        if key not in strategies:
            raise MoveError("the plan has no strategy for it")
        return self.result_of(node, origin, strategies[key])

    def _passes_on(self, node: fx.Node) -> bool:
        return node.target in (aten._to_copy.default, aten.clone.default)

    def _reads_as(self, node: fx.Node, origin: fx.Node) -> bool:
        """Whether a cast or a copy is that of the trace, and no other under its key."""
        state = self.env[node.args[0]]  # type: ignore[index]
        return (
            origin.target is node.target
            and isinstance(state, State)
            and [state.ref] == self.traced.reads(origin)
        )

    def _passed_on(self, node: fx.Node) -> State:
        """A cast or a copy that the trace has not: the same value."""
        if not self._passes_on(node):
            raise MoveError("the model has no such op")
        state = self.env[node.args[0]]  # type: ignore[index]
        dtype = node.kwargs.get("dtype", state.dtype if isinstance(state, State) else None)
        self.how["cast"] += 1
        return cast(self.traced, state, dtype)  # type: ignore[arg-type]

    def result_of(self, node: fx.Node, origin: fx.Node, strategy: Strategy) -> State | Several:
        """The state of a node that computes what `origin` does."""
        local = expected_call(self.traced.call(origin), strategy, self.mesh_shape)
        for difference in differences(node, local, self.env, self.mesh_shape):
            raise MoveError(difference)
        self.check_operands(origin, strategy, dict(node_operands(node, local)))
        return self.made_by(origin, strategy)

    def check_operands(
        self, origin: fx.Node, strategy: Strategy, operands: Mapping[int, fx.Node]
    ) -> None:
        """Whether each operand is the part of what the traced node reads there."""
        for number, (ref, layout) in enumerate(
            zip(self.traced.reads(origin), strategy.inputs, strict=True)
        ):
            due = State(ref, layout, self.traced.value(ref).dtype)
            found = self.env.get(operands[number]) if number in operands else due
            if found != due:
                raise MoveError(
                    f"its operand {number} is {shown(found)}, where {shown(due)} is due"
                )

    def made_by(self, origin: fx.Node, strategy: Strategy) -> State | Several:
        """What a traced node makes at a strategy that is right."""
        self.check_strategy(origin, strategy)
        value = origin.meta["val"]
        if not isinstance(value, tuple | list):
            return State((origin.name, 0), strategy.outputs[0], value.dtype)
        parts = zip(value, strategy.outputs, strict=True)
        return Several(
            tuple(
                State((origin.name, i), at, x.dtype) if x is not None else None
                for i, (x, at) in enumerate(parts)
            )
        )

    def check_strategy(self, origin: fx.Node, strategy: Strategy) -> None:
        """Whether the op makes of such operands such results."""
        call = self.traced.call(origin)
        try:
            verdict, why = judge(call, strategy, self.mesh_shape)
            known = is_strategy(call, strategy.plain, self.mesh_shape)
        except AutoparError as error:
            raise MoveError(error.what) from error
        if verdict is Verdict.WRONG or not known:
            raise MoveError(why or f"no rule of the op has {strategy}")
        self.how[verdict.value] += 1
        if verdict is Verdict.OPEN:
            self.open[str(origin.meta["key"])] = None
