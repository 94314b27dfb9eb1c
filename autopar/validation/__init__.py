"""Translation validation: check an emitted program against its trace and its plan, node by node,
before it runs."""

from autopar.validation.microbatch_graphs import validate_microbatches
from autopar.validation.states import Validation
from autopar.validation.whole import validate

__all__ = ["Validation", "validate", "validate_microbatches"]
