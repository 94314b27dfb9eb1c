"""A lower bound of what a step computes, from the trace alone: no strategies, no layouts, no
solver.

Every op is divided perfectly. With d devices that share a microbatch, and M microbatches, some
device does at least 1 / (d M) of an op's flops and bytes for each microbatch. `compute_time` never
decreases with flops or bytes, so its value for this share is a lower bound of the op's time, launch
overhead included. The sum over all ops bounds the time that one microbatch takes through the whole
model, whatever the layouts. Communication, recomputation and waiting only add to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from autopar.analysis.work import Work, computes_in, works
from autopar.capture.trace import Trace
from autopar.core.hardware import Hardware, HardwareProfile, Mixed
from autopar.cost.op_times import compute_time
from autopar.rules import call_of

_Kind = tuple[Work, int, torch.dtype]
"""Work on the whole batch, how often an op repeats it one after another, and its dtype."""


@dataclass(frozen=True)
class TotalWork:
    """The work of a trace on the whole batch.

    Attributes:
        kinds: each kind of work, with the number of ops that do it.
    """

    kinds: tuple[tuple[_Kind, int], ...]

    @staticmethod
    def of(trace: Trace, hardware: Hardware) -> TotalWork:
        """Collect the work of a trace's ops.

        Args:
            trace: of the whole batch.
            hardware: tells whether norms run as row kernels, which move fewer bytes.
        """
        by_kernels = any(profile.has_row_kernels for profile in _profiles(hardware))
        kinds: Counter[_Kind] = Counter()
        for node in trace.graph.nodes:
            if node.op != "call_function":
                continue
            call = call_of(node)
            done = works(
                call.target,
                call.args,
                call.kwargs,
                call.inputs,
                call.outputs,
                by_kernels=by_kernels,
            )
            dtype = computes_in(call.inputs)
            kinds.update((work, times, dtype) for work, times in done if work.kind != "view")
        return TotalWork(tuple(kinds.items()))

    def least_s(self, hardware: Hardware, num_devices: int, num_microbatches: int = 1) -> float:
        """Bound the seconds that one microbatch takes through the whole model.

        Args:
            hardware: of the devices; if they are unequal, each op is taken on the fastest.
            num_devices: devices that share each op.
            num_microbatches: equal parts of the batch.
        """
        profiles, parts = _profiles(hardware), num_devices * num_microbatches
        return sum(
            count * min(_least_op_s(kind, parts, profile) for profile in profiles)
            for kind, count in self.kinds
        )

    def least_staged_s(
        self,
        hardware: Hardware,
        num_devices: int,
        num_stages: int,
        num_microbatches: int,
        num_chunks: int = 1,
    ) -> float:
        """Bound the seconds of a step of a pipeline whose stages take equally long.

        With P devices along the pipeline and t seconds for a microbatch through all stages, each
        device works M · t / P and waits (P − 1) · t / (P · v), with v stages per device (Narayanan
        et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2).
        For 1F1B and GPipe this bounds unequal stages as well, since the slowest sets the pace.

        Args:
            hardware: as in `least_s`.
            num_devices: devices that share a stage.
            num_stages: P, the devices along the pipeline's axis.
            num_microbatches: M.
            num_chunks: v, stages per device.
        """
        least_s = self.least_s(hardware, num_devices, num_microbatches)
        return least_s * (num_microbatches + (num_stages - 1) / num_chunks) / num_stages


def _profiles(hardware: Hardware) -> tuple[HardwareProfile, ...]:
    return tuple(dict.fromkeys(hardware.profiles)) if isinstance(hardware, Mixed) else (hardware,)


def _least_op_s(kind: _Kind, parts: int, profile: HardwareProfile) -> float:
    """Bound the seconds of one of `parts` parts of an op.

    An op that repeats its work for one block of rows after another can have fewer repetitions, or
    smaller ones.
    """
    work, times, dtype = kind
    smaller = Work(times * work.flops // parts, times * work.bytes // parts, work.kind)
    at_once_s = compute_time(smaller, dtype, profile)
    if times == 1:
        return at_once_s
    return min(at_once_s, times / parts * compute_time(work, dtype, profile))
