"""Translation validation: an emitted program against the trace and the plan that it was made of,
node by node, before it runs.
"""

from autopar.validation.microbatches import validate_microbatches
from autopar.validation.states import Validation
from autopar.validation.whole import validate

__all__ = ["Validation", "validate", "validate_microbatches"]
