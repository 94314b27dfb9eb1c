"""Whether a plan's layouts are of the tensors that they are said to be of: a placement per mesh axis, and no dim that a tensor has not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Shard

from autopar.certificate.facts import Claims, Facts, Tensor
from autopar.certificate.report import Finding
from autopar.halo import Halo
from autopar.layout import Layout


def beyond(facts: Facts, claims: Claims, num_axes: int) -> Iterator[Finding]:
    """Of each tensor what cannot be a layout of it; sizes cannot be derived there."""
    for tensor in facts.tensors.values():
        wrong = sorted({str(at) for at in _said_of(tensor, claims) if not _is_of(at, tensor.shape, num_axes)})
        if wrong:
            named = f"{', '.join(wrong)} cannot be {'layouts' if wrong[1:] else 'a layout'}"
            what = f"{named} of a tensor of shape {tensor.shape} on {num_axes} axes"
            yield Finding("layouts", what, f"{tensor.key}, result {tensor.result}" if tensor.result else tensor.key)


def _said_of(tensor: Tensor, claims: Claims) -> Iterator[Layout]:
    here = tensor.key, tensor.result
    for said in (claims.chosen, claims.again):
        if tensor.key in said:
            yield from said[tensor.key].outputs[tensor.result : tensor.result + 1]
        for reader in tensor.readers:
            if reader.key in said:
                yield from said[reader.key].inputs[reader.operand : reader.operand + 1]
    yield from claims.kept.get(here, ())
    for phase in ("forward", "backward", "step"):
        for step in claims.steps.get((here, phase), ()):
            yield from (step.source, step.target)


def _is_of(layout: Layout, shape: Sequence[int], num_axes: int) -> bool:
    dims = [placement.dim for placement in layout.placements if isinstance(placement, Shard | Halo)]
    return len(layout.placements) == num_axes and all(0 <= dim < len(shape) for dim in dims)
