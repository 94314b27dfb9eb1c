"""The search over plans."""

from autopar.planning.options import PlanOptions
from autopar.planning.search import Planned, make_plan

__all__ = ["PlanOptions", "Planned", "make_plan"]
