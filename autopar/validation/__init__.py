"""Translation validation: an emitted program against the trace and the plan that it was made of, node by node, before it runs."""

from autopar.validation.program import validate_program
from autopar.validation.report import Validation

__all__ = ["Validation", "validate_program"]
