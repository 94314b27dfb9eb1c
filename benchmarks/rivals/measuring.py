"""One step of a variant, measured: live bytes, executed flops, gradients, and seconds."""

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
# torch has no formula for the attention kernels of the CPU. Masks save no flops in its formulas of
# other kernels, nor here; backward makes five matmuls of the forward's two.
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
        method: its name. parameters: by the model's names. resident: buffers and the batch.
        forward: returns the loss. around: what the step runs in.
    """

    method: str
    parameters: Mapping[str, Tensor]
    resident: Sequence[Tensor]
    forward: Callable[[], Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self) -> None:
        """Forward and backward; the gradients are left in the parameters."""
        with self.around():
            self.forward().backward()

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients, which the parameters no longer hold."""
        found = {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step took.

    Attributes:
        peak_bytes: of all live bytes. peak_above_parameters_bytes: without what is there before
            forward.
        activation_peak_bytes: also without gradients. end_of_forward_bytes: the same when forward
            ends.
        flops: executed.
    """

    peak_bytes: int
    peak_above_parameters_bytes: int
    activation_peak_bytes: int
    end_of_forward_bytes: int
    flops: int


class Ledger(LiveBytes):
    """Live bytes storage by storage, so that those of gradients can be told apart afterwards; and
    flops.

    Attributes:
        flops: executed so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._serials: dict[int, int] = {}  # storage → its number; an address may be used again
        self._events: list[tuple[int, int]] = []  # (storage's number, bytes more or less)
        self._numbers = itertools.count()
        self._resident_bytes = self._num_forward = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as compiled under it."""
        return True

    def begin(self, resident: Iterable[Tensor]) -> None:
        """What is there before forward."""
        self.register(resident)
        self.reset_peak()
        self._events, self._resident_bytes = [], self.live_bytes

    def end_forward(self) -> None:
        self._num_forward = len(self._events)

    def measured(self, gradients: Iterable[Tensor]) -> Measured:
        """The step since `begin`."""
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
        if result is NotImplemented:  # it comes again, on local tensors
            return result
        if packet in _ATTENTION:
            self.flops += _ATTENTION[packet](*args)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result

    def _see(self, tensor: Tensor) -> None:
        before = self.live_bytes
        super()._see(tensor)
        if self.live_bytes > before:
            serial = self._serials[local(tensor).untyped_storage()._cdata] = next(self._numbers)
            self._events.append((serial, self.live_bytes - before))

    def _free(self, key: int, num_bytes: int) -> None:
        before = self.live_bytes
        super()._free(key, num_bytes)
        if self.live_bytes < before:
            self._events.append((self._serials[key], self.live_bytes - before))


def local(tensor: Tensor) -> Tensor:
    """The tensor itself; of a DTensor, what this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(variant: Variant) -> tuple[Measured, dict[str, Tensor]]:
    """One step: what it took, and its gradients by name."""
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
    """Largest |a − b| over the largest |b|, of all parameters; infinite where one of them has no
    gradient or a wrong shape."""
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
    """Of each variant's step over the first variant's: seconds, and seconds of this process'
    processor, which on a shared machine say more.

    The median over rounds, in each of which every variant runs once, in an order of its own. Where
    a clock is too coarse to move in the first's step, the round says nothing of it; None where none
    does.
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
