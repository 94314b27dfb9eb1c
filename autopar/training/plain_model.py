"""The plain model once a compiled module has its weights: it is asked for its class, configuration and signature, and what is done to its
parameters would reach nothing, so that it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import RuntimeStateError


@dataclass(frozen=True, slots=True)
class PlainModel:
    """As it was left when it was compiled.

    Attributes:
        parameters: by name, on meta, with whether each is trained and how often it had been written.
    """

    model: nn.Module
    parameters: tuple[tuple[str, Any, bool, int], ...]

    @staticmethod
    def left(model: nn.Module) -> PlainModel:
        """Let go of its weights; those that modules share stay shared."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter not in made:
                        made[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                    module._parameters[name] = made[parameter]
        return PlainModel(model, tuple((name, p, p.requires_grad, p._version) for name, p in model.named_parameters()))

    def check(self, model: nn.Module) -> None:
        """Raises RuntimeStateError where another model stands in its place, or something was done to its parameters.

        Args:
            model: which the trainer has now.
        """
        if model is not self.model:
            what = "trainer.model is another model than the one that was compiled"
            raise RuntimeStateError(what, remedy="make a Trainer of it")
        here: dict[str, Any] = dict(model.named_parameters())
        for name, parameter, trained, version in self.parameters:
            if name not in here or here[name] is not parameter or parameter._version != version:
                what = f"trainer.model's parameter {name!r} was written, and what is trained is the compiled module"
                remedy = "write that of trainer.compiled(), which has the same name; or load weights before the first train() or evaluate()"
                raise RuntimeStateError(what, remedy=remedy)
            if parameter.requires_grad != trained:
                what = f"trainer.model's parameter {name!r} was {'frozen' if trained else 'unfrozen'} after it was compiled"
                remedy = "freeze before the first train() or evaluate(), and make a Trainer for each phase of training"
                raise RuntimeStateError(what, remedy=remedy)
