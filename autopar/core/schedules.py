"""Names of pipeline schedules, as torch.distributed.pipelining has them, and of leaving the
choice to the planner."""

from __future__ import annotations

INTERLEAVED = "interleaved_1f1b"
GPIPE = "gpipe"
SCHEDULES = ("1f1b", GPIPE, INTERLEAVED)
AUTO = "auto"
