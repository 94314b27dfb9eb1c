"""Collectives of GPU tensors through the CPU, for processes that share a GPU. NCCL needs one GPU
per process, and gloo supports few collectives of GPU tensors."""

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
    """Copy GPU tensors to the CPU and back in these collectives of torch, as long as the returned
    object exists."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in _OPS:
        library.impl(name, _through_cpu(getattr(_FUNCTIONAL, name)), "CUDA")
    return library


def _through_cpu(op: Any) -> Any:
    def run(x: Tensor, *settings: Any) -> Tensor:
        result: Tensor = _FUNCTIONAL.wait_tensor(op(x.cpu(), *settings))
        return result.to(x.device)

    return run
