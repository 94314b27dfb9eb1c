"""The plain model with the parts that it computes in a smaller dtype computed in the one asked for, as its traced graph computes them.

Models cast to float32 where they were written for 16 bits: norms, softmaxes, rotary embeddings. In a float64 run these parts still round to
24 bits, and what follows may magnify that. Run so, nothing rounds, and a program is held against the model with float64's own tolerance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Widened(TorchDispatchMode):
    """Where an op is asked for a floating or complex dtype smaller than `dtype`, it is asked for `dtype` (or its complex twin)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._complex = dtype, dtype.to_complex()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(map(self._wide, args)), {name: self._wide(x) for name, x in (kwargs or {}).items()}
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and not any(isinstance(x, Tensor) for x in args):  # a factory without a dtype takes the default one
            wanted = self._wide(made.dtype)
            return made if wanted == made.dtype else made.to(wanted)
        return made

    def _wide(self, x: Any) -> Any:
        if not isinstance(x, torch.dtype) or not (x.is_floating_point or x.is_complex):
            return x
        wanted = self._complex if x.is_complex else self._dtype
        return wanted if x.itemsize < wanted.itemsize else x
