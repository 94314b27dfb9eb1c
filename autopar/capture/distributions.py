"""Divergences of torch's distributions: which formula a pair of classes has is looked up before anything is captured.

`torch.distributions.kl_divergence` looks for it among those that are registered, in a way that Dynamo cannot follow, and remembers what it
found. A capture must not depend on what the process computed before.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch.distributions import Distribution, kl

_Pair = tuple[type, type]


def known_divergences() -> contextlib.AbstractContextManager[object]:
    """Every pair of classes has its formula for a while, as if `kl_divergence` had been called with each."""
    return mock.patch.dict(kl._KL_MEMOIZE, _formulas(frozenset(_kinds(Distribution)), frozenset(kl._KL_REGISTRY.items())))


def _kinds(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield each
        yield from _kinds(each)


@functools.lru_cache(maxsize=1)
def _formulas(kinds: frozenset[type], registered: frozenset[tuple[_Pair, Any]]) -> Mapping[_Pair, Callable[..., Any]]:
    """Pair of classes → its formula, of all that have one; `registered` is what torch looks in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pairs that no model may have
        found = {(p, q): kl._dispatch_kl(p, q) for p in kinds for q in kinds}
    return {pair: formula for pair, formula in found.items() if formula is not NotImplemented}
