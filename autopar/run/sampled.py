"""Some of a tensor's values as a number, by which writes are seen that nothing counts: ``parameter.data.copy_(...)``."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from autopar.capture._torch.fakes import no_modes

MOST = 2048  # values of one tensor that are looked at; of smaller ones all
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes: numpy has no bfloat16


def sampled(x: Tensor) -> int | None:
    """A checksum of some values, evenly spaced; None of what has none here: on meta, fake, sparse, or of a class of its own."""
    if type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.layout != torch.strided or not x.numel():
        return None
    with torch.no_grad(), no_modes():  # what counts or traces a step's tensors does not see the look at these
        x = x.detach().resolve_conj().resolve_neg()
        x = torch.view_as_real(x) if x.is_complex() else x
        step = max(1, x.numel() // MOST) | 1  # odd: in each row of another column
        if x.is_contiguous():
            values = x.view(-1)[::step]
        else:
            values = x[torch.unravel_index(torch.arange(0, x.numel(), step, device=x.device), x.shape)]
        return zlib.crc32(values.cpu().view(_WORDS[x.element_size()]).numpy().tobytes())
