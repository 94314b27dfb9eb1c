"""A `Program`, which a plan is emitted into: one `StageProgram` per pipeline stage, and how a batch
runs through them in microbatches. A plan without stages has one stage and one microbatch.

A `StageProgram` has local shapes, explicit collectives, and separate graphs for forward and
backward. The forward graph takes the local parameters, buffers and inputs. It returns one flat
tuple: the outputs, the new values of mutated buffers, then the saved values. The backward graph
takes the saved values and a tangent per output that has one (the loss, or what crosses to the next
stage). It returns one gradient per parameter that has one, each in the parameter's storage layout,
then one per input that has one: whole for inputs of the batch, in its layout for what crosses from
the stage before. If gradients accumulate over microbatches, it takes their sums after the tangents,
adds to each in place (for the first microbatch it writes them: `autopar.kernels.collectives.FIRST`)
and returns them; `begin` runs before the first and `end` after the last microbatch of a step.

Nodes are aten ops, the functions of `autopar.ops`, and the steps of `autopar.kernels.collectives`,
which name mesh axes by index. `autopar.kernels.bind` binds these to process groups, and the
lockstep interpreter runs them over a list of virtual ranks.
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
"""``run``, ``start`` or ``finish``, and which node of a graph."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor at the border of the program.

    Attributes:
        name: parameter or buffer name, input path or output path.
        shape: global shape as the user knows it.
        view: global shape in the graph (see `autopar.capture.trace.Parameter.view`); equal to
            `shape` for inputs and outputs.
        layout: layout over the dims of `view`. For parameters this is the storage layout; for sums
            of gradients that of the sum.
        requires_grad: whether it is trained; for outputs, whether the plain model's has a gradient;
            for inputs, whether the call's requires one.
        has_gradient: whether the backward graph returns its gradient, whole for an input of the
            batch; for outputs, whether it takes its tangent.
        is_loss: outputs only.
        crosses: whether it comes from the stage before, or goes to the next stage; always local.
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
        forward: placeholders in the order parameters, buffers, inputs.
        backward: placeholders in the order saved values, tangents.
        num_saved: how many of the forward's last results are saved for backward.
        mutated: names of the buffers whose new values follow the outputs, in order.
        collectives: every emitted collective with the node it feeds: (phase, node key, Collective)
            tuples.
        accumulates: whether gradients accumulate over the microbatches of a step. The next three
            need it.
        begin: from parameters as they rest to what forward takes. end: from sums to gradients as
            parameters rest.
        sums: per parameter that has a gradient the sum that it is added to.
        orders: by phase, another order in which a graph is to run, until the order is written into
            the graph (`autopar.program.reorder`).
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
        return self  # nothing changes it; torch warns of specs of calls that are copied

    @property
    def input_gradients(self) -> tuple[ProgramTensor, ...]:
        """The gradients of the batch's inputs, as backward returns them: whole on every rank."""
        whole = Layout.replicated(len(self.mesh.axes))
        returned = (t for t in self.inputs if t.has_gradient and not t.crosses)
        return tuple(replace(t, name=gradient_name(t.name), layout=whole) for t in returned)


@dataclass(frozen=True, slots=True)
class Count:
    """Values that every microbatch gets from the whole batch (`autopar.analysis.microbatches`).

    Attributes:
        given: path of each such input → how it follows from the microbatches' own values: ``sum`` |
            ``mean``.
        graph: from the buffers and the whole inputs of a microbatch to its own values; its inputs
            may include earlier counts.
        buffers, inputs: names and paths of what the graph takes.
    """

    given: Mapping[str, str]
    graph: fx.GraphModule
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]

    def of(
        self, parts: list[dict[str, torch.Tensor]], buffers: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the values by path. Random numbers are those that each microbatch draws."""
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
    """How a batch is processed in microbatches (`autopar.analysis.microbatches` infers it).

    Attributes:
        num: the number of microbatches. inputs: path of each input that is cut → the dim it is cut
            along.
        outputs: path, of all that can be put together → how the batch's output follows from the
            microbatches': (``whole`` | ``split`` | ``sum`` | ``mean``, dim).
        loss: path of the loss, None if the model returns none.
        counts: the values that every microbatch gets from the whole batch, one after another.
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
        """The weight of each microbatch's loss, and its tangent; 1 without a loss."""
        return 1.0 if self.loss is None or self.outputs[self.loss][0] == "sum" else 1.0 / self.num

    def parts(
        self, inputs: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the inputs of each microbatch, including what it gets from the whole batch.

        Args:
            inputs: the batch's, by path. buffers: whole, by name, including those of
                `count_buffers`.

        Raises:
            RuntimeStateError: if the batch cannot be divided.
        """
        parts = self.split(inputs)
        for count in self.counts:
            given = count.of(parts, buffers)
            parts = [{**part, **given} for part in parts]
        return parts

    def split(self, inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return the inputs of each microbatch that come from the call; raises as `parts`."""
        parts: list[dict[str, torch.Tensor]] = [dict(inputs) for _ in range(self.num)]
        for path, dim in self.inputs.items():
            whole = inputs[path]
            if whole.shape[dim] % self.num:
                what = (
                    f"input {path!r} has {whole.shape[dim]} samples, which is not a multiple of"
                    f" {self.num} microbatches"
                )
                raise RuntimeStateError(what, remedy="pass batches of the planned size")
            for part, value in zip(parts, whole.chunk(self.num, dim), strict=True):
                part[path] = value
        return parts

    def bound(self, bind: Callable[[fx.GraphModule], fx.GraphModule]) -> Microbatches:
        """Return a copy whose graphs are bound to one rank by `bind`."""
        return replace(
            self, counts=tuple(replace(count, graph=bind(count.graph)) for count in self.counts)
        )

    def join(self, path: str, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the batch's output from the microbatches' outputs."""
        kind, dim = self.outputs[path]
        if kind == "split":
            return torch.cat(parts, dim)
        if kind == "whole":
            return parts[-1]
        if kind == "sum":
            return torch.stack(parts).sum(0, dtype=parts[0].dtype)
        return torch.stack([part * (1.0 / self.num) for part in parts]).sum(0)

    def tangents(self, path: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return each microbatch's tangent from that of the batch's output: the derivative of
        `join`, for models without a loss."""
        kind, dim = self.outputs[path]
        if kind == "split":
            return list(whole.chunk(self.num, dim))
        if kind == "whole":  # it is taken from the last one
            return [torch.zeros_like(whole)] * (self.num - 1) + [whole]
        return [whole if kind == "sum" else whole / self.num] * self.num


@dataclass(frozen=True, slots=True)
class Program:
    """The programs of all stages of a pipeline, and the microbatches that run through them.

    A plan without a pipeline has one stage on the whole mesh, which runs one microbatch.

    Attributes:
        mesh: the whole mesh. axis: name of the axis along which the stages lie, ``""`` for one
            stage on the whole mesh.
        trace: of one microbatch, without stages.
        stages: one program per stage, on the mesh without the axis; equal names cross between
            neighbours.
        schedule: name of the schedule in torch.distributed.pipelining.
        shared: parameter name → the stages that hold it; the sum of their gradients is the
            gradient.
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
        return self  # nothing changes it; torch warns of specs of calls that are copied

    @staticmethod
    def of_one_stage(trace: Trace, stage: StageProgram, plan_hash: str = "") -> Program:
        """Return the program of one stage that runs the whole batch at once.

        Args:
            trace: the trace of the batch. stage: its program. plan_hash: of its plan.
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
        """Whether backward follows from the model's own loss, so that it may run before all
        forwards have run."""
        return any(t.is_loss and t.has_gradient for stage in self.stages for t in stage.outputs)

    @property
    def inputs(self) -> tuple[ProgramTensor, ...]:
        """The whole batch's inputs: in the layouts of the stage if `is_single`, otherwise whole on
        every rank."""
        if self.is_single:
            return self.stages[0].inputs
        cut = self.microbatches.inputs
        called = (i for i in self.trace.inputs if not i.given)
        return tuple(
            _whole(i, self.microbatches.num, cut.get(i.path, -1), len(self.mesh.shape))
            for i in called
        )

    @property
    def outputs(self) -> tuple[ProgramTensor, ...]:
        """The whole batch's outputs, in layouts as those of `inputs`."""
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
    """Return the outputs of the whole batch, on every rank.

    Args:
        part: the trace of one microbatch. how: how microbatches make up the batch. num_axes: of the
            mesh.
    """
    dims = {path: dim if kind == "split" else -1 for path, (kind, dim) in how.outputs.items()}
    pairs = ((o, _whole(o, how.num, dims.get(o.path, -1), num_axes)) for o in part.outputs)
    return tuple(
        replace(
            whole,
            requires_grad=o.requires_grad,
            has_gradient=bool(o.tangent),
            is_loss=o.path == how.loss,
        )
        for o, whole in pairs
    )


def _whole(border: Input | Output, num: int, dim: int, num_axes: int) -> ProgramTensor:
    shape = tuple(size * num if d == dim else size for d, size in enumerate(border.shape))
    return ProgramTensor(border.path, shape, shape, border.dtype, Layout.replicated(num_axes))


# --------------------------------------------------------------------------------------------------
# Graph modules of programs, most of which are simulated and rehearsed node by node and never
# called.


class LazyGraphModule(fx.GraphModule):  # untyped in torch
    """A graph module that writes its Python code when it is first called or read, since that takes
    longer than the rest of an emission.

    After changes of its graph call `recompile`, as for any graph module. (Torch has such a class
    for Inductor, which is private.)
    """

    _is_written = False  # of the class, one of which torch makes for each instance

    def recompile(self) -> Any:
        """Discard the code, so that it is written again when it is needed."""
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
