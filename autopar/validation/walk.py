"""One pass over an emitted graph that derives each node's state from the states of its operands.

A compute node must make the call that one rank makes for the traced node of the same key, on the
right parts of that node's operands, with a strategy for which `op_law` finds no counterexample. All
other nodes move, cast, pack or add, and each kind has a rule.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx

from autopar import ops
from autopar.core.collective import Kind
from autopar.core.layout import Strategy
from autopar.errors import AutoparError
from autopar.kernels import collectives as steps
from autopar.kernels import fused
from autopar.kernels.collectives import add_to
from autopar.kernels.fused import KERNELS
from autopar.kernels.packing import from_bucket, into_bucket
from autopar.rules import is_strategy
from autopar.validation.communication_steps import MoveError, cast, move, pack, unpack
from autopar.validation.op_calls import differences, expected_call, matches, node_operands, place_of
from autopar.validation.op_law import Verdict, judge
from autopar.validation.states import InFlight, Ref, Several, State, Sum, shown, unjustified_error
from autopar.validation.traced import TracedModel

# --------------------------------------------------------------------------------------------------
# States of kernels that combine a product with a collective: the states of one after the other.


_FACTORS = 2


class WalkState(Protocol):
    """The part of `GraphWalk` that the states of kernels need."""

    traced: TracedModel
    mesh_shape: tuple[int, ...]
    chosen: Mapping[str, Strategy]
    recomputed: Mapping[str, Strategy]
    env: dict[fx.Node, Any]

    def made_by(self, origin: fx.Node, strategy: Strategy) -> State | Several:
        """Return the state of a traced node's results, after checking its strategy."""


def product_states(walk: WalkState, node: fx.Node) -> State | Several:
    """Return the states of the results of a kernel's node."""
    origin, strategy = _planned_strategy(walk, node, str(node.meta["key"]))
    if node.target is fused.all_gather_matmul:
        return _state_gathered(walk, node, origin, strategy)
    if node.target is fused.matmul_reduce_scatter:
        return _state_scattered(walk, node, origin, strategy)
    return _state_normed(walk, node, origin, strategy)


def _planned_strategy(walk: WalkState, node: fx.Node, key: str) -> tuple[fx.Node, Strategy]:
    """Return a traced node and its planned strategy. For a recomputed node, this is the strategy of
    the recomputation."""
    again = walk.recomputed.get(key) if node.meta.get("recomputed") else None
    if key not in walk.traced.by_key or key not in walk.chosen:
        raise MoveError(f"the model or the plan has no {key}")
    return walk.traced.by_key[key], again or walk.chosen[key]


def _state_gathered(walk: WalkState, node: fx.Node, origin: fx.Node, strategy: Strategy) -> Several:
    args: tuple[Any, ...] = node.args
    a, b, equation, operand, over = args
    moved = walk.env[(a, b)[operand]]
    gathered = move(walk.traced, moved, "all_gather", (over.dim, over.axis), None, walk.mesh_shape)
    product = _product(
        walk, node, origin, strategy, [a, b], str(equation), {int(operand): gathered}
    )
    return Several((gathered, product))


def _state_scattered(walk: WalkState, node: fx.Node, origin: fx.Node, strategy: Strategy) -> State:
    args: tuple[Any, ...] = node.args
    a, b, addend, equation, over = args
    others = node.meta["kernel"].others
    strategy = (
        walk.chosen[str(node.meta["key"])] if others else strategy
    )  # the recomputation of a sum has its own strategy
    summed = _product(walk, node, origin, strategy, [a, b], str(equation), {})
    if (addend is None) != (not others):
        raise MoveError("its residual addition does not match the plan")
    if others:
        summed = _state_added(walk, node, others[0], summed, walk.env[addend])
    settings = over.dim, "sum", over.axis
    return move(walk.traced, summed, "reduce_scatter", settings, None, walk.mesh_shape)


def _state_normed(walk: WalkState, node: fx.Node, origin: fx.Node, strategy: Strategy) -> Several:
    args: tuple[Any, ...] = node.args
    a, b, residual, weight, equation, over, norm_settings = args
    product = _product(walk, node, origin, strategy, [a, b], str(equation), {})
    scattered = over.dim, "sum", over.axis
    part = move(walk.traced, product, "reduce_scatter", scattered, None, walk.mesh_shape)
    total_key, squares_key, norm_key = node.meta["kernel"].others
    total = _state_added(walk, node, total_key, part, walk.env[residual])
    squares_of, squares_at = _planned_strategy(walk, node, squares_key)
    squares = _state_of_result(walk, squares_of, squares_at, [total])
    norm_of, norm_at = _planned_strategy(walk, node, norm_key)
    norm = _state_of_result(walk, norm_of, norm_at, [total, squares, walk.env[weight]])
    settings = list(norm_settings)
    if list(norm_of.args[3:]) != settings or squares_of.args[1:] != (norm_settings.dtype,):
        raise MoveError(f"its norm has settings {settings}, the model's {list(norm_of.args[3:])}")
    return Several((total, squares, norm))


def _state_added(walk: WalkState, node: fx.Node, key: str, one: Any, other: Any) -> State:
    """Return the state of a sum of two states, in either order."""
    origin, strategy = _planned_strategy(walk, node, key)
    first = walk.traced.reads(origin)[0]
    states = [one, other] if isinstance(one, State) and one.ref == first else [other, one]
    if len(origin.args) != _FACTORS or origin.kwargs:
        raise MoveError(f"{key} is not a plain sum")
    return _state_of_result(walk, origin, strategy, states)


def _state_of_result(
    walk: WalkState, origin: fx.Node, strategy: Strategy, states: Sequence[Any]
) -> State:
    """Return the state of a traced node's result after checking the states of its operands."""
    refs = walk.traced.reads(origin)
    if len(refs) != len(states):
        raise MoveError(f"it reads {len(states)} tensors, expected {len(refs)}")
    for number, (ref, layout) in enumerate(zip(refs, strategy.inputs, strict=True)):
        due = State(ref, layout, walk.traced.value(ref).dtype)
        if states[number] != due:
            raise MoveError(
                f"operand {number} of {origin.meta['key']} is {shown(states[number])},"
                f" expected {shown(due)}"
            )
    result = walk.made_by(origin, strategy)
    assert isinstance(result, State), "sums and norms have one result"
    return result


def _product(
    walk: WalkState,
    node: fx.Node,
    origin: fx.Node,
    strategy: Strategy,
    factors: Sequence[Any],
    equation: str,
    instead: Mapping[int, State],
) -> State:
    """Return the state of the product of two factors, with a bias if the node has one.

    `instead` replaces the states of factors: number of the factor → state.
    """
    local = expected_call(walk.traced.call(origin), strategy, walk.mesh_shape)
    bias, starts = node.kwargs.get("bias"), node.kwargs.get("starts", ())
    if local.target is not ops.dot or local.args[0] != equation:
        raise MoveError(f"it computes {equation!r}, expected {local.args[0]!r}")
    if not matches(starts, local.kwargs.get("starts", ()), walk.env, walk.mesh_shape):
        raise MoveError(f"its shards start at {starts}, expected {local.kwargs.get('starts', ())}")
    states = [instead.get(i, walk.env[factor]) for i, factor in enumerate(factors)]
    return _state_of_result(
        walk, origin, strategy, states if bias is None else [*states, walk.env[bias]]
    )


# --------------------------------------------------------------------------------------------------


aten = torch.ops.aten


@dataclass
class GraphWalk:
    """The states of the nodes of one emitted graph.

    Attributes:
        traced: the traced model.
        mesh_shape: sizes of the mesh axes.
        phase: name of the graph.
        chosen: key → planned strategy.
        recomputed: key → planned strategy of the recomputation in backward.
        gradients: parameter → its gradient, and the values of which the gradient is a cast.
        env: node → state, for the nodes so far.
        how: number of nodes by kind of justification.
        open: keys of nodes whose strategy only the op's rule supports.
    """

    traced: TracedModel
    mesh_shape: tuple[int, ...]
    phase: str
    chosen: Mapping[str, Strategy]
    recomputed: Mapping[str, Strategy]
    gradients: Mapping[str, tuple[Ref, tuple[Ref, ...]]] = field(default_factory=dict)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    how: Counter[str] = field(default_factory=Counter)
    open: dict[str, None] = field(default_factory=dict)

    def run(self, graph: fx.Graph, given: Sequence[Any]) -> list[Any]:
        """Return the states of the graph's results.

        Args:
            graph: the emitted graph.
            given: states of its placeholders, in order.

        Raises:
            ValidationError: for the first node that is not justified.
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
                        node, self.phase, "the graph has more inputs than the program passes"
                    )
                continue
            try:
                self.env[node] = self._state(node)
            except MoveError as error:
                raise unjustified_error(node, self.phase, str(error)) from error
            except (IndexError, KeyError, TypeError, ValueError) as error:
                why = f"its arguments {node.args} have an unknown form ({error})"
                raise unjustified_error(node, self.phase, why) from error
        raise AssertionError("a graph must have an output")

    def _state(self, node: fx.Node) -> Any:
        place = place_of(node, self.env)
        if place is not None:
            return place
        for target, rule in self._rules().items():
            if node.target is target:
                return rule(node)
        if node.target in steps.KIND_OF:
            x, *settings = steps.positional(node)
            return self._move(self.env[x], steps.KIND_OF[node.target], settings, node)
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

    def _move(self, state: Any, kind: Kind, settings: Sequence[Any], node: fx.Node) -> Any:
        self.how["step"] += 1
        return move(self.traced, state, kind, settings, node.kwargs.get("length"), self.mesh_shape)

    def _pick(self, node: fx.Node) -> Any:
        source, number = self.env[node.args[0]], int(node.args[1])
        if not isinstance(source, Several) or not 0 <= number < len(source.parts):
            raise MoveError("it selects a result of an op with a single result")
        return source.parts[number]

    def _start(self, node: fx.Node) -> InFlight:
        x, kind, *settings = node.args
        return InFlight(
            self._move(self.env[x], kind, settings, node),
            (kind, *settings, node.kwargs.get("length")),
        )

    def _finish(self, node: fx.Node) -> Any:
        source, *settings = node.args
        flying = self.env[source]
        if not isinstance(flying, InFlight) or flying.settings != (
            *settings,
            node.kwargs.get("length"),
        ):
            raise MoveError("it waits for a collective that was not started with these settings")
        if [user.target for user in source.users] != [steps.finish]:
            raise MoveError("other nodes also read the result of the start")
        return flying.result

    def _add(self, node: fx.Node) -> Sum:
        total, gradient = (self.env[x] for x in node.args)
        if not isinstance(total, Sum) or total.is_added:
            raise MoveError(
                f"it adds to {shown(total)}, which is not a sum that expects this microbatch"
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
        strategies = self.recomputed if node.meta.get("recomputed") else self.chosen
        if key not in strategies:
            raise MoveError("the plan has no strategy for it")
        return self.result_of(node, origin, strategies[key])

    def _passes_on(self, node: fx.Node) -> bool:
        return node.target in (aten._to_copy.default, aten.clone.default)

    def _reads_as(self, node: fx.Node, origin: fx.Node) -> bool:
        """Return whether a cast or a copy is the traced one, and not an additional one under the
        same key."""
        state = self.env[node.args[0]]
        return (
            origin.target is node.target
            and isinstance(state, State)
            and [state.ref] == self.traced.reads(origin)
        )

    def _passed_on(self, node: fx.Node) -> State:
        """Return the state of a cast or a copy that the trace does not have. Its value is that of
        its operand."""
        if not self._passes_on(node):
            raise MoveError("the model has no such op")
        state = self.env[node.args[0]]
        dtype = node.kwargs.get("dtype", state.dtype if isinstance(state, State) else None)
        self.how["cast"] += 1
        return cast(self.traced, state, dtype)

    def result_of(self, node: fx.Node, origin: fx.Node, strategy: Strategy) -> State | Several:
        """Return the state of a node that computes the same as a traced node.

        Args:
            node: the emitted node.
            origin: the traced node.
            strategy: the planned strategy.

        Raises:
            MoveError: if the node makes another call, or has other operands.
        """
        local = expected_call(self.traced.call(origin), strategy, self.mesh_shape)
        for difference in differences(node, local, self.env, self.mesh_shape):
            raise MoveError(difference)
        self.check_operands(origin, strategy, dict(node_operands(node, local)))
        return self.made_by(origin, strategy)

    def check_operands(
        self, origin: fx.Node, strategy: Strategy, operands: Mapping[int, fx.Node]
    ) -> None:
        """Check that each operand is the right part of the traced node's operand.

        Args:
            origin: the traced node.
            strategy: the planned strategy.
            operands: number of the operand → emitted node.

        Raises:
            MoveError: for the first operand that is not.
        """
        for number, (ref, layout) in enumerate(
            zip(self.traced.reads(origin), strategy.inputs, strict=True)
        ):
            due = State(ref, layout, self.traced.value(ref).dtype)
            actual = self.env.get(operands[number]) if number in operands else due
            if actual != due:
                raise MoveError(f"its operand {number} is {shown(actual)}, expected {shown(due)}")

    def made_by(self, origin: fx.Node, strategy: Strategy) -> State | Several:
        """Return the states of a traced node's results, after checking its strategy."""
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
        """Check that the op turns operands in the strategy's layouts into results in its layouts.

        Raises:
            MoveError: if it does not, or if no rule of the op has this strategy.
        """
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
