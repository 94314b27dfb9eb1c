"""The eps that a norm takes from its dtype where none is given, while the model is promoted."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OwnEps(TorchFunctionMode):
    """Calls of rms_norm without eps take that of `dtype`, the model's own, which is in its traced graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = _eps_of(dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.rms_norm, torch.nn.functional.rms_norm) and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
            args, kwargs["eps"] = args[:3], self._eps
        return func(*args, **kwargs)


@functools.cache
def _eps_of(dtype: torch.dtype) -> float:
    """As torch has it, of the dtype itself or, as of torch 2.13, of that in which it computes a norm: found by norming one small number,
    which becomes x / √(x² + eps)."""
    known = [torch.finfo(each).eps for each in dict.fromkeys((dtype, torch.float32))]
    x = torch.tensor([1e-3], dtype=dtype)
    normed = torch.nn.functional.rms_norm(x, (1,)).double()
    wanted = [x.double() / (x.double() ** 2 + eps) ** 0.5 for eps in known]
    return min(zip(known, wanted, strict=True), key=lambda pair: float((pair[1] - normed).abs()))[0]
