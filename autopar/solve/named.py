"""Solvers by name: ``highs`` is the live model of `autopar.solve.search`; all others are those that PuLP finds on this machine."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pulp

from autopar.errors import AutoparError

LIVE = "highs"
_PREFIX = "pulp:"  # before a name: PuLP's solver, also where the name alone is the live model
_BUNDLED = "PULP_CBC_CMD"
_AFFIXES = re.compile(r"^PULP_|_(CMD|PY|DLL)$")


@dataclass(frozen=True, slots=True)
class PulpSolver:
    """One of PuLP's solvers.

    Attributes:
        name: PuLP's, for example ``PULP_CBC_CMD``. takes: the settings that its constructor has.
    """

    name: str
    takes: frozenset[str]

    def made(self, gap: float, time_limit_s: float) -> Any:
        """The solver with a relative gap and a limit of seconds, on one thread.

        Raises:
            AutoparError: where it takes no time limit and there is one.
        """
        settings: dict[str, Any] = {"msg": False}
        wanted = {"gapRel": gap, "threads": 1}
        settings |= {name: value for name, value in wanted.items() if name in self.takes}
        if math.isfinite(time_limit_s):
            if "timeLimit" not in self.takes:
                remedy = "leave time_limit_s out, or pass another solver"
                raise AutoparError(f"solver {self.name} takes no time limit through PuLP", remedy=remedy)
            settings["timeLimit"] = max(time_limit_s, 1.0)
        with warnings.catch_warnings():  # PuLP announces that version 4 comes without the bundled CBC
            warnings.simplefilter("ignore", DeprecationWarning)
            return pulp.getSolver(self.name, **settings)

    @property
    def keeps_gap(self) -> bool:
        """Whether it stops at the gap that it is given; else what "optimal" means is its own."""
        return "gapRel" in self.takes


def pulp_solver(name: str) -> PulpSolver:
    """PuLP's solver of a name: PuLP's own, or the family (``cbc``, ``scip``, ``gurobi``), in any case; ``pulp:`` may stand in front.

    Raises:
        AutoparError: where PuLP knows no such solver, or it is not installed.
    """
    wanted = name.lower().removeprefix(_PREFIX)
    known = [each for each in dict.fromkeys(pulp.listSolvers()) if wanted in (each.lower(), _family(each))]
    known.sort(key=lambda each: (each.lower() != wanted, each != _BUNDLED))
    usable = available() if known else ()
    for each in known:
        if each in usable:
            return PulpSolver(each, _takes(each))
    raise _refusal(name, known)


def check_solver(name: str) -> None:
    """That there is a solver of this name. Raises AutoparError."""
    if name.lower() != LIVE:
        pulp_solver(name)


def available() -> tuple[str, ...]:
    """The names of PuLP's solvers that run on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tuple(pulp.listSolvers(onlyAvailable=True))


def _refusal(name: str, known: Sequence[str]) -> AutoparError:
    here = ", ".join((LIVE, *(f"{_PREFIX}{each}" if each.lower() == LIVE else each for each in available())))
    remedy = f"pass one that is available here: {here}"
    if not known:
        return AutoparError(f"solver {name!r} is not known", remedy=remedy)
    what = f"solver {name!r} ({' or '.join(known)} in PuLP) is not installed"
    if _BUNDLED in known:
        what += ": PuLP has no CBC of its own for this platform, and there is no other"
    return AutoparError(what, remedy=f"install it so that PuLP finds it, or {remedy}")


def _family(name: str) -> str:
    return _AFFIXES.sub("", _AFFIXES.sub("", name)).lower()


def _takes(name: str) -> frozenset[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        solver = pulp.getSolver(name, msg=False)
    return frozenset(inspect.signature(type(solver).__init__).parameters)
