"""Further programs of one module: for the other mode, for batches of other shapes, other plain arguments, over the same parameters.

A program is of one mode, one set of shapes, and one value of each argument that is no tensor. A call that does not fit it, the last
batch of an epoch among others, is planned and emitted when it first comes, with every parameter as it rests already; from then on its
program is there, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from autopar.errors import RuntimeStateError
from autopar.run.ranks import rank

log = logging.getLogger("autopar")

MOST = 16  # of a module: each takes a search, and is kept


class Misfit(RuntimeStateError):
    """A call that a program was not made for, and another could be."""


class OtherMode(Misfit):
    """A call in train mode of what was made in eval mode, or the other way round."""


class AsksForGradient(Misfit):
    """A call with an input that requires a gradient, of what was made without."""


class Unfrozen(Misfit):
    """A call that trains a parameter, of what was made while that was frozen."""


class Variant(Protocol):
    """A module with a program of its own."""

    training: bool

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> bool:
        """Whether its program was made for such a call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


Call = tuple[tuple[Any, ...], dict[str, Any]]
Make = Callable[[Any, bool, tuple[Any, ...], dict[str, Any]], Variant]
"""From a module, the mode and a call with the whole batch to the module that takes it; all ranks call it alike."""


class Variants:
    """Those of one module, which `make` makes."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self.known: list[Variant] = []

    def find(
        self, module: Any, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Callable[[], Call], misfit: Misfit
    ) -> Variant:
        """The module that takes a call in that mode.

        Args:
            module: which these are variants of. They do not hold it, so that it goes with its last user.
            whole: the call with the whole batch. misfit: why the module itself does not take it.

        Raises:
            RuntimeStateError: where there are too many already.
        """
        for known in self.known:
            if known.takes(args, kwargs, training=training):
                return known
        if len(self.known) >= MOST:
            what = f"{misfit.what}; and there are programs for {MOST} other modes, shapes and values already, each of which was planned"
            remedy = "pad batches to a few shapes, or leave the last one out (drop_last=True); pass a number that changes as a tensor"
            raise RuntimeStateError(what, remedy=remedy)
        if rank() == 0:
            level = logging.INFO if isinstance(misfit, OtherMode) else logging.WARNING
            log.log(level, "%s: planning for this call, too; what is made for it is kept", misfit.what)
        made = self._make(module, training, *whole())
        self.known.append(made)
        return made
