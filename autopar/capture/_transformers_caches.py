"""Caches of keys and values: no part of a capture, without a change to what the model computes.

Transformers' decoders make an empty cache in each forward, unless told not to. A training graph has
no use for it, so `use_cache` is off during a capture. One result depends on it: with a cache (even
an empty one) transformers ignores that `position_ids` may describe several documents in a row; only
without one it masks the documents from each other. Therefore:

- If the positions are known to count up by one there is one document, and no mask in either case.
- Otherwise the model is captured with `use_cache` as the user set it. Where the model makes a cache,
  it gets one that keeps nothing: `EmptyCache` in the place of `DynamicCache`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.errors import CaptureError, Where

_MOST_POSITIONS = 1 << 14  # longer sequences are not compared: a capture does not know their values
_CACHES = ("past_key_values", "past_key_value", "cache_params")
_FINDER = "find_packed_sequence_indices"  # of transformers.masking_utils


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Turn `use_cache` off in every configuration of `model`, and on again at the end where it was."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if config is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True


def refuse_caches(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise CaptureError at an argument that is a cache of keys and values, by its class, or, in a transformers model, by its name."""
    is_theirs = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    for name, value in arguments.items():
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
        if "transformers.cache_utils.Cache" in kinds or (is_theirs and name in _CACHES and value is not None):
            raise CaptureError(
                f"the argument {name!r} is a cache of keys and values ({type(value).__name__}), "
                "which forward changes: it is for generating token by token, "
                "and a program has nothing that stays from one call to the next",
                remedy=f"leave {name} out, and pass the whole sequence in each call, with the "
                "tokens for which the cache stands; to generate token by token, use the plain model",
            )


def asks_for_documents(refusal: CaptureError) -> bool:
    """Whether a capture stopped where transformers looks for several documents in `position_ids`."""
    return isinstance(refusal.where, Where) and f"{_FINDER}(" in refusal.where.source


@contextlib.contextmanager
def documents_if_known(positions_are_default: bool) -> Iterator[None]:
    """Let transformers find no documents in positions that count up by one, and branch on others.

    A branch on positions that are data stops the capture (`asks_for_documents`).

    Args:
        positions_are_default: whether a transformers model is captured that makes its own positions;
            sequences too long to be known then count as one document.
    """
    find = _finder()
    if find is None:
        yield
        return

    def find_if_known(position_ids: Tensor) -> Tensor | None:
        if positions_are_default and position_ids.numel() > _MOST_POSITIONS:
            return None
        if (position_ids[:, 1:] - position_ids[:, :-1] == 1).all():
            return None
        return find(position_ids)

    with mock.patch.object(_masking_utils(), _FINDER, find_if_known):
        yield


@contextlib.contextmanager
def empty_caches(model: nn.Module) -> Iterator[None]:
    """Let `model` use caches as the user asks, of a class that keeps nothing, and look for documents."""
    modules = {type(module).__module__ for module in model.modules()}
    modeling = [sys.modules[name] for name in modules if name.startswith("transformers.")]
    with contextlib.ExitStack() as stack:
        for module in modeling:
            if hasattr(module, "DynamicCache"):
                stack.enter_context(mock.patch.object(module, "DynamicCache", _empty_cache()))
        stack.enter_context(mock.patch.object(_masking_utils(), _FINDER, _finder()))
        yield


def _masking_utils() -> Any:
    return sys.modules.get("transformers.masking_utils")


@functools.cache
def _finder() -> Callable[[Tensor], Tensor | None] | None:
    """Transformers' own function, looked up once, before anything takes its place."""
    return getattr(_masking_utils(), _FINDER, None)


@functools.cache
def _empty_cache() -> type:
    """A `DynamicCache` without contents: what comes back from the model has None in its place."""
    from transformers import DynamicCache

    class EmptyCache(DynamicCache):  # type: ignore[misc]
        """A cache that hands on the keys and values of this call alone."""

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            return key_states, value_states

    pytree.register_pytree_node(
        EmptyCache,
        lambda cache: ([], None),
        lambda values, context: None,
        serialized_type_name="autopar.EmptyCache",
        flatten_with_keys_fn=lambda cache: ([], None),
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda dumped: dumped,
    )
    return EmptyCache
