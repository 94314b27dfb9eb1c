"""What errors and plans advise in Python, as flags of the command line."""

from __future__ import annotations

import re
import shlex

_CONSTRAINT = re.compile(r"constraints=[\[(]+autopar\.constraints\.(\w+\([^()]*\)),?[\])]+")
_FLAGS = (
    (r"\bmemory_bytes=([\w.*]+)", r"--memory \1"),
    (r"\bmemory_bytes\b", "--memory"),
    (r"\boutputs=[\"'](\w+)[\"']", r"--outputs \1"),
    (r"\bnum_microbatches=(\d+)", r"--microbatches \1"),
    (r"\binference=True\b", "--inference"),
)


def as_flags(text: str) -> str:
    """The text, with options of `autopar.plan` as flags."""
    text = _CONSTRAINT.sub(lambda found: f"--constraint {shlex.quote(found[1].replace(chr(39), chr(34)))}", text)
    for python, flag in _FLAGS:
        text = re.sub(python, flag, text)
    return text
