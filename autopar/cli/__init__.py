"""The command line; `commands` has what each does."""

from __future__ import annotations

import errno
import io
import sys

from autopar.cli.commands import app
from autopar.cli.shared_options import as_flags
from autopar.core.terminal import complain
from autopar.core.text_files import reason_of
from autopar.errors import AutoparError

__all__ = ["app", "main"]
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line. Print autopar errors without a traceback. Characters that the encoding
    of the output lacks are replaced by question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        app()
    except AutoparError as error:
        complain(as_flags(str(error)))
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        complain(f"cannot write the output: {reason_of(error)}")
        sys.exit(1)
