"""Problem → Choices: the only package that imports pulp."""

from autopar.solve.evaluate import Evaluation, evaluate
from autopar.solve.solver import solve

__all__ = ["Evaluation", "evaluate", "solve"]
