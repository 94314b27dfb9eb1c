"""The plain model once a compiled module has its weights: it is asked for its class, configuration and signature, and what is done to its
parameters would reach nothing, so that it is refused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from autopar.errors import RuntimeStateError
from autopar.run.plain_model import Noted, noted


@dataclass(frozen=True, slots=True)
class PlainModel:
    """As it was left when it was compiled.

    Attributes:
        parameters: those that are on meta now.
    """

    model: nn.Module
    parameters: tuple[Noted, ...]

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
        return PlainModel(model, tuple(each for each in noted(model) if each.is_parameter))

    def check(self, model: nn.Module) -> None:
        """Raises RuntimeStateError where another model stands in its place, or something was done to its parameters.

        Args:
            model: which the trainer has now.
        """
        if model is not self.model:
            what = "trainer.model is another model than the one that was compiled"
            raise RuntimeStateError(what, remedy="make a Trainer of it")
        for each in self.parameters:
            now = each.now()
            if now is None or each.is_written(now):
                what = f"trainer.model's parameter {each.name!r} was written, and what is trained is the compiled module"
                remedy = "write that of trainer.compiled(), which has the same name; or load weights before the first train() or evaluate()"
                raise RuntimeStateError(what, remedy=remedy)
            if now.requires_grad != each.trains:
                what = f"trainer.model's parameter {each.name!r} was {'frozen' if each.trains else 'unfrozen'} after it was compiled"
                remedy = "freeze before the first train() or evaluate(), and make a Trainer for each phase of training"
                raise RuntimeStateError(what, remedy=remedy)
