"""What errors and plans advise in Python, as flags of the command line."""

from __future__ import annotations

import re
import shlex

_CONSTRAINT = re.compile(r"constraints=[\[(]+autopar\.constraints\.(\w+\([^()]*\)),?[\])]+")
_FLAGS = (
    (r"\bmemory_bytes=([\w.*]+)", r"--memory \1"),
    (r"(?<!\.)\bmemory_bytes\b", "--memory"),
    (r"\boutputs=[\"'](\w+)[\"']", r"--outputs \1"),
    (r"\bnum_microbatches=(\d+)", r"--microbatches \1"),
    (r"\binference=True\b", "--inference"),
)


def as_flags(text: str) -> str:
    """The text, with options of `autopar.plan` as flags."""
    text = _CONSTRAINT.sub(_constraint, text)
    for python, flag in _FLAGS:
        text = re.sub(python, flag, text)
    return text


def _constraint(found: re.Match[str]) -> str:
    call = found[1].replace("'", '"')  # so that one pair of quotes holds it in a shell
    return f"--constraint {shlex.quote(call)}"
