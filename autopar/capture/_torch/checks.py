"""Ops that check their result while they run, as torch.linalg.inv, cholesky and solve do: a program gives what the unchecked forms give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._library import simple_registry

_CHECK = "aten::_linalg_check_errors"


@contextlib.contextmanager
def checks_in_no_order() -> Iterator[None]:
    """Since torch 2.13 such a check is an effect, which a graph is given tokens for; here it is a call whose result nothing reads."""
    held = getattr(simple_registry.singleton.find(_CHECK), "effect", None)
    before = getattr(held, "effect", None)
    if held is None or before is None:
        yield
        return
    held.register(None)
    try:
        yield
    finally:
        held.register(before)
