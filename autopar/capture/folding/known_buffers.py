"""Buffers of repeated layers whose values forward reads: all copies of a layer must hold the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autopar.capture._torch.fakes import no_modes
from autopar.capture._torch.preparing import Prepared
from autopar.capture.folding.entries import NotFoldable
from autopar.capture.folding.runs import Run


def know_all_copies(call: Prepared, runs: Sequence[Run]) -> Prepared:
    """The call with each known buffer of a layer known in all layers of its run.

    Raises:
        NotFoldable: the layers' buffers hold different values, so that their branches may differ.
    """
    first_names = {name: first for first, others in call.aliases.items() for name in (first, *others)}
    copies: set[str] = set()
    for name in (key for key in call.known if isinstance(key, str)):
        for other in (first_names.get(copy, "") for run in runs for copy in _copies(name, run)):
            if other not in call.buffers or not _is_equal(call, name, other):
                raise NotFoldable(f"forward reads the values of the buffer {name!r}, and {other!r} holds others")
            copies.add(other)
    missing = copies - call.known.keys()
    return call.knowing(missing) if missing else call


def _copies(name: str, run: Run) -> Iterator[str]:
    """The names of the same buffer in all units of a run; none if it is in no layer of the run."""
    found = run.find(name)
    if found is not None:
        yield from (f"{layer}{found[1]}" for layer in run.layers[run.like(found[0]) :: run.period])


def _is_equal(call: Prepared, name: str, other: str) -> bool:
    with no_modes():
        one, two = call.buffers[name].own, call.buffers[other].own
        return one.shape == two.shape and one.dtype == two.dtype and not two.is_meta and torch.equal(one, two)
