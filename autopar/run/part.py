"""What stands for the model and its modules in the compiled one: it holds their parameters and shows their plain attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import RuntimeStateError


class Standing(nn.Module):
    """Shows the plain attributes of a module, such as ``config``, and refuses to set them: the program has what they were."""

    def stand_for(self, module: nn.Module) -> None:
        """Show what this module has and `self` has not; what holds tensors or modules is no plain attribute, nor is what can be called."""
        found = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
        plain = {name: x for name, x in found.items() if _is_plain(x) and not hasattr(type(self), name)}
        self.__dict__["_plain"] = {name: x for name, x in plain.items() if name not in self.__dict__}

    @property
    def shown(self) -> Mapping[str, Any]:
        """The plain attributes by name."""
        found: Mapping[str, Any] = self.__dict__.get("_plain", {})
        return found

    def __getattr__(self, name: str) -> Any:
        plain: Mapping[str, Any] = self.__dict__.get("_plain", {})
        return plain[name] if name in plain else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_plain", {}):
            what = f"{name!r} cannot be set: what the model computes was captured with the value that it had then"
            raise RuntimeStateError(what, remedy=f"let forward read it from a buffer (register_buffer({name!r}, torch.tensor(...)))")
        super().__setattr__(name, value)


class Part(Standing):
    """A module of the model in the compiled one, which runs as one graph: it is never called, and so hooks on it would not be."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeStateError: the program is of the whole model."""
        raise RuntimeStateError("a part of a compiled module is not called by itself", remedy="call the whole, or compile this part")

    def train(self, mode: bool = True) -> NoReturn:
        """Raises RuntimeStateError: the program was made of a part in one mode."""
        what = "the mode of a part of a compiled module cannot be set: the whole is one program, in one mode or the other"
        raise RuntimeStateError(what, remedy="set it on the plain model before autopar.compile, which keeps it; or pm.train(), pm.eval()")

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeStateError: it would never be called; so do the others."""
        what = "a hook on a part of a compiled module would never be called: the whole runs as one graph"
        raise RuntimeStateError(what, remedy="register it on the plain model before autopar.compile, which takes it into the graph")

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Whether it holds no tensor and no module, as far as that is looked for, and cannot be called."""
    if isinstance(value, Tensor | nn.Module) or (callable(value) and not isinstance(value, type)):
        return False
    if depth == 0 or isinstance(value, str | bytes | type):
        return True
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple | set | frozenset) else ()
    inner = (*inner, *getattr(value, "__dict__", {}).values())
    return all(_is_plain(each, depth - 1) for each in inner if each is not value)
