"""Collectives of GPU tensors through the CPU, for processes that share one GPU: NCCL wants a GPU
for each, gloo has few of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FUNCTIONAL = torch.ops._c10d_functional
_OPS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
)


def stage_collectives() -> torch.library.Library:
    """From now on, as long as what it returns is held, these of torch's functional collectives
    copy GPU tensors to the CPU and back."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in _OPS:
        library.impl(name, _staged(getattr(_FUNCTIONAL, name)), "CUDA")
    return library


def _staged(op: Any) -> Any:
    def run(x: Tensor, *settings: Any) -> Tensor:
        made: Tensor = _FUNCTIONAL.wait_tensor(op(x.cpu(), *settings))
        return made.to(x.device)

    return run
