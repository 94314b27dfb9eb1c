"""Models of the user's own: what ``FILE.py:FUNCTION`` returns."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from autopar.errors import AutoparError, Where


def load_function(spec: str) -> tuple[nn.Module, Any]:
    """(model, batch) as ``FILE.py:FUNCTION`` returns them.

    Raises:
        AutoparError: where the file or the function is missing, or it returns something else.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise AutoparError(f"{spec!r} is no FILE.py:FUNCTION", remedy="name a Python file and a function in it that returns (model, batch)")
    if not path.is_file():
        raise AutoparError(f"there is no file {file!r}", remedy="name one, then a colon and a function in it that returns (model, batch)")
    module_spec = importlib.util.spec_from_file_location(f"autopar_function_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise AutoparError(f"{file!r} is no Python file", remedy="name a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    beside = str(path.resolve().parent)
    if beside not in sys.path:  # as of a script: what lies beside it can be imported
        sys.path.insert(0, beside)
    sys.modules[module_spec.name] = module  # dataclasses look their module up
    load = module_spec.loader.exec_module
    _of_users(spec, lambda: load(module))
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise AutoparError(f"{file} has no function {name!r}", remedy="name a function that returns (model, batch)")
    built = _of_users(spec, function)
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        raise AutoparError(
            f"{spec} returned {type(built).__name__}, not (model, batch)", remedy="return an nn.Module and its example inputs"
        )
    return built


def _of_users(spec: str, run: Callable[[], Any]) -> Any:
    """What `run` returns of the user's file; what that raises is told with its last line there."""
    try:
        return run()
    except AutoparError:
        raise
    except Exception as error:
        file = Path(spec.rpartition(":")[0]).resolve()
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == file]
        line = f"{file.name}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(file)
        where = Where(source=line)
        raise AutoparError(f"{spec} raised {type(error).__name__}: {error}", where=where, remedy="correct the function") from error
