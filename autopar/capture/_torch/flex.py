"""`flex_attention` has no rules yet: a capture refuses its functions by name before torch tries to compile them for fake tensors.

torch compiles ``flex_attention`` and ``create_block_mask`` where a model calls them outside of a graph. With fake tensors the compiled code
reads memory that does not exist, and the process dies. Models import both functions by name, so the first function that each of them
calls within torch's module is replaced.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

from torch.nn.attention import flex_attention as torch_flex

from autopar.capture.refusals import of_flex_attention, user_line

_FIRST_CALLED = {
    "_get_mod_type": "create_block_mask",
    "_validate_no_nested_tensors": "flex_attention",
}

@contextlib.contextmanager
def flex_attention_refused() -> Iterator[None]:
    """Raise CaptureError where forward calls `flex_attention` or makes a mask for it."""
    with contextlib.ExitStack() as stack:
        for first, name in _FIRST_CALLED.items():
            if hasattr(torch_flex, first):
                stack.enter_context(mock.patch.object(torch_flex, first, _refusing(name)))
        yield


def _refusing(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise of_flex_attention(name, user_line("".join(traceback.format_stack())))

    return refuse
