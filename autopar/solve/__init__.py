"""Problem → Choices: the only package that imports pulp and highspy."""

from autopar.solve.common import Common
from autopar.solve.evaluate import Evaluation, evaluate, evaluated, fits
from autopar.solve.least import Least, Lightest, least_budget
from autopar.solve.moves import variant_load
from autopar.solve.multipliers import quickest
from autopar.solve.prices import op_load, routed_load
from autopar.solve.solver import choices_or_least, shortage, solve
from autopar.solve.taken import Taken, within

__all__ = [
    "Common", "Evaluation", "Least", "Lightest", "Taken", "choices_or_least", "evaluate", "evaluated", "fits",
    "least_budget", "op_load", "quickest", "routed_load", "shortage", "solve", "variant_load", "within",
]  # fmt: skip
