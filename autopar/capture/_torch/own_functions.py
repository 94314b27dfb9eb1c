"""Autograd functions of the user's own that are given one tensor twice, as ``Product.apply(x, x)``, which Dynamo (2.13) refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable


@contextlib.contextmanager
def tensors_given_twice() -> Iterator[None]:
    """Each further time it is a view of the tensor, whose gradients add up as the tensor's own do."""
    call = AutogradFunctionApplyVariable.call_function

    def called(variable: Any, translator: Any, args: Sequence[Any], kwargs: Any) -> Any:
        return call(variable, translator, _views_of_the_second(translator, args), kwargs)

    with mock.patch.object(AutogradFunctionApplyVariable, "call_function", called):
        yield


def _views_of_the_second(translator: Any, args: Sequence[Any]) -> list[Any]:
    seen: list[Any] = []
    given = []
    for arg in args:
        value = arg.as_proxy().node.meta.get("example_value") if arg.is_tensor() else None
        again = value is not None and any(value is other for other in seen)
        seen.append(value)
        given.append(arg.call_method(translator, "view_as", [arg], {}) if again else arg)
    return given
