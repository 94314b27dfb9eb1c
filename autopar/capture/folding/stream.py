"""Describe the forward of a model op by op, so that layers can be compared.

A *place* is a unit of a run, or everything outside the runs. A unit lasts from the call of its
first layer to the call of the first layer of the next unit; the last unit ends with its last layer.
Each op has an offset within its place. An operand is identified by where it was computed, relative
to the reader: by (units back, offset) within a run; by a fixed offset outside; and for readers
outside, by the unit counted from the first or the last. Ops outside must not read interior units.
Thus equal units have equal *entries* (op, operands, other arguments, whether gradients are
enabled) regardless of their position.

`Recorder` records the entries of a shortened model, unit by unit. `Follower` runs the full model
against the record: each op must equal the recorded one, and its results are created from the
record, without computing shapes again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.dynamo.fakes import FakeMode, fake_like, is_fake, no_modes
from autopar.capture.folding.runs import KEPT_FIRST, KEPT_LAST, Run

# --------------------------------------------------------------------------------------------------
# The record of a forward: ops with their operands, and descriptions to recreate their results.


class NotFoldable(Exception):
    """Raised if layers cannot be folded.

    Args:
        why: the reason.
        run: the run that causes the error, if known; the other runs may still be folded.
        unit: the unit that differs, if known.
    """

    def __init__(self, why: str, run: Run | None = None, unit: int | None = None) -> None:
        super().__init__(why)
        self.run, self.unit = run, unit


class NotInTurn(NotFoldable):
    """Raised if forward calls the layers in another order."""


@dataclass(slots=True)
class RecordedOp:
    """One op: `what` is compared, and `results` describes its results so that they can be
    recreated."""

    what: tuple[Any, ...]
    results: Any


@dataclass
class Shape:
    """A strided tensor without data; `sample` is created on first use."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sample: torch.Tensor | None = None

    def make(self, mode: FakeMode) -> torch.Tensor:
        """Return a fake tensor with this size, stride, dtype and device."""
        if self.sample is None:
            with no_modes():
                self.sample = torch.empty_strided(
                    self.size, self.stride, dtype=self.dtype, device="meta"
                )
        return fake_like(self.sample, self.device, mode)


@dataclass(frozen=True, slots=True)
class RecordedOperand:
    """A result of an in-place op that is an operand of the op: its number among the tensors that
    the op reads."""

    number: int


Place = tuple[int, int]  # run or OUTSIDE, unit


@dataclass
class Story:
    """The record of a forward: its entries by place, and descriptions of its results."""

    entries: dict[Place, list[RecordedOp]] = field(default_factory=lambda: defaultdict(list))
    results: tuple[Any, ...] = ()


def record_results(results: Any, numbers: Mapping[int, int]) -> Any:
    """Describe the results of an op without their tensors.

    Args:
        results: a tensor, or a nested tuple or list.
        numbers: id of each operand → its number.

    Raises:
        NotFoldable: a result is not a strided fake tensor.
    """
    if isinstance(results, torch.Tensor):
        if id(results) in numbers:
            return RecordedOperand(numbers[id(results)])
        if not is_fake(results) or results.layout is not torch.strided:
            raise NotFoldable("an op of forward returns a tensor that is not strided")
        return Shape(tuple(results.shape), results.stride(), results.dtype, results.device)
    if isinstance(results, (tuple, list)):
        return type(results)([record_results(item, numbers) for item in results])
    return results


def remake_results(results: Any, tensors: Sequence[torch.Tensor], mode: FakeMode) -> Any:
    """Recreate the results of an op from their description.

    Args:
        results: the description, as returned by `record_results`.
        tensors: the operands of the op.
        mode: the mode of the new fake tensors.
    """
    if isinstance(results, Shape):
        return results.make(mode)
    if isinstance(results, RecordedOperand):
        return tensors[results.number]
    if isinstance(results, (tuple, list)):
        return type(results)([remake_results(item, tensors, mode) for item in results])
    return results


OUTSIDE = -1
_MOST_ELEMENTS = 64  # of a constant tensor that is compared by value
_DEVICE = torch.ops.prim.device.default
_TAG = "_made_at"


@dataclass(frozen=True, slots=True)
class Layer:
    """The location of a layer.

    Attributes:
        run: number of the run.
        unit: number of the unit in the model that runs.
        full_unit: number of the unit in the full model.
        position: position in the unit.
        path: path in the full model.
    """

    run: int
    unit: int
    full_unit: int
    position: int
    path: str


def tag_weights(model: nn.Module, layers: Mapping[nn.Module, Layer]) -> None:
    """Tag every parameter and buffer with a name: relative to the unit of its layer, or its path
    outside the layers."""
    home = {
        id(inner): (layer, name)
        for module, layer in layers.items()
        for name, inner in module.named_modules()
    }
    for path, module in model.named_modules():
        layer, prefix = home.get(id(module), (None, path))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and layer is None:
                setattr(tensor, _TAG, (OUTSIDE, 0, f"{prefix}.{name}", 0))
            elif tensor is not None and layer is not None:
                setattr(
                    tensor,
                    _TAG,
                    (
                        "weight",
                        (layer.run, layer.full_unit),
                        f"{layer.position}.{prefix}.{name}",
                        0,
                    ),
                )


def tag_inputs(inputs: Sequence[Any]) -> None:
    """Tag the tensors of the call with their numbers."""
    for number, tensor in enumerate(inputs):
        if isinstance(tensor, torch.Tensor):
            setattr(tensor, _TAG, (OUTSIDE, 0, f"input {number}", 0))


class Stream(TorchDispatchMode):
    """Tracks the current place of a forward and describes its ops (see the module docstring).

    Args:
        runs: the runs.
        layers: their layers in the model that runs.
        num_units: number of units of each run in that model.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        layers: Mapping[nn.Module, Layer],
        num_units: Sequence[int],
    ) -> None:
        super().__init__()
        self.runs, self.layers, self.num_units = runs, layers, num_units
        self.run, self.unit, self.full_unit = OUTSIDE, 0, 0
        self.offset = 0
        self.next_layer = [0] * len(runs)  # number of the expected next layer of each run
        self._outside = 0  # offset outside, saved while a run is active
        self.refusal: NotFoldable | None = None  # stored in case the model catches it

    def record_refusal(
        self, why: str, kind: type[NotFoldable] = NotFoldable, of: tuple[int, int] | None = None
    ) -> NotFoldable:
        """Record a refusal unless there is one already, and return the first one of this forward.

        Args:
            why: the reason.
            kind: class of the error.
            of: (run, unit) of the full model that causes it; by default that of the current place.
        """
        run, unit = of or (self.run, self.full_unit)
        self.refusal = self.refusal or (
            kind(why) if run == OUTSIDE else kind(why, self.runs[run], unit)
        )
        return self.refusal

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: Dynamo never runs within a stream, and ops are a third faster without its
        guard."""
        return False

    def enter(self, layer: Layer) -> None:
        """Move to the unit of the layer; called before the forward of a layer.

        Raises:
            NotFoldable: the layers are not called in order, each once.
        """
        number = layer.unit * self.runs[layer.run].period + layer.position
        if (
            number != self.next_layer[layer.run]
            or self.run not in (layer.run, OUTSIDE)
            or (self.run == OUTSIDE) != (number == 0)
        ):
            self.run = layer.run
            raise self.record_refusal(
                f"forward does not call {layer.path} in the order of the layers", NotInTurn
            )
        self.next_layer[layer.run] += 1
        if layer.position == 0:
            if self.run == OUTSIDE:
                self._outside = self.offset
            self.move(layer.run, layer.unit, layer.full_unit, 0)

    def leave(self, layer: Layer) -> None:
        """Move outside after the last layer of a run; called after the forward of a layer."""
        if self.next_layer[layer.run] == self.num_units[layer.run] * self.runs[layer.run].period:
            self.move(OUTSIDE, 0, 0, self._outside)

    def move(self, run: int, unit: int, full_unit: int, offset: int) -> None:
        """Move to another place.

        Args:
            run: number of the run, or `OUTSIDE`.
            unit: number of the unit in the model that runs.
            full_unit: number of the unit in the full model.
            offset: offset of the next op in the place.
        """
        self.run, self.unit, self.full_unit, self.offset = run, unit, full_unit, offset

    def finish(self) -> None:
        """Raise NotFoldable if a layer was not called, or the model caught a refusal."""
        if self.refusal is not None:
            raise self.refusal
        for run, number in zip(self.runs, self.next_layer, strict=True):
            if number == 0:
                raise NotFoldable(f"forward does not call the layers of {run.name}", run)
        if self.run != OUTSIDE:
            raise NotFoldable(
                f"forward does not call all layers of {self.runs[self.run].name}",
                self.runs[self.run],
            )

    def describe(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        """Return a description of an argument that is comparable between places; append its tensors
        to `tensors`."""
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return self._origin(value), value.requires_grad
        if value is None or isinstance(value, (bool, float, int, str)):
            return value if type(value) is int else (type(value), value)
        if isinstance(value, (list, tuple)):
            return tuple([self.describe(item, tensors) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self.describe(item, tensors)) for name, item in value.items()])
        return value

    def _origin(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        tag = tensor.__dict__.get(_TAG)
        if tag is None:
            return self._constant(tensor)
        run, unit, offset, number = tag
        if run == OUTSIDE:
            return offset, number
        if run == "weight":
            run, full_unit = unit
            return (
                ("own", offset)
                if (run, full_unit) == (self.run, self.full_unit)
                else (run, full_unit, offset)
            )
        if run == self.run:
            return self.unit - unit, offset, number
        behind = self.num_units[run] - unit
        if unit and behind > KEPT_LAST:
            read = self.runs[run].layer(
                unit * self.runs[run].period
            )  # the shortened model has no counterpart of this unit
            raise self.record_refusal(
                f"{self._describe_place()} reads a result of {read}", of=(run, unit)
            )
        return run, unit if unit == 0 else -behind, offset, number

    def _constant(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Describe a tensor that forward creates from numbers by its values."""
        if is_fake(tensor) or tensor.numel() > _MOST_ELEMENTS:
            raise self.record_refusal(
                f"forward reads a tensor of shape {tuple(tensor.shape)} that is not a parameter,"
                " buffer, input or result of an op"
            )
        with no_modes():
            return "constant", tensor.dtype, tuple(tensor.shape), str(tensor.tolist())

    def tag(self, results: Any) -> None:
        """Tag the results of the op at the current offset; results that are operands keep their
        tags."""
        for number, result in enumerate(
            results if isinstance(results, (tuple, list)) else (results,)
        ):
            if isinstance(result, torch.Tensor) and _TAG not in result.__dict__:
                setattr(result, _TAG, (self.run, self.unit, self.offset, number))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and is_fake(args[0]):
            return args[0].fake_device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        tensors: list[torch.Tensor] = []
        op_text = (
            func,
            torch.is_grad_enabled(),
            self.describe(args, tensors),
            self.describe(kwargs, tensors) if kwargs else (),
        )
        results = self.answer(op_text, tensors, lambda: func(*args, **(kwargs or {})))
        self.tag(results)
        self.offset += 1
        return results

    def event(self, what: tuple[Any, ...], arguments: Any) -> None:
        """Record an event that is not an op but affects backward."""
        self.answer((*what, self.describe(arguments, [])), [], lambda: None)
        self.offset += 1

    def _describe_place(self) -> str:
        if self.run == OUTSIDE:
            return "the part outside the layers"
        run = self.runs[self.run]
        return run.layer(self.full_unit * run.period)

    def answer(self, what: tuple[Any, ...], tensors: list[torch.Tensor], compute: Any) -> Any:
        """Return the results of an op.

        Args:
            what: description of the call.
            tensors: operands of the op.
            compute: function that computes the results.
        """
        raise NotImplementedError


class Recorder(Stream):
    """Computes the results of ops and records them in `story`, one list of entries per place."""

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self.story = Story()

    def answer(self, what: tuple[Any, ...], tensors: list[torch.Tensor], compute: Any) -> Any:
        """Compute the results and record them.

        Args:
            what, tensors, compute: as for `Stream.answer`.
        """
        results = compute()
        numbers = {id(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}
        self.story.entries[self.run, self.unit].append(
            RecordedOp(what, record_results(results, numbers))
        )
        return results


class Follower(Stream):
    """Compares a forward with a record, without computing.

    Args:
        story: the record.
        mode: the mode of the results, which are fake tensors.
        context: arguments of `Stream`.
    """

    def __init__(self, story: Story, mode: FakeMode, *context: Any) -> None:
        super().__init__(*context)
        self.story, self._mode = story, mode
        self._expected = story.entries[OUTSIDE, 0]

    def move(self, run: int, unit: int, full_unit: int, offset: int) -> None:
        """Move to another place, after checking that the current one is complete.

        Args:
            run, unit, full_unit, offset: as for `Stream.move`.
        """
        if self.run != OUTSIDE:
            self._complete()
        super().move(run, unit, full_unit, offset)
        self._expected = self.story.entries[
            run, 0 if run == OUTSIDE else _counterpart(unit, self.num_units[run])
        ]

    def finish(self) -> None:
        """Raise NotFoldable if an op or a layer is missing."""
        super().finish()
        self._complete()

    def _complete(self) -> None:
        if self.offset < len(self._expected):
            raise self.record_refusal(
                f"{self._describe_place()} does not run {_name(self._expected[self.offset])}"
            )

    def answer(self, what: tuple[Any, ...], tensors: list[torch.Tensor], compute: Any) -> Any:
        """Return the recorded results.

        Args:
            what, tensors, compute: as for `Stream.answer`; nothing is computed.

        Raises:
            NotFoldable: a different op was recorded.
        """
        entry = self._expected[self.offset] if self.offset < len(self._expected) else None
        if entry is None or entry.what != what:
            raise self.record_refusal(
                f"{self._describe_place()} differs from an equal layer in "
                f"{_name(RecordedOp(what, None))}"
            )
        return remake_results(entry.results, tensors, self._mode)


def _counterpart(unit: int, num_units: int) -> int:
    """Return the unit of the shortened model that must equal unit `unit` of the full model."""
    return (
        min(unit, KEPT_FIRST)
        if unit < num_units - KEPT_LAST
        else unit - num_units + KEPT_FIRST + KEPT_LAST
    )


def _name(entry: RecordedOp) -> str:
    return str(entry.what[0])


def places(
    runs: Sequence[Run], model: nn.Module, *, short: bool = False
) -> Iterator[tuple[nn.Module, Layer]]:
    """Yield the layers of all runs with their locations.

    Args:
        runs: the runs.
        model: the full model.
        short: whether to omit the layers that are removed from the shortened model, and number the
            units without them.
    """
    for number, run in enumerate(runs):
        unit = 0
        for position, path in enumerate(run.layers):
            if short and position in run.removed_positions:
                continue
            full_unit, within = divmod(position, run.period)
            yield model.get_submodule(path), Layer(number, unit, full_unit, within, path)
            unit += within == run.period - 1
