"""Measurements of one step of a variant: live bytes, executed flops, gradients, and seconds."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from autopar.program.abstract_executor import LiveBytes

aten = torch.ops.aten
# torch has no formula for the attention kernels of CPUs. Masks save no flops in its formulas for
# other kernels, nor here. Backward has five matmuls and forward two.
_ATTENTION: Mapping[object, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_: (
        5 * sdpa_flop_count(q.shape, k.shape, v.shape) // 2
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a step.

    Attributes:
        method: name of the method.
        parameters: name in the model → parameter.
        resident: buffers and the batch.
        forward: returns the loss.
        around: context in which the step runs.
    """

    method: str
    parameters: Mapping[str, Tensor]
    resident: Sequence[Tensor]
    forward: Callable[[], Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self) -> None:
        """Run forward and backward. The gradients are left in the parameters."""
        with self.around():
            self.forward().backward()

    def take_gradients(self) -> dict[str, Tensor]:
        """Return the gradients, and remove them from the parameters."""
        found = {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a step.

    Attributes:
        peak_bytes: peak of all live bytes.
        peak_above_parameters_bytes: peak without the bytes that exist before forward.
        activation_peak_bytes: peak without gradients, in addition.
        end_of_forward_bytes: the same at the end of forward.
        flops: executed flops.
    """

    peak_bytes: int
    peak_above_parameters_bytes: int
    activation_peak_bytes: int
    end_of_forward_bytes: int
    flops: int


class Ledger(LiveBytes):
    """A mode that records live bytes storage by storage, so that those of gradients can be
    identified afterwards, and flops.

    Attributes:
        flops: executed flops so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._serials: dict[int, int] = {}  # storage → its number, since addresses are reused
        self._events: list[tuple[int, int]] = []  # (number of the storage, change in bytes)
        self._numbers = itertools.count()
        self._resident_bytes = self._num_forward = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Run compiled functions in compiled form under this mode."""
        return True

    def begin(self, resident: Iterable[Tensor]) -> None:
        """Record the storages that exist before forward."""
        self.register(resident)
        self.reset_peak()
        self._events, self._resident_bytes = [], self.live_bytes

    def end_forward(self) -> None:
        self._num_forward = len(self._events)

    def measured(self, gradients: Iterable[Tensor]) -> Measured:
        """Return the figures of the step since `begin`."""
        ours = {self._serials[local(g).untyped_storage()._cdata] for g in gradients}
        live = peak = at_end = 0
        for number, (serial, change) in enumerate(self._events, 1):
            live += 0 if serial in ours else change
            peak = max(peak, live)
            at_end = live if number == self._num_forward else at_end
        return Measured(
            self.peak_bytes, self.peak_bytes - self._resident_bytes, peak, at_end, self.flops
        )

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        packet = func.overloadpacket
        if result is NotImplemented:  # it is dispatched again on local tensors
            return result
        if packet in _ATTENTION:
            self.flops += _ATTENTION[packet](*args)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result

    def _count_storage(self, tensor: Tensor) -> None:
        before = self.live_bytes
        super()._count_storage(tensor)
        if self.live_bytes > before:
            serial = self._serials[local(tensor).untyped_storage()._cdata] = next(self._numbers)
            self._events.append((serial, self.live_bytes - before))

    def _free(self, key: int, num_bytes: int) -> None:
        before = self.live_bytes
        super()._free(key, num_bytes)
        if self.live_bytes < before:
            self._events.append((self._serials[key], self.live_bytes - before))


def local(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(variant: Variant) -> tuple[Measured, dict[str, Tensor]]:
    """Run one step, and return its figures and its gradients by name."""
    variant.take_gradients()
    with variant.around(), Ledger() as ledger:
        ledger.begin([*variant.parameters.values(), *variant.resident])
        loss = variant.forward()
        ledger.end_forward()
        loss.backward()
        del loss
        measured = ledger.measured(
            p.grad for p in variant.parameters.values() if p.grad is not None
        )
    return measured, variant.take_gradients()


def gradient_error(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest |a − b| over the largest |b| of all parameters; infinite if one of them
    has no gradient or a wrong shape."""
    if gradients.keys() != expected.keys() or any(
        gradients[name].shape != b.shape for name, b in expected.items()
    ):
        return float("inf")
    return max(
        float((gradients[name] - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for name, b in expected.items()
    )


def time_ratios(
    variants: Sequence[Variant], rounds: int
) -> list[tuple[float | None, float | None]]:
    """Return the time of each variant's step relative to that of the first: wall time, and CPU time
    of this process, which is more reliable on a shared machine.

    The ratios are medians over rounds. Each round runs every variant once, in a random order. A
    round in which a clock is too coarse for the first variant's step is ignored; if all are
    ignored, the ratio is None.
    """
    order, found = random.Random(0), list[list[tuple[float, float]]]()
    for _ in range(rounds):
        taken = [(0.0, 0.0)] * len(variants)
        for index in order.sample(range(len(variants)), len(variants)):
            start = time.perf_counter(), time.process_time()
            variants[index].step()
            taken[index] = time.perf_counter() - start[0], time.process_time() - start[1]
            variants[index].take_gradients()
        found.append(taken)
    return [
        (_median_ratio(found, place, clock=0), _median_ratio(found, place, clock=1))
        for place in range(len(variants))
    ]


def _median_ratio(
    rounds: Sequence[Sequence[tuple[float, float]]], place: int, *, clock: int
) -> float | None:
    ratios = [taken[place][clock] / taken[0][clock] for taken in rounds if taken[0][clock] > 0.0]
    return statistics.median(ratios) if ratios else None
