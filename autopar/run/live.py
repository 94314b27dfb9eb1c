"""Counting live tensor bytes, of real tensors and of fake ones.

A storage counts from the operator that first shows it until it is freed; views share their storage. Kernels' own scratch
memory, what the allocator keeps, and what lies on the host (`autopar.kernels.host`) are not in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.kernels import host


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages made while it is active, and of those that are registered.

    Attributes:
        live_bytes: now. peak_bytes: the largest so far (see `reset_peak`). paused: what is made now does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.paused = False
        self._known: dict[int, weakref.finalize] = {}

    def register(self, tensors: Iterable[Any]) -> None:
        """Count tensors that exist already: parameters, buffers, the batch. What is no tensor is passed over."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._see(tensor)

    def reset_peak(self) -> None:
        """Begin a new peak at what is live now."""
        self.peak_bytes = self.live_bytes

    def mark(self, key: int) -> object:
        """Of a storage, by its address, what is the same as long as it lives; None where it is not counted."""
        return self._known.get(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on local tensors come here
        result = func(*args, **(kwargs or {}))
        made = [result] if isinstance(result, Tensor) else [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if host.is_used() and host.follows([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]):
            for leaf in made:
                host.put_on_host(leaf)
        for leaf in made if not self.paused else ():
            self._see(leaf)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for finalizer in self._known.values():
            finalizer.detach()
        self._known.clear()

    def _see(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known and not host.is_on_host(local):
            self._known[key] = weakref.finalize(storage, self._free, key, num_bytes)
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        if self._known.pop(key, None) is not None:
            self.live_bytes -= num_bytes
