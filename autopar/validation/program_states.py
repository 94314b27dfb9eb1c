"""`validate_program`: check that every value of an emitted program is the stated part of a traced
value, up to the outputs and every gradient.

The trace and the plan's strategies are trusted. The layouts of the program's operands and results
are compared with the plan's and then trusted. Of the information that emission attaches to a node,
only its key is trusted. One pass goes over each graph (`walk`), and another over the memory that
its nodes share (`storage`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.trace import Parameter, Trace
from autopar.core.layout import Layout, Strategy
from autopar.errors import ValidationError
from autopar.ops import random
from autopar.plans import Plan
from autopar.program.program import ProgramTensor, StageProgram
from autopar.rules import where_of
from autopar.validation.op_law import DRAWS
from autopar.validation.states import State, Sum, Validation, invalid, shown
from autopar.validation.storage import Memory, check_no_shared_memory, check_writes
from autopar.validation.traced import TracedModel
from autopar.validation.walk import GraphWalk

# --------------------------------------------------------------------------------------------------
# Random draws of a trace: no two of them may share their numbers, and the state that they read must
# increase by one at each call.


# --------------------------------------------------------------------------------------------------
# Random numbers by position: draws, steps and seeds must be independent, and a rank's part of a
# draw must equal that part of the whole draw.
#
# The functions draw few elements from fixed states, so that the verdict is reproducible. With n
# numbers, the correlation of independent draws exceeds 6 / √n once in 10⁹ times.

_ROWS, _COLUMNS = 48, 64
_FAR = 6.0 / (_ROWS * _COLUMNS) ** 0.5
_KEPT = 0.7
_SETTINGS: dict[Callable[..., Tensor], tuple[tuple[Any, ...], float, float]] = {
    random.keep_mask: ((1.0 - _KEPT,), _KEPT, (_KEPT * (1.0 - _KEPT)) ** 0.5),
    random.uniform: ((0.0, 1.0, torch.float32), 0.5, 12.0**-0.5),
    random.normal: ((0.0, 1.0, torch.float32), 0.0, 1.0),
    random.randint: ((0, 1001, torch.int64), 500.0, (1001.0**2 / 12.0) ** 0.5),
}
"""Function → its settings, and the mean and standard deviation of its numbers with these
settings."""
_PARTS = ((0, 24, 0, 64), (24, 24, 0, 64), (0, 48, 32, 32), (47, 1, 63, 1))
"""(first row, number of rows, first column, number of columns) of each part."""


def check_generator(kinds: Iterable[Callable[..., Tensor]]) -> None:
    """Test random functions of `autopar.ops.random`.

    Args:
        kinds: the functions.

    Raises:
        ValidationError: if draws are correlated, or if a part of a draw differs from that part of
            the whole draw.
    """
    for kind in sorted(kinds, key=lambda k: k.__name__):
        _check_independent(kind)
        _check_parts(kind)


def _check_independent(kind: Callable[..., Tensor]) -> None:
    first, other = random.initial_state(0), random.initial_state(1)
    draws = {
        f"draw {draw} of step {step}": _draw_numbers(kind, first + step, draw)
        for step, draw in itertools.product(range(3), range(3))
    }
    draws["draw 0 of another seed"] = _draw_numbers(kind, other, 0)
    settings, mean, deviation = _SETTINGS[kind]
    for name, numbers in draws.items():
        off = abs(float(numbers.mean()) - mean) / deviation
        spread = float(numbers.std()) / deviation
        if off > _FAR or not 0.9 < spread < 1.1:
            raise _error(kind, f"{name} has mean {float(numbers.mean()):.3g} with {settings}")
        _compare(kind, f"neighbours in {name}", numbers[:-1], numbers[1:])
        _compare(kind, f"rows of {name}", numbers[:-_COLUMNS], numbers[_COLUMNS:])
    for (a, one), (b, two) in itertools.combinations(draws.items(), 2):
        _compare(kind, f"{a} and {b}", one, two)


def _draw_numbers(kind: Callable[..., Tensor], state: Tensor, draw: int) -> Tensor:
    numbers = kind(state, (_ROWS, _COLUMNS), *_SETTINGS[kind][0], draw=draw)
    return numbers.double().flatten()


def _compare(kind: Callable[..., Tensor], what: str, one: Tensor, two: Tensor) -> None:
    a, b = one - one.mean(), two - two.mean()
    size = float(a.norm() * b.norm())
    if not size or abs(float(a @ b)) / size > _FAR:
        raise _error(kind, f"{what} are correlated")


def _check_parts(kind: Callable[..., Tensor]) -> None:
    sizes, settings = (_ROWS, _COLUMNS), _SETTINGS[kind][0]
    state = random.initial_state(0)
    full_draw = kind(state, sizes, *settings, draw=1)
    for row, rows, column, columns in _PARTS:
        starts = (row, column)
        part = kind(state, (rows, columns), *settings, draw=1, window=(starts, sizes))
        if not torch.equal(part, full_draw[row : row + rows, column : column + columns]):
            raise _error(
                kind,
                (f"the shard of {rows} × {columns} at {starts} does not match the full tensor"),
            )


def _error(kind: Callable[..., Tensor], why: str) -> ValidationError:
    return invalid(f"random numbers of {kind.__name__}: {why}")


_ADD = torch.ops.aten.add.Scalar
_LARGEST = 2**31


def check_draws(trace: Trace) -> None:
    """Check that random draws are independent of each other and differ from step to step.

    Args:
        trace: the traced model.

    Raises:
        ValidationError: for a draw that is correlated with an earlier one, or if the random state
            does not advance.
    """
    drawing: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op == "call_function" and node.target in DRAWS:
            number = node.kwargs.get("draw", node.args[-1])
            here = node.args[0], number
            if here in drawing:
                message = (
                    f"{node.meta['key']} draws the same numbers as {drawing[here].meta['key']}: "
                    f"both are draw {number} of a step"
                )
                raise invalid(message, where_of(node))
            if type(number) is not int or not 0 <= number < _LARGEST:
                raise invalid(f"{node.meta['key']} is draw {number!r}", where_of(node))
            drawing[here] = node
    if drawing:
        _check_state(trace, {node for node, _ in drawing})
        check_generator({node.target for node in drawing.values()})


def _check_state(trace: Trace, states: set[fx.Node]) -> None:
    state_nodes = {b.node for b in trace.buffers if b.name == random.STATE}
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    after = results[trace.mutated[random.STATE]] if random.STATE in trace.mutated else None
    goes_on = (
        isinstance(after, fx.Node)
        and after.target is _ADD
        and after.args[0] in states
        and after.args[1] == 1
    )
    if {state.name for state in states} != state_nodes or not goes_on:
        raise invalid("random draws do not all use one state that advances by one per call")


# --------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------
# Inputs, outputs, parameters and buffers of the program, on which the runtime relies, compared with
# the trace. `_Program` compares their layouts with the plan's.

Facts = Mapping[str, object]


def check_borders(trace: Trace, plan: Plan, program: StageProgram) -> None:
    """Compare names, shapes, dtypes and flags of parameters, buffers, inputs and outputs with those
    of the trace.

    Args:
        trace: the traced model.
        plan: its plan.
        program: the program emitted from the plan.

    Raises:
        ValidationError: for the first tensor that differs, with the difference.
    """
    if program.mesh != plan.mesh:
        raise invalid(f"the program is for mesh {program.mesh}, the plan for {plan.mesh}")
    for kind, tensors, due in _pairs(trace, program):
        if len(tensors) != len(due):
            raise invalid(f"the program has {len(tensors)} {kind}s, the model {len(due)}")
        for tensor, facts in zip(tensors, due, strict=True):
            for name, value in facts.items():
                actual = getattr(tensor, name)
                if actual != value:
                    message = f"{kind} {tensor.name!r} has {name} {actual!r}, expected {value!r}"
                    raise invalid(message)


def _pairs(
    trace: Trace, program: StageProgram
) -> Iterator[tuple[str, Sequence[ProgramTensor], Sequence[Facts]]]:
    yield "parameter", program.parameters, [_facts_of_parameter(p) for p in trace.parameters]
    yield "buffer", program.buffers, [_facts_of_parameter(b) for b in trace.buffers]
    yield (
        "input",
        program.inputs,
        [
            _full_border(i.path, i.shape)
            | {"dtype": i.dtype, "has_gradient": i.gradient is not None}
            | {"requires_grad": i.requires_grad, "crosses": i.crosses, "given": i.given}
            for i in trace.inputs
        ],
    )
    yield (
        "output",
        program.outputs,
        [
            _full_border(o.path, o.shape)
            | {"dtype": o.dtype, "has_gradient": bool(o.tangent), "is_loss": o.is_loss}
            | {"requires_grad": o.requires_grad, "crosses": o.crosses}
            for o in trace.outputs
        ],
    )


def _facts_of_parameter(p: Parameter) -> Facts:
    return {
        "name": p.name,
        "shape": p.shape,
        "view": p.view,
        "dtype": p.dtype,
        "aliases": p.aliases,
        "requires_grad": p.requires_grad,
        "has_gradient": p.gradient is not None,
    }


def _full_border(path: str, shape: tuple[int, ...]) -> dict[str, object]:
    return {"name": path, "shape": shape, "view": shape}


def validate_program(trace: Trace, plan: Plan, program: StageProgram) -> Validation:
    """Justify every node in the graphs of one program.

    Args:
        trace: the trace that the program was emitted from: that of the whole batch, or that of a
            stage for one microbatch.
        plan: the decisions for that trace.
        program: the program emitted from the plan.

    Returns:
        How the nodes were justified.

    Raises:
        ValidationError: for the first node, result, parameter, buffer or input that does not follow
            from the trace.
    """
    return _Program(trace, plan, program).validation()


class _Program:
    """The validation of one program."""

    def __init__(self, trace: Trace, plan: Plan, program: StageProgram) -> None:
        self.trace, self.plan, self.program, self.traced = trace, plan, program, TracedModel(trace)
        self.chosen, self.again = plan.node_choices(), plan.recomputed_choices()
        self.walks: list[GraphWalk] = []
        positions = {p.name: p.gradient for p in trace.parameters if p.gradient is not None}
        self.gradients = {name: self.traced.gradient_of(at) for name, at in positions.items()}

    def validation(self) -> Validation:
        """Run the validation and return the report."""
        check_draws(self.trace)
        check_borders(self.trace, self.plan, self.program)
        self._check_borders()
        program, forward_memory = (
            self.program,
            Memory(self.program.forward.graph, self.program.mesh.shape),
        )
        parameters = (
            self._walk("step").run(program.begin.graph, self._states_at_rest())
            if program.begin is not None
            else self._states_at_rest()
        )
        states = self._walk("forward").run(
            program.forward.graph, [*parameters, *self._buffers(), *self._inputs()]
        )
        self._check_outputs(states)
        saved = states[len(states) - program.num_saved :]
        sums = self._sums()
        backward = self._walk("backward").run(
            program.backward.graph, [*saved, *self._tangents(), *sums]
        )
        self._check_gradients(backward)
        if program.end is not None:
            ended = [State(s.ref, s.layout, s.dtype) for s in sums]
            self._check_resting(self._walk("step").run(program.end.graph, ended))
        self._check_memory(forward_memory)
        how = sum((walk.how for walk in self.walks), start=type(self.walks[0].how)())
        return Validation(
            how, tuple(dict.fromkeys(key for walk in self.walks for key in walk.open))
        )

    def _walk(self, phase: str) -> GraphWalk:
        walk = GraphWalk(
            self.traced, self.program.mesh.shape, phase, self.chosen, self.again, self.gradients
        )
        self.walks.append(walk)
        return walk

    # Operands.

    def _states_at_rest(self) -> list[State]:
        pairs = zip(self.trace.parameters, self.program.parameters, strict=True)
        return [State((p.node, 0), tensor.layout, p.dtype) for p, tensor in pairs]

    def _buffers(self) -> list[State]:
        pairs = zip(self.trace.buffers, self.program.buffers, strict=True)
        return [State((b.node, 0), tensor.layout, tensor.dtype) for b, tensor in pairs]

    def _inputs(self) -> list[State]:
        pairs = zip(self.trace.inputs, self.program.inputs, strict=True)
        return [State((i.node, 0), tensor.layout, tensor.dtype) for i, tensor in pairs]

    def _tangents(self) -> list[State]:
        """Return the states of tangents. The tangent of the loss is whole on every rank; the others
        have the layouts of the outputs."""
        ends = {t.name: t for t in self.program.outputs}
        replicated = Layout.replicated(len(self.program.mesh.axes))
        return [
            State((o.tangent, 0), replicated if o.is_loss else ends[o.path].layout, o.dtype)
            for o in self.trace.differentiable
        ]

    def _sums(self) -> list[Sum]:
        sums = []
        for tensor in self.program.sums:
            if tensor.name not in self.gradients:
                raise invalid(f"the program has a sum for {tensor.name!r}, which has no gradient")
            ref, _ = self.gradients[tensor.name]
            traced_dtype = self.traced.value(ref).dtype
            if (
                traced_dtype.is_floating_point
                and max(traced_dtype.itemsize, 4) > tensor.dtype.itemsize
            ):
                message = (
                    f"gradients of {tensor.name!r} are {traced_dtype} and are accumulated in "
                    f"{tensor.dtype}, which is less precise than fp32"
                )
                raise invalid(message)
            sums.append(Sum(tensor.name, ref, tensor.layout, tensor.dtype))
        if self.program.accumulates and [s.parameter for s in sums] != list(self.gradients):
            raise invalid("a parameter with a gradient has no sum in the program")
        return sums

    # Results.

    def _check_outputs(self, made: Sequence[Any]) -> None:
        due = [
            (o.path, o.node, t)
            for o, t in zip(self.trace.outputs, self.program.outputs, strict=True)
        ]
        for position, (path, name, tensor) in enumerate(due):
            ref = self.traced.ref(self.traced.nodes[name])
            self._check(f"output {path!r}", made[position], State(ref, tensor.layout, tensor.dtype))
        layouts = {t.name: t for t in self.program.buffers}
        if tuple(self.trace.mutated) != self.program.mutated:
            written = self.program.mutated
            raise invalid(
                f"the program writes buffers {written}, the model {tuple(self.trace.mutated)}"
            )
        for number, (name, place) in enumerate(self.trace.mutated.items(), len(due)):
            ref = self.traced.ref(self.traced.results[place])
            self._check(
                f"buffer {name!r}",
                made[number],
                State(ref, layouts[name].layout, layouts[name].dtype),
            )

    def _check_gradients(self, made: Sequence[Any]) -> None:
        trained = [p for p in self.trace.parameters if p.gradient is not None]
        layouts = {t.name: t.layout for t in self.program.parameters}
        sums = {t.name: t for t in self.program.sums}
        for p, state in zip(trained, made, strict=False):
            ref, _ = self.gradients[p.name]
            if self.program.accumulates:
                total = sums[p.name]
                self._check(
                    f"the sum of {p.name!r}",
                    state,
                    Sum(p.name, ref, total.layout, total.dtype, is_added=True),
                )
            else:
                self._check(
                    f"the gradient of {p.name!r}",
                    state,
                    State(ref, layouts[p.name], self.traced.value(ref).dtype),
                )
        inputs = [
            (i, t)
            for i, t in zip(self.trace.inputs, self.program.inputs, strict=True)
            if i.gradient is not None
        ]
        replicated = Layout.replicated(len(self.program.mesh.axes))
        for (i, tensor), state in zip(inputs, made[len(trained) :], strict=True):
            ref, _ = self.traced.gradient_of(i.gradient)  # type: ignore[arg-type]
            at = tensor.layout if tensor.crosses else replicated
            self._check(
                f"the gradient of input {i.path!r}",
                state,
                State(ref, at, self.traced.value(ref).dtype),
            )

    def _check_resting(self, made: Sequence[Any]) -> None:
        """Check the gradients at the end of a step. They must have the layouts and dtypes in which
        parameters are stored."""
        layouts = {t.name: t.layout for t in self.program.parameters}
        trained = [p for p in self.trace.parameters if p.gradient is not None]
        for p, state in zip(trained, made, strict=True):
            ref, _ = self.gradients[p.name]
            self._check(
                f"the gradient of {p.name!r} at the end of a step",
                state,
                State(ref, layouts[p.name], p.dtype),
            )

    def _check(self, what: str, found: object, due: object) -> None:
        if found != due:
            raise invalid(f"{what} is {shown(found)}, expected {shown(due)}")

    # Layouts and memory.

    def _check_borders(self) -> None:
        """Check that the layouts of operands and results match the plan and have no partial
        sums."""
        for kind, tensors in (
            ("parameter", self.program.parameters),
            ("buffer", self.program.buffers),
            ("input", self.program.inputs),
        ):
            for tensor in tensors:
                self._check_border(kind, tensor, self._storage_strategy(tensor.name, kind))
        for tensor in self.program.outputs:
            self._check_border("output", tensor, self.chosen.get(f"{tensor.name}/output"))

    def _storage_strategy(self, name: str, kind: str) -> Strategy | None:
        rests = self.chosen.get(f"{name}/storage") if kind == "parameter" else None
        return rests or self.chosen.get(f"{name}/{kind}")

    def _check_border(self, kind: str, tensor: ProgramTensor, planned: Strategy | None) -> None:
        layouts = () if planned is None else planned.inputs if kind == "output" else planned.outputs
        if layouts != (tensor.layout,) or tensor.layout.has_partial or tensor.layout.special:
            lies = f"{kind} {tensor.name!r} has layout {tensor.layout}"
            raise invalid(f"{lies}, but the plan has {layouts}")

    def _check_memory(self, forward_memory: Memory) -> None:
        program, mesh_shape = self.program, self.program.mesh.shape
        placeholders = [n for n in program.backward.graph.nodes if n.op == "placeholder"]
        saved, sums = (
            placeholders[: program.num_saved],
            placeholders[len(placeholders) - len(program.sums) :] if program.sums else [],
        )
        written = [*self._reusable_saved(saved, forward_memory), *sums]
        check_writes(program.forward.graph, "forward", mesh_shape, ())
        memory = check_writes(program.backward.graph, "backward", mesh_shape, written)
        names = [*self.gradients, *(i.path for i in self.trace.inputs if i.gradient is not None)]
        check_no_shared_memory(program.backward.graph, "backward", memory, names, written)
        if program.begin is not None:
            check_writes(program.begin.graph, "step", mesh_shape, ())
        if program.end is not None:
            memory = check_writes(program.end.graph, "step", mesh_shape, ())
            written = [n for n in program.end.graph.nodes if n.op == "placeholder"]
            check_no_shared_memory(program.end.graph, "step", memory, names, written)

    def _reusable_saved(self, saved: Sequence[fx.Node], memory: Memory) -> list[fx.Node]:
        """Return the saved values into whose memory backward may write. Forward must have allocated
        this memory, and must not return another value in it."""
        results = next(iter(reversed(self.program.forward.graph.nodes))).args[0]
        owners = [memory.owners.get(node) for node in results]
        of_saved = owners[len(owners) - self.program.num_saved :]
        times = Counter(owners)
        is_owned = [o is not None and o[0].op != "placeholder" and times[o] == 1 for o in of_saved]
        return [node for node, is_own in zip(saved, is_owned, strict=True) if is_own]
