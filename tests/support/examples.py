"""How many examples of a property are tried: all of them by night, half by day."""

from __future__ import annotations

from hypothesis import settings

BY_NIGHT = 50  # of a test that asks for no number


def examples(num: int) -> settings:
    """So many by night."""
    by_default: int = settings.default.max_examples  # type: ignore[union-attr]
    return settings(max_examples=num * by_default // BY_NIGHT)
