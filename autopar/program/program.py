"""A `Program`, the result of emitting a plan. It has one `StageProgram` per pipeline stage, and the
microbatches that run through the stages. A plan without a pipeline has one stage.

A `StageProgram` has local shapes, explicit collectives, and separate graphs for forward and
backward. The forward graph takes the local parameters, buffers and inputs. It returns one flat
tuple: the outputs, the new values of mutated buffers, then the saved values. The backward graph
takes the saved values and one tangent for each output that has one: the loss, or tensors that are
sent to the next stage. It returns the gradients of trained parameters in their storage layouts,
then those of inputs that have a gradient. Gradients of the batch's inputs are full tensors.
Gradients of tensors from the previous stage have the layouts of these tensors.

If gradients accumulate over microbatches, the backward graph also takes their sums after the
tangents, adds to each sum in place, and returns the sums. For the first microbatch, it overwrites
the sums (`autopar.kernels.collectives.FIRST`). The graph `begin` runs before the first microbatch
of a step, and `end` after the last.

Nodes are aten ops, the functions of `autopar.ops`, and the communication steps of
`autopar.kernels.collectives`, which refer to mesh axes by index. `autopar.kernels.bind` binds these
to process groups, and the lockstep interpreter runs them over a list of virtual ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.capture.trace import Constant, Input, Output, Trace, gradient_name
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import RuntimeStateError
from autopar.ops import random

Action = tuple[str, fx.Node]
"""``run``, ``start`` or ``finish``, and a node of a graph."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A parameter, buffer, input or output of the program.

    Attributes:
        name: the name of a parameter or buffer, or the path of an input or output.
        shape: the global shape in the model.
        view: the global shape in the graph (see `autopar.capture.trace.Parameter.view`); equal to
            `shape` for inputs and outputs.
        dtype: the dtype.
        layout: the layout over the dims of `view`. For parameters, this is the storage layout; for
            sums of gradients, the layout of the sum.
        aliases: the other names of a tied parameter or buffer.
        requires_grad: for parameters, whether it is trained; for outputs, whether the output of the
            plain model has a gradient; for inputs, whether the argument requires a gradient.
        has_gradient: for parameters and inputs, whether the backward graph returns its gradient;
            for outputs, whether the backward graph takes its tangent.
        is_loss: for outputs, whether it is the loss.
        crosses: whether it comes from the previous stage or is sent to the next stage. Such tensors
            are always local.
        given: for inputs, whether it is computed from the whole batch for each microbatch
            (`Count`).
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    has_gradient: bool = False
    is_loss: bool = False
    crosses: bool = False
    given: bool = False


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The emitted program of one stage.

    Attributes:
        mesh: the mesh of the stage.
        forward: the forward graph, with placeholders in the order parameters, buffers, inputs.
        backward: the backward graph, with placeholders in the order saved values, tangents, sums.
        parameters, buffers, inputs, outputs: the tensors of the stage.
        num_saved: the number of results at the end of forward that are saved for backward.
        mutated: the names of the buffers whose new values follow the outputs, in order.
        collectives: every emitted collective with the node that reads it, as tuples (phase, node
            key, Collective).
        accumulates: whether gradients accumulate over the microbatches of a step. The next three
            attributes are set only in this case.
        begin: a graph from stored parameters to the operands of forward.
        end: a graph from sums to gradients in the storage layouts of parameters.
        sums: the sum of gradients of each trained parameter.
        orders: another order of a graph, by phase, until it is written into the graph
            (`autopar.program.reorder`).
    """

    mesh: Mesh
    forward: fx.GraphModule
    backward: fx.GraphModule
    parameters: tuple[ProgramTensor, ...]
    buffers: tuple[ProgramTensor, ...]
    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    num_saved: int
    mutated: tuple[str, ...]
    collectives: tuple[tuple[str, str, Any], ...]
    accumulates: bool = False
    begin: fx.GraphModule | None = None
    end: fx.GraphModule | None = None
    sums: tuple[ProgramTensor, ...] = ()
    orders: Mapping[str, Sequence[Action]] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> StageProgram:
        return self  # it is never changed, and torch warns about copies of tree specs

    @property
    def input_gradients(self) -> tuple[ProgramTensor, ...]:
        """The gradients of the batch's inputs as backward returns them: full tensors on every
        rank."""
        replicated = Layout.replicated(len(self.mesh.axes))
        returned = (t for t in self.inputs if t.has_gradient and not t.crosses)
        return tuple(replace(t, name=gradient_name(t.name), layout=replicated) for t in returned)


@dataclass(frozen=True, slots=True)
class Count:
    """Values that are computed from the whole batch and passed to every microbatch
    (`autopar.analysis.microbatches`).

    Attributes:
        given: the reduction over the values of microbatches (``sum`` or ``mean``) for each input
            that receives such a value, by path.
        graph: a graph from buffers and full inputs of a microbatch to its values. Its inputs may
            include earlier counts.
        buffers, inputs: the names and paths of the operands of the graph.
    """

    given: Mapping[str, str]
    graph: fx.GraphModule
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]

    def of(
        self, parts: list[dict[str, torch.Tensor]], buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the values, by path. Each microbatch draws the same random numbers as in forward.

        Args:
            parts: the inputs of each microbatch, by path.
            buffers: the full buffers, by name.
        """
        terms = []
        with torch.no_grad():
            for number, part in enumerate(parts):
                read = [
                    buffers[name] + number if name == random.STATE else buffers[name]
                    for name in self.buffers
                ]
                terms.append(self.graph(*read, *(part[path] for path in self.inputs)))
            totals = [
                torch.stack(each).sum(0, dtype=each[0].dtype) for each in zip(*terms, strict=True)
            ]
        return {
            p: total if kind == "sum" else total / len(parts)
            for (p, kind), total in zip(self.given.items(), totals, strict=True)
        }


@dataclass(frozen=True, slots=True)
class Microbatches:
    """The division of a batch into microbatches (`autopar.analysis.microbatches` infers it).

    Attributes:
        num: the number of microbatches.
        inputs: the dim along which each input is split, by path. Other inputs are not split.
        outputs: how each output is joined from those of microbatches, by path: a pair of ``whole``
            (equal in all microbatches), ``split``, ``sum`` or ``mean``, and the dim. Outputs that
            cannot be joined are not listed.
        loss: the path of the loss; None if the model returns no loss.
        counts: the values that are computed from the whole batch. Each may read earlier ones.
    """

    num: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, tuple[str, int]]
    loss: str | None
    counts: tuple[Count, ...] = ()

    @property
    def count_buffers(self) -> frozenset[str]:
        """The buffers that `counts` read."""
        return frozenset(name for count in self.counts for name in count.buffers)

    @property
    def weight(self) -> float:
        """The weight of each microbatch's loss, which is also its tangent; 1 without a loss."""
        return 1.0 if self.loss is None or self.outputs[self.loss][0] == "sum" else 1.0 / self.num

    def parts(
        self, inputs: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the inputs of each microbatch, including values computed from the whole batch.

        Args:
            inputs: the inputs of the batch, by path.
            buffers: full buffers, by name, including those of `count_buffers`.

        Raises:
            RuntimeStateError: if the batch cannot be divided.
        """
        parts = self.split(inputs)
        for count in self.counts:
            counts = count.of(parts, buffers)
            parts = [{**part, **counts} for part in parts]
        return parts

    def split(self, inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return the inputs of each microbatch without values computed from the whole batch. This
        raises the same errors as `parts`."""
        parts: list[dict[str, torch.Tensor]] = [dict(inputs) for _ in range(self.num)]
        for path, dim in self.inputs.items():
            full_value = inputs[path]
            if full_value.shape[dim] % self.num:
                message = (
                    f"input {path!r} has {full_value.shape[dim]} samples, which is not a multiple "
                    f"of {self.num} microbatches"
                )
                raise RuntimeStateError(message, remedy="pass batches of the planned size")
            for part, value in zip(parts, full_value.chunk(self.num, dim), strict=True):
                part[path] = value
        return parts

    def bound(self, bind: Callable[[fx.GraphModule], fx.GraphModule]) -> Microbatches:
        """Return a copy with the graphs of `counts` replaced by the results of `bind`, which binds
        a graph to one rank."""
        return replace(
            self, counts=tuple(replace(count, graph=bind(count.graph)) for count in self.counts)
        )

    def join(self, path: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join the outputs of microbatches to the output of the batch."""
        kind, dim = self.outputs[path]
        if kind == "split":
            return torch.cat(parts, dim)
        if kind == "whole":
            return parts[-1]
        if kind == "sum":
            return torch.stack(parts).sum(0, dtype=parts[0].dtype)
        return torch.stack([part * (1.0 / self.num) for part in parts]).sum(0)

    def tangents(self, path: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the tangent of each microbatch's output for a tangent of the batch's output. This
        is the derivative of `join`, for models without a loss."""
        kind, dim = self.outputs[path]
        if kind == "split":
            return list(whole.chunk(self.num, dim))
        if kind == "whole":  # `join` returns the output of the last microbatch
            return [torch.zeros_like(whole)] * (self.num - 1) + [whole]
        return [whole if kind == "sum" else whole / self.num] * self.num


@dataclass(frozen=True, slots=True)
class Program:
    """The programs of all stages of a pipeline, and the microbatches that run through them.

    A plan without a pipeline has one stage on the whole mesh.

    Attributes:
        mesh: the whole mesh.
        axis: the name of the pipeline axis; ``""`` for one stage on the whole mesh.
        trace: the trace of one microbatch, before it is cut into stages.
        stages: one program per stage, on the mesh without the pipeline axis. Tensors between
            neighboring stages have the same name in both.
        microbatches: the microbatches of a batch.
        schedule: the name of the schedule in torch.distributed.pipelining.
        shared: the stages that hold each shared parameter, by name. Its gradient is the sum over
            these stages.
        plan_hash: the hash of the plan.
    """

    mesh: Mesh
    axis: str
    trace: Trace
    stages: tuple[StageProgram, ...]
    microbatches: Microbatches
    schedule: str
    shared: Mapping[str, tuple[int, ...]]
    plan_hash: str = ""

    def __deepcopy__(self, memo: Any) -> Program:
        return self  # it is never changed, and torch warns about copies of tree specs

    @staticmethod
    def of_one_stage(trace: Trace, stage: StageProgram, plan_hash: str = "") -> Program:
        """Return the program of one stage that runs the whole batch at once.

        Args:
            trace: the trace of the batch.
            stage: the program of the stage.
            plan_hash: the hash of the plan.
        """
        outputs = {t.name: ("whole", -1) for t in stage.outputs}
        loss = next((t.name for t in stage.outputs if t.is_loss), None)
        how = Microbatches(1, {}, outputs, loss)
        return Program(stage.mesh, "", trace, (stage,), how, "1f1b", {}, plan_hash)

    @property
    def is_single(self) -> bool:
        """Whether a step is one forward and one backward of one stage on the whole mesh."""
        return not self.axis and self.microbatches.num == 1 and not self.stages[0].accumulates

    @property
    def begins_backward(self) -> bool:
        """Whether the model returns a loss, so that backward of a microbatch may run before forward
        of another."""
        return any(t.is_loss and t.has_gradient for stage in self.stages for t in stage.outputs)

    @property
    def inputs(self) -> tuple[ProgramTensor, ...]:
        """The inputs of the batch. If `is_single`, they have the layouts of the stage; otherwise,
        they are replicated."""
        if self.is_single:
            return self.stages[0].inputs
        cut = self.microbatches.inputs
        called = (i for i in self.trace.inputs if not i.given)
        return tuple(
            _full_border(i, self.microbatches.num, cut.get(i.path, -1), len(self.mesh.shape))
            for i in called
        )

    @property
    def outputs(self) -> tuple[ProgramTensor, ...]:
        """The outputs of the batch. If `is_single`, they have the layouts of the stage; otherwise,
        they are replicated."""
        if self.is_single:
            return self.stages[0].outputs
        return whole_outputs(self.trace, self.microbatches, len(self.mesh.shape))

    @property
    def in_spec(self) -> Any:
        """See `autopar.capture.trace.Trace`."""
        return self.trace.in_spec

    @property
    def out_spec(self) -> Any:
        """See `autopar.capture.trace.Trace`."""
        return self.trace.out_spec

    @property
    def constants(self) -> Mapping[int, Any]:
        """See `autopar.capture.trace.Trace`."""
        return self.trace.constants

    @property
    def settings(self) -> Mapping[int, Any]:
        """See `autopar.capture.trace.Trace`."""
        return self.trace.settings

    @property
    def attributes(self) -> tuple[Constant, ...]:
        """See `autopar.capture.trace.Trace`."""
        return self.trace.attributes


def whole_outputs(part: Trace, how: Microbatches, num_axes: int) -> tuple[ProgramTensor, ...]:
    """Return the outputs of the batch, replicated on every rank.

    Args:
        part: the trace of one microbatch.
        how: the microbatches.
        num_axes: the number of mesh axes.
    """
    dims = {path: dim if kind == "split" else -1 for path, (kind, dim) in how.outputs.items()}
    pairs = ((o, _full_border(o, how.num, dims.get(o.path, -1), num_axes)) for o in part.outputs)
    return tuple(
        replace(
            whole,
            requires_grad=o.requires_grad,
            has_gradient=bool(o.tangent),
            is_loss=o.path == how.loss,
        )
        for o, whole in pairs
    )


def _full_border(border: Input | Output, num: int, dim: int, num_axes: int) -> ProgramTensor:
    shape = tuple(size * num if d == dim else size for d, size in enumerate(border.shape))
    return ProgramTensor(border.path, shape, shape, border.dtype, Layout.replicated(num_axes))


# --------------------------------------------------------------------------------------------------
# Graph modules of programs. Most of them are only simulated node by node, and never called.


class LazyGraphModule(fx.GraphModule):  # untyped in torch
    """A graph module that generates its Python code when it is first called or read. Generating the
    code takes longer than the rest of an emission.

    Call `recompile` after changes of the graph, as for any graph module. (torch has a similar
    class for Inductor, but it is private.)
    """

    _is_written = False  # a class attribute, since torch creates one class per instance

    def recompile(self) -> Any:
        """Discard the code, so that it is generated again when it is needed."""
        cls = type(self)
        cls._is_written, cls.forward = False, _written_forward

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        self._write()
        return str(super().code)

    def __str__(self) -> str:
        self._write()
        return str(super().__str__())

    def __reduce__(self) -> Any:
        self._write()
        return fx.GraphModule(self, self.graph).__reduce__()

    def _write(self) -> None:
        if not self._is_written:
            super().recompile()
            type(self)._is_written = True


def _written_forward(self: LazyGraphModule, *args: Any, **kwargs: Any) -> Any:
    self._write()
    return self(*args, **kwargs)
