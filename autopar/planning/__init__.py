"""The search over plans."""

from autopar.planning.search import Planned, make_plan
from autopar.planning.staged import make_staged_plan
from autopar.planning.tried import TooSlow
from autopar.request import PlanOptions

__all__ = ["PlanOptions", "Planned", "TooSlow", "make_plan", "make_staged_plan"]
