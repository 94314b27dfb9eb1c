"""``python -m autopar.runtime.launch_worker SCRIPT ...``: run a script in one of several processes,
with the GPU of the process as the current device.

Otherwise, tensors that the script moves to ``"cuda"`` before it compiles a model would be on the
first GPU in all processes.
"""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from types import ModuleType

from autopar.runtime.launchers import adopt_launch
from autopar.runtime.rank_comm import take_gpu


def main() -> None:
    """Run the script like ``python SCRIPT``: as ``__main__``, with its arguments, and with its
    folder first on the path."""
    adopt_launch()
    take_gpu()
    script, *arguments = sys.argv[1:]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    module = ModuleType("__main__")
    vars(module).update(__file__=script, __builtins__=builtins)
    # runpy is not sufficient: multiprocessing, which torch imports, would refer to the previous
    # main module and look up classes there.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))


if __name__ == "__main__":
    main()
