"""Explain a plan in text and tables, and compare two plans."""

from autopar.explanation.difference import Diff, diff
from autopar.explanation.explain import explain
from autopar.explanation.stage_tables import Explanation

__all__ = ["Diff", "Explanation", "diff", "explain"]
