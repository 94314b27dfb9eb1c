"""torch.compile under an activation memory budget: as a graph of plain ops, and with Inductor."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

BUDGETS = (1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
INDUCTOR_BUDGETS = (1.0, 0.7, 0.5, 0.3)


def why_not_inductor() -> str | None:
    """Return the reason why Inductor cannot run here; None if it can."""
    if any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return None
    return "Inductor needs a C++ compiler, and none was found"


def show_buffers() -> None:
    """Allocate Inductor's buffers through the dispatcher, where they can be counted. Call this
    before any compilation."""

    def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    torch._C._dynamo.guards._empty_strided_cpu = (
        empty_strided  # generated modules import it from here
    )


def compiled(
    model: nn.Module, batch: Mapping[str, Tensor], backend: str, share: float
) -> Callable[[], Tensor]:
    """Return the model's loss, compiled for this batch. `share` is torch's
    ``activation_memory_budget``. One step has run.

    Args:
        model: the model.
        batch: its batch.
        backend: ``aot_eager_decomp_partition``, which uses Inductor's decompositions and
            partitioner and runs the ops one by one; or ``inductor``.
        share: the activation memory budget as a share.
    """

    def loss(**inputs: Any) -> Tensor:
        found: Tensor = model(**inputs)["loss"]
        return found

    if hasattr(
        logging.Logger, "warning_once"
    ):  # Dynamo does not support the warnings of transformers
        torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning_once)
    # Dynamo caches by code object. Each variant needs its own.
    loss.__code__ = loss.__code__.replace(co_name=f"loss_{backend}_{int(share * 100)}")
    function = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    with torch._functorch.config.patch(activation_memory_budget=share):
        function(**batch).backward()
    return lambda: function(**batch)
