"""Graph modules of programs, most of which are simulated and rehearsed node by node and never called."""

from __future__ import annotations

from typing import Any

from torch import fx


class LazyGraphModule(fx.GraphModule):  # type: ignore[misc]  # untyped in torch
    """Its Python code is written when it is first called or read: that takes longer than all else of an emission.

    After changes of its graph `recompile`, as for any graph module. (torch has such a class for Inductor, which is private.)
    """

    _is_written = False  # of the class, one of which torch makes for each instance

    def recompile(self) -> Any:
        cls = type(self)
        cls._is_written, cls.forward = False, _written_forward

    @property
    def code(self) -> str:
        self._write()
        return str(super().code)

    def __str__(self) -> str:
        self._write()
        return str(super().__str__())

    def __reduce__(self) -> Any:
        self._write()
        return fx.GraphModule(self, self.graph).__reduce__()

    def _write(self) -> None:
        if not self._is_written:
            super().recompile()
            type(self)._is_written = True


def _written_forward(self: LazyGraphModule, *args: Any, **kwargs: Any) -> Any:
    self._write()
    return self(*args, **kwargs)
