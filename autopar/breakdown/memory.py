"""What a device holds at the peak, by kind."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.plans import RESTING, Pipeline

_EITHER = ("activations", "gradients")  # activations are gone when the last gradient is there
_KINDS = (*RESTING, *_EITHER, "transient")


def rank_memory(pipeline: Pipeline, rank: int) -> tuple[int, Mapping[str, int]]:
    """A rank's peak, and kind → bytes of it; of several stages on a rank all that rests in each."""
    chunks = [stage.prediction for stage in pipeline.stages[rank :: pipeline.num_ranks]]
    if not pipeline.rank_bytes:
        return chunks[0].peak_bytes, chunks[0].memory_bytes
    peak, kinds = pipeline.rank_bytes[rank], {kind: sum(p.memory_bytes.get(kind, 0) for p in chunks) for kind in _KINDS}
    rests = sum(kinds[kind] for kind in RESTING)
    return peak, {**kinds, "transient": max(peak - rests - max(kinds[kind] for kind in _EITHER), 0)}


def peak_kinds(kinds: Mapping[str, int]) -> dict[str, int]:
    """Of kinds of memory those that make up the peak, in the order in which they are stacked: what rests always, the larger of activations
    and gradients, what is transient."""
    either = max(_EITHER, key=lambda kind: kinds.get(kind, 0))
    return {kind: kinds[kind] for kind in (*RESTING, either, "transient") if kinds.get(kind)}
