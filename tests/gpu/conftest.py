"""Makes ``tests/support`` importable, here and in spawned processes, and destroys the process group
after each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

TESTS = next(parent for parent in Path(__file__).parents if parent.name == "tests")
for folder in (str(TESTS / "support"), str(TESTS / "multiproc")):
    if folder not in sys.path:
        sys.path.insert(0, folder)


@pytest.fixture(autouse=True)
def own_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
