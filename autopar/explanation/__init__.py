"""A plan in words and tables, and what differs between two plans."""

from autopar.explanation.difference import Diff, diff
from autopar.explanation.explain import explain
from autopar.explanation.stage_tables import Explanation

__all__ = ["Diff", "Explanation", "diff", "explain"]
