"""What random numbers of a compiled module follow from."""

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
    """One state for all programs of a module: each call goes on from where the one before ended.

    Attributes:
        variants: programs of other modes and shapes, where there may be some.
    """

    device_mesh: DeviceMesh
    variants: Variants | None
    _world: DeviceMesh
    _pending: int | None = None
    _is_compared: bool = False

    def manual_seed(self, seed: int) -> None:
        """Begin anew with the random numbers of `seed`, which must be the same on every rank.

        Dropout and all else that is random in the model follows from this seed, the number of calls
        since, and each element's place in the whole tensor: neither the layout nor the number of
        ranks matters.
        """
        self._set(random.initial_state(seed))

    @property
    def random_state(self) -> int | None:
        """The state before the next call; None where the model draws nothing. Save it with a
        checkpoint to go on as before.

        ``pm.random_state = value`` sets it, on every rank alike.
        """
        state = self._drawn_from()
        return self._pending if state is None else int(state)

    @random_state.setter
    def random_state(self, state: int) -> None:
        if self._drawn_from() is None and self.variants is None:
            raise RuntimeStateError("the model draws no random numbers: it has no random state")
        self._set(state)

    def _set(self, state: int | Tensor) -> None:
        """Go on from a state; where no program draws yet, one that does later begins with it."""
        self.__dict__["_is_compared"] = False
        drawn_from = self._drawn_from()
        if drawn_from is None:
            self.__dict__["_pending"] = int(state)
        else:
            drawn_from.fill_(int(state))

    def _compare_state(self) -> None:
        """Compare the state with that of the other ranks, in the first call after it was made or
        set.

        Raises:
            RuntimeStateError: on every rank, where they differ.
        """
        state = None if self._is_compared else self._drawn_from()
        if state is not None:
            check_random_state(int(state), self._world)
            self.__dict__["_is_compared"] = True

    def _state_to_draw_from(self) -> Tensor | None:
        """That of all programs, for one that draws, too; None where none draws and none was set."""
        known = self._drawn_from()
        if known is None and self._pending is not None:
            return random.initial_state(0).fill_(self._pending).to(self.device_mesh.device_type)
        return known

    def _drawn_from(self) -> Tensor | None:
        """What random numbers follow from: one for all programs of the module, of which the
        first that draws some makes it."""
        variants = () if self.variants is None else self.variants.known
        found = (
            module._buffers.get(random.STATE)
            for module in (self, *variants)
            if isinstance(module, Drawing)
        )
        return next((state for state in found if state is not None), None)

    def _first_state(self) -> Tensor:
        """That of torch's seed on the mesh's first rank."""
        seed = first_rank_says(torch.initial_seed(), self._world)
        return random.initial_state(seed).to(self.device_mesh.device_type)
