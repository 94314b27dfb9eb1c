"""``python -m autopar.runtime.launch_worker SCRIPT ...``: a script of one of several processes,
each of which has a GPU of its own from the begin.

Else what the script moves to ``"cuda"`` before it compiles anything would lie on the first GPU in
all of them.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import ModuleType

from autopar.runtime.rank_comm import take_gpu


def main() -> None:
    """Run the script as Python does: as ``__main__``, with its arguments, and its folder first
    on the path."""
    take_gpu()
    script, *arguments = sys.argv[1:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    module = ModuleType("__main__")
    vars(module).update(__file__=script, __builtins__=builtins)
    # Not by runpy: multiprocessing, which torch imports, has kept what was the main module until
    # now, and would look for classes in it.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))


if __name__ == "__main__":
    main()
