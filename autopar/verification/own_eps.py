"""The eps that a norm takes from its dtype where none is given, while the model is promoted."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OwnEps(TorchFunctionMode):
    """Calls of rms_norm without eps take that of `dtype`, the model's own, which is in its traced graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = torch.finfo(dtype).eps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.rms_norm, torch.nn.functional.rms_norm) and (args[3] if len(args) > 3 else kwargs.get("eps")) is None:
            args, kwargs["eps"] = args[:3], self._eps
        return func(*args, **kwargs)
