"""Tests of capture trace each model again."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Replace the fixture that shares captures between tests."""
