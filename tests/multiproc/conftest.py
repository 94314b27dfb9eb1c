"""Make ``tests/support`` importable, in this process and in spawned processes."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = next(parent for parent in Path(__file__).parents if parent.name == "tests")
for folder in (str(TESTS / "support"), str(TESTS / "multiproc")):
    if folder not in sys.path:
        sys.path.insert(0, folder)
