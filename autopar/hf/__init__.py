"""Models by name, with matching batches. A name refers to a Hugging Face configuration, a known
size, or a function of the user.

A *spec* is ``TYPE:JSON`` (``llama:{"hidden_size": 64}``), ``TYPE/AutoClass:JSON`` for another head
than the causal LM head, or one of the names in `KNOWN`. Nothing is downloaded: a model is built
from its configuration, by default on the meta device. transformers is imported at the first build,
and torch when a name that needs it is first used.
"""

from typing import TYPE_CHECKING

from autopar.core.lazy import lazily
from autopar.hf.specs import KNOWN, parse

if TYPE_CHECKING:
    from autopar.hf.batches import unlabelled
    from autopar.hf.models import Built, build, load_function
else:
    __getattr__, __dir__ = lazily(
        "autopar.hf",
        {
            "Built": "autopar.hf.models",
            "build": "autopar.hf.models",
            "load_function": "autopar.hf.models",
            "unlabelled": "autopar.hf.batches",
        },
    )

__all__ = ["KNOWN", "Built", "build", "load_function", "parse", "unlabelled"]
