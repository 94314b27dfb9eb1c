"""torch.compile under an activation memory budget: as a graph of plain ops, and through
Inductor."""

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
    """The reason for which Inductor cannot run here, or nothing."""
    if any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        return None
    return "Inductor needs a C++ compiler and there is none"


def show_buffers() -> None:
    """Let Inductor's own buffers pass through the dispatcher, where they can be counted. Before
    anything is compiled."""

    def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    torch._C._dynamo.guards._empty_strided_cpu = (
        empty_strided  # generated modules take it from here
    )


def compiled(
    model: nn.Module, batch: Mapping[str, Tensor], backend: str, share: float
) -> Callable[[], Tensor]:
    """The model's loss, compiled for this batch; `share` is torch's ``activation_memory_budget``.
    One step has been run.

    Args:
        backend: ``aot_eager_decomp_partition`` has Inductor's decompositions and partitioner and
            runs the ops one by one; or ``inductor``.
    """

    def loss(**inputs: Any) -> Tensor:
        found: Tensor = model(**inputs)["loss"]
        return found

    if hasattr(
        logging.Logger, "warning_once"
    ):  # transformers', on whose warnings Dynamo would give up
        torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning_once)
    # Dynamo remembers by code object: one each, or a variant would take another's place.
    loss.__code__ = loss.__code__.replace(co_name=f"loss_{backend}_{int(share * 100)}")
    function = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    with torch._functorch.config.patch(activation_memory_budget=share):
        function(**batch).backward()
    return lambda: function(**batch)
