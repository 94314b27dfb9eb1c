"""Problem → Choices: the only package that imports pulp."""

from autopar.solve.evaluate import Evaluation, evaluate, variant_time
from autopar.solve.solver import solve

__all__ = ["Evaluation", "evaluate", "solve", "variant_time"]
