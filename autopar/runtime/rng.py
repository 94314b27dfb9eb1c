"""The random state of a compiled module."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RuntimeStateError
from autopar.ops import random
from autopar.runtime.device_mesh import first_rank_says
from autopar.runtime.guards import Variants
from autopar.runtime.module_shell import Standing
from autopar.runtime.rank_consistency import check_random_state


class Drawing(Standing):
    """A module with one random state for all its programs. Each call continues from the state after
    the previous one.

    Attributes:
        device_mesh: the mesh.
        variants: the programs of other modes and shapes; None if there cannot be any.
    """

    device_mesh: DeviceMesh
    variants: Variants | None
    _world: DeviceMesh
    _pending: int | None = None
    _is_compared: bool = False

    def manual_seed(self, seed: int) -> None:
        """Restart random numbers from a seed, which must be equal on every rank.

        Dropout and all other random numbers of the model depend on this seed, the number of calls
        since, and the position of an element in the whole tensor. They do not depend on layouts or
        the number of ranks.

        Args:
            seed: the seed.
        """
        self._set(random.initial_state(seed))

    @property
    def random_state(self) -> int | None:
        """The random state before the next call; None if the model draws no random numbers. Save it
        with a checkpoint to resume with the same numbers.

        ``pm.random_state = value`` sets it. The value must be equal on every rank.
        """
        state = self._drawn_from()
        return self._pending if state is None else int(state)

    @random_state.setter
    def random_state(self, state: int) -> None:
        """Set the random state.

        Raises:
            RuntimeStateError: if the model draws no random numbers.
        """
        if self._drawn_from() is None and self.variants is None:
            raise RuntimeStateError("the model draws no random numbers, so it has no random state")
        self._set(state)

    def _set(self, state: int | Tensor) -> None:
        """Set the state. If no program draws yet, the first one that does begins with it."""
        self.__dict__["_is_compared"] = False
        drawn_from = self._drawn_from()
        if drawn_from is None:
            self.__dict__["_pending"] = int(state)
        else:
            drawn_from.fill_(int(state))

    def _compare_state(self) -> None:
        """Compare the state with that of the other ranks in the first call after it was made or
        set.

        Raises:
            RuntimeStateError: on every rank, if the states differ.
        """
        state = None if self._is_compared else self._drawn_from()
        if state is not None:
            check_random_state(int(state), self._world)
            self.__dict__["_is_compared"] = True

    def _state_to_draw_from(self) -> Tensor | None:
        """Return the state of all programs, or a new one with the value that was set. None if no
        program draws and no state was set."""
        known = self._drawn_from()
        if known is None and self._pending is not None:
            return random.initial_state(0).fill_(self._pending).to(self.device_mesh.device_type)
        return known

    def _drawn_from(self) -> Tensor | None:
        """Return the state tensor, one for all programs of the module, which the first program that
        draws makes."""
        variants = () if self.variants is None else self.variants.known
        found = (
            module._buffers.get(random.STATE)
            for module in (self, *variants)
            if isinstance(module, Drawing)
        )
        return next((state for state in found if state is not None), None)

    def _first_state(self) -> Tensor:
        """Return the state for torch's initial seed on the mesh's first rank."""
        seed = first_rank_says(torch.initial_seed(), self._world)
        return random.initial_state(seed).to(self.device_mesh.device_type)
