"""The command line; `commands` has what each does."""

from __future__ import annotations

import sys

from autopar.cli.commands import app
from autopar.cli.shared_options import as_flags
from autopar.core.terminal import complain
from autopar.errors import AutoparError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line. Print autopar errors without a traceback."""
    try:
        app()
    except AutoparError as error:
        complain(as_flags(str(error)))
        sys.exit(1)
