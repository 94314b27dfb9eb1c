"""Names of pipeline schedules, as in torch.distributed.pipelining, and the name that leaves the
choice to the planner."""

from __future__ import annotations

INTERLEAVED = "interleaved_1f1b"
GPIPE = "gpipe"
SCHEDULES = ("1f1b", GPIPE, INTERLEAVED)
AUTO = "auto"
