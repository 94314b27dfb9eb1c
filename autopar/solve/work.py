"""What a search has done, in steps of the simplex method rather than in seconds: the same from run to run, so that a limit of it gives the
same plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BEGINNING = 1000  # steps: what a run takes that needs none
_MOST = 2**31 - 1  # that HiGHS can be told


@dataclass(slots=True)
class Work:
    """What runs have done: simplex steps, each as dear as the program has columns. It is the same from run to run, as seconds are not.

    Attributes:
        spent: so far. most: where a search that has a plan ends.
    """

    spent: float = 0.0
    most: float = math.inf

    @property
    def is_over(self) -> bool:
        return self.spent >= self.most

    def add(self, num_columns: int, num_steps: int) -> None:
        """Count a run that took so many steps."""
        self.spent += num_columns * (max(num_steps, 0) + _BEGINNING)

    def steps_left(self, num_columns: int) -> int:
        """That a run of so many columns may take."""
        left = (self.most - self.spent) / max(num_columns, 1)
        return int(min(max(left, _BEGINNING), _MOST))
