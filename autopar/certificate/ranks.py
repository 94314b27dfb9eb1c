"""What a pipeline's ranks claim where each holds several stages: the order of their work, and the memory that the stages share.

A stage's own certificate says what it holds alone; here what the stages of a rank hold together is counted anew on the emitted programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from autopar.capture.trace import Trace
from autopar.certificate.kernels import shared_forms
from autopar.certificate.report import Finding
from autopar.cost.priced import OPTIMIZERS
from autopar.hardware import Hardware, profile_of
from autopar.plans import KERNELS_BUFFERS, Pipeline, Plan
from autopar.run.orders import Action, interleaved, num_rounds
from autopar.run.program import ProgramTensor, StagedProgram
from autopar.run.rank_memory import chunk_memory, rank_peak
from autopar.schedules import INTERLEAVED

_STATIC = ("parameters", "optimizer", "copies", "buffers", "inputs")


def actions_of(pipeline: Pipeline, stage: int) -> tuple[Action, ...]:
    """What the rank of a stage does, where it holds others beside it."""
    num_ranks = len(pipeline.rank_bytes)
    return interleaved(num_ranks, pipeline.num_chunks, pipeline.num_microbatches)[stage % num_ranks] if num_ranks else ()


def interleaves(pipeline: Pipeline) -> Iterator[Finding]:
    """Whether the schedule is one for so many stages a rank, and so many microbatches."""
    if (pipeline.schedule == INTERLEAVED) != (pipeline.num_chunks > 1):
        yield Finding("memory", f"{pipeline.schedule} does not hold {pipeline.num_chunks} stages on a rank")
    elif pipeline.num_chunks > 1 and not num_rounds(len(pipeline.rank_bytes), pipeline.num_microbatches):
        yield Finding("emission", f"{pipeline.num_microbatches} microbatches are no equal rounds over {len(pipeline.rank_bytes)} ranks")


def shared_memory(plan: Plan, program: StagedProgram, traces: Sequence[Trace], hardware: Hardware) -> Iterator[Finding]:
    """Whether the stages of each rank, of these traces, hold together what is claimed, and fit into the budget."""
    pipeline = plan.pipeline
    assert pipeline is not None, "the plan has stages"
    several = [*zip(traces, pipeline.stages, strict=True)] if pipeline.rank_bytes else []
    forms = [shared_forms(t, stage, profile_of(hardware, pipeline.axis, number)) for number, (t, stage) in enumerate(several)]
    derived = [_rank(plan, pipeline, program, rank, forms) for rank in range(len(pipeline.rank_bytes))]
    for rank, (peak, _) in enumerate(derived):
        if peak != pipeline.rank_bytes[rank]:
            yield Finding("memory", f"the stages of rank {rank} hold {peak} bytes together, not {pipeline.rank_bytes[rank]}")
        if peak > plan.budget_of(rank):
            yield Finding("memory", f"the peak of rank {rank}, {peak} bytes, is over the budget of {plan.budget_of(rank)}")
    claimed = plan.prediction
    if derived and (claimed.peak_bytes, dict(claimed.memory_bytes)) != max(derived, key=lambda rank: rank[0]):
        yield Finding("memory", f"the fullest rank's peak is not {claimed.peak_bytes} bytes, or is made up otherwise")


def _rank(
    plan: Plan, pipeline: Pipeline, program: StagedProgram, rank: int, forms: Sequence[Mapping[tuple[object, ...], int]]
) -> tuple[int, dict[str, int]]:
    """A rank's peak and what makes it up; of tensors that several of its stages read there is one, and of what their kernels share."""
    numbers = range(rank, len(pipeline.stages), len(pipeline.rank_bytes))
    outputs = plan.options.get("outputs", "dtensor")
    chunks = {n: chunk_memory(program.stages[n], outputs) for n in numbers}
    kinds: dict[str, int] = dict.fromkeys(_STATIC, 0)
    for n in numbers:
        for kind, size in pipeline.stages[n].prediction.memory_bytes.items():
            kinds[kind] = kinds.get(kind, 0) + size
    state, _ = OPTIMIZERS[str(plan.options["optimizer"])]
    held: set[str] = set()
    for n in numbers:
        for kind, tensors in (("parameters", program.stages[n].parameters), ("buffers", program.stages[n].buffers)):
            for tensor in (t for t in tensors if t.name in held):
                kinds[kind] -= chunks[n].resting[tensor.name]
                kinds["optimizer"] -= state * chunks[n].resting[tensor.name] if tensor.has_gradient else 0
        held |= chunks[n].resting.keys()
    buffers = sum({form: size for n in numbers for form, size in forms[n].items()}.values())
    kinds |= {KERNELS_BUFFERS: buffers} if buffers or KERNELS_BUFFERS in kinds else {}
    batch = sum(_bytes(tensor) for tensor in program.inputs)
    peak = rank_peak(chunks, actions_of(pipeline, rank), pipeline.num_microbatches) + batch + kinds["optimizer"] + buffers
    beside = sum(kinds[kind] for kind in _STATIC) + buffers + max(kinds["activations"], kinds["gradients"])
    gathered = {} if kinds["copies"] else {"copies"}
    return peak, {**{k: v for k, v in kinds.items() if k not in gathered}, "transient": max(peak - beside, 0)}


def _bytes(tensor: ProgramTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
