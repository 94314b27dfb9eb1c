"""The number of examples of a property test: all of them in nightly runs, half otherwise."""

from __future__ import annotations

from hypothesis import settings

BY_NIGHT = 50  # the default of tests that do not set a number


def examples(num: int) -> settings:
    """Set the number of examples of nightly runs."""
    by_default: int = settings.default.max_examples  # type: ignore[union-attr]
    return settings(max_examples=num * by_default // BY_NIGHT)
