"""Tests of capturing trace each model anew."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """In place of the one that shares captures between tests."""
