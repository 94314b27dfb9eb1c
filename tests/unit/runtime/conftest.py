"""Make ``tests/support`` importable, in this process and in spawned processes."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = str(
    next(parent for parent in Path(__file__).parents if parent.name == "tests") / "support"
)
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)
