"""What stands for the model and its modules in the compiled one: it holds their parameters and shows their plain attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import RuntimeStateError


class Standing(nn.Module):
    """Shows the plain attributes of a module, such as ``config``, and refuses to set them: the program has what they were."""

    def stand_for(self, module: nn.Module) -> None:
        """Show what this module has and `self` has not; what holds tensors or modules is no plain attribute."""
        found = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
        plain = {name: x for name, x in found.items() if not isinstance(x, Tensor | nn.Module) and not hasattr(type(self), name)}
        self.__dict__["_plain"] = {name: x for name, x in plain.items() if name not in self.__dict__}

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

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeStateError: it would never be called; so do the others."""
        what = "a hook on a part of a compiled module would never be called: the whole runs as one graph"
        raise RuntimeStateError(what, remedy="register it on the plain model before autopar.compile, which takes it into the graph")

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook
