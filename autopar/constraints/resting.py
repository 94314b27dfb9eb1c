"""`rests_as`: every parameter rests as it does in another plan, so that two programs share one set of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.layout import Layout


@dataclass(frozen=True, slots=True)
class Resting:
    """Parameter name → storage layout, over the dims that graphs see; see `rests_as`."""

    storage: tuple[tuple[str, Layout], ...]

    def to_json(self) -> dict[str, Any]:
        return {"plan": "rests_as", "storage": {name: str(layout) for name, layout in self.storage}}

    def __str__(self) -> str:
        return f"rests_as(<{len(self.storage)} parameters>)"


def rests_as(storage: Mapping[str, Layout | str]) -> Resting:
    """Let parameters rest in these layouts; what is not named is the planner's.

    Args:
        storage: parameter name → its storage layout, over the dims in which graphs see it (those of the model, but for fused ones).

    Raises:
        LayoutError: where a layout cannot be read.
    """
    return Resting(tuple((name, Layout.parse(at) if isinstance(at, str) else at) for name, at in storage.items()))
