"""Values that forward reaches through functions, classes and containers are constants of a program.
A call is refused if one of them has changed."""

from __future__ import annotations

import enum
import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError
from tests import zoo_small

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
Change = Callable[[Any], object]
OPTIONS: dict[str, Any] = {}


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Net(nn.Module):
    """A model whose methods are those of the tests."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.layer(x)).square().mean()


def scaled(y: Tensor, by: Any = None, *, further: Any = 1.0) -> Tensor:
    return y * (1.0 if by is None else by) * further


def net(use: Callable[[Any, Tensor], Tensor], **attributes: Any) -> Any:
    return type("Used", (Net,), {"use": use})(**attributes)


def _default(value: Any) -> Any:
    def use(self: Any, y: Tensor, by: Any = value) -> Tensor:
        return scaled(y, torch.from_numpy(by) if isinstance(by, np.ndarray) else by)

    return net(use)


def _keyword_default(value: Any) -> Any:
    def use(self: Any, y: Tensor, *, by: Any = value) -> Tensor:
        return scaled(y, by[0])

    return net(use)


def _default_of_forward(value: Any) -> Any:
    class Own(Net):
        def forward(self, x: Tensor, by: Any = value) -> Tensor:
            return scaled(self.layer(x), by).square().mean()

    return Own()


def _static(value: Any) -> Any:
    class Static(Net):
        @staticmethod
        def compute(y: Tensor) -> Tensor:
            return scaled(y, value)

        def use(self, y: Tensor) -> Tensor:
            return self.compute(y)

    return Static()


def _property(value: Any) -> Any:
    class Own(Net):
        @property
        def factor(self) -> Any:
            return value

        def use(self, y: Tensor) -> Tensor:
            return scaled(y, self.factor)

    return Own()


def _of_class(value: Any) -> Any:
    model = net(lambda self, y: scaled(y, self.factor))
    type(model).factor = value
    return model


def _by(value: Any) -> Any:
    return net(lambda self, y: self.function(y), function=functools.partial(scaled, by=value))


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda y: y * factor


def _add(name: str, value: Any) -> Change:
    return lambda model: setattr(model, name, value)


_T = {name: torch.ones(4) for name in "abcdefg"}
_ARRAY = np.ones(4, np.float32)
CHANGES: dict[str, tuple[Callable[[], Any], Change, str]] = {
    "default of a method": (
        lambda: _default(_T["a"]),
        lambda _: _T["a"].add_(1),
        r"the model's use\.__defaults__\[0\] was written",
    ),
    "array as the default of a method": (
        lambda: _default(_ARRAY),
        lambda _: _ARRAY.__iadd__(1),
        r"use\.__defaults__\[0\] was written",
    ),
    "defaults set": (
        lambda: _default(2.0),
        lambda model: setattr(type(model).use, "__defaults__", (3.0,)),
        r"use\.__defaults__\[0\] is 3\.0, but was 2\.0",
    ),
    "list as a keyword default": (
        lambda: _keyword_default([2.0]),
        lambda model: type(model).use.__kwdefaults__["by"].__setitem__(0, 3.0),
        r"use\.__kwdefaults__\['by'\]\[0\] is 3\.0",
    ),
    "default of forward": (
        lambda: _default_of_forward(_T["b"]),
        lambda _: _T["b"].add_(1),
        r"forward\.__defaults__\[0\] was written",
    ),
    "default of a function": (
        lambda: net(lambda self, y: scaled(y)),
        lambda _: scaled.__kwdefaults__.update(further=2.0),
        r"scaled\.__kwdefaults__\['further'\] of \S+ is 2\.0",
    ),
    "closure of a static method": (
        lambda: _static(_T["c"]),
        lambda _: _T["c"].add_(1),
        r"the variable value around \S+compute was written",
    ),
    "closure of a property": (
        lambda: _property(_T["d"]),
        lambda _: _T["d"].add_(1),
        r"the variable value around \S+factor was written",
    ),
    "tensor of a class": (
        lambda: _of_class(_T["e"]),
        lambda _: _T["e"].add_(1),
        r"the model's factor was written",
    ),
    "tensor of a partial function": (
        lambda: _by(_T["f"]),
        lambda _: _T["f"].add_(1),
        r"function\.keywords\['by'\] was written",
    ),
    "name-mangled attribute": (
        lambda: net(lambda self, y: scaled(y, self._Net__factor), _Net__factor=2.0),
        _add("_Net__factor", 3.0),
        r"_Net__factor is 3\.0",
    ),
    "enum": (
        lambda: net(lambda self, y: scaled(y, self.kind.value), kind=Kind.ONE),
        _add("kind", Kind.TWO),
        r"kind is .*TWO",
    ),
    "dtype": (
        lambda: net(lambda self, y: y.to(self.kind).float(), kind=torch.float32),
        _add("kind", torch.float16),
        r"kind is torch\.float16",
    ),
    "NumPy scalar": (
        lambda: net(lambda self, y: scaled(y, self.factor), factor=np.float32(0.1)),
        _add("factor", np.float32(0.2)),
        r"factor is np\.float32\(0\.2\)",
    ),
    "list grown": (
        lambda: net(lambda self, y: scaled(y, sum(self.factors)), factors=[1.0, 2.0]),
        lambda model: model.factors.append(3.0),
        r"factors had 2 items",
    ),
    "dict grown": (
        lambda: net(lambda self, y: scaled(y, sum(self.factors.values())), factors={"a": 1.0}),
        lambda model: model.factors.update(b=3.0),
        r"factors had the keys \['a'\]",
    ),
    "key added": (
        lambda: net(lambda self, y: scaled(y, self.factors.get("b", 1.0)), factors={"a": 1.0}),
        lambda model: model.factors.update(b=3.0),
        r"factors did not contain 'b'",
    ),
    "key of a global dict": (
        lambda: net(lambda self, y: y * 2 if "twice" in OPTIONS else y),
        lambda _: OPTIONS.update(twice=True),
        r"OPTIONS of \S+ did not contain 'twice'",
    ),
    "attribute added": (
        lambda: net(lambda self, y: scaled(y, getattr(self, "factor", 1.0))),
        _add("factor", 2.0),
        r"had no attribute 'factor'",
    ),
    "function set": (
        lambda: net(lambda self, y: self.function(y), function=torch.relu),
        _add("function", torch.tanh),
        r"function was replaced",
    ),
    "function of the same code": (
        lambda: net(lambda self, y: self.function(y), function=_times(2.0)),
        _add("function", _times(3.0)),
        r"function was replaced",
    ),
    "method of the class": (
        lambda: _default(2.0),
        lambda model: setattr(type(model), "use", lambda self, y: y * 3),
        r"use was replaced",
    ),
    "method of the object": (
        lambda: _default(2.0),
        _add("use", lambda y: y * 3),
        r"use was replaced",
    ),
    "submodule set": (
        lambda: net(lambda self, y: self.act(y), act=nn.Tanh()),
        _add("act", nn.ReLU()),
        r"act was replaced",
    ),
    "submodule added": (
        lambda: net(lambda self, y: self.acts(y), acts=nn.Sequential(nn.Tanh())),
        lambda model: model.acts.append(nn.ReLU()),
        r"acts\.1 was added",
    ),
}


def _compiled(model: Any) -> Any:
    return autopar.compile(model, 1, example_inputs=(X,), hardware="cpu-gloo")


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    scaled.__kwdefaults__.update(further=1.0)
    OPTIONS.clear()


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_after_a_change_is_refused(name: str) -> None:
    make, change, says = CHANGES[name]
    model = make()
    wanted = model(X)
    module = _compiled(model)
    torch.testing.assert_close(module(X), wanted)
    change(model)
    assert not torch.equal(model(X), wanted)
    with pytest.raises(RuntimeStateError, match=says):
        module(X)


@pytest.mark.parametrize("make", [_of_class, _default, _static])
def test_changes_are_noticed_after_the_model_is_freed(make: Callable[[Any], Any]) -> None:
    value = torch.ones(4)
    module = _compiled(make(value))
    gc.collect()
    module(X)
    value.add_(1)
    with pytest.raises(RuntimeStateError, match="was written since"):
        module(X)


def test_functions_are_compared_with_the_users_model_in_every_program() -> None:
    model = net(lambda self, y: self.function(y))
    model.function = lambda y: model.layer(y)  # a copy of the model has a copy of this function
    module = _compiled(model)
    for x in (X, X[:4], X):
        torch.testing.assert_close(module(x), model(x))


def test_submodules_of_the_users_model_may_be_removed() -> None:
    model = net(lambda self, y: self.act(y), act=nn.Tanh())
    module = _compiled(model)
    wanted = model(X)
    del model.act
    torch.testing.assert_close(module(X), wanted)


def test_an_attribute_that_forward_looks_for_cannot_be_set_on_the_compiled_module_only() -> None:
    module = _compiled(net(lambda self, y: scaled(y, getattr(self, "factor", 1.0))))
    module.unread = 2.0
    module(X)
    module.factor = 2.0
    with pytest.raises(RuntimeStateError, match="factor was set on the compiled module"):
        module(X)


class Caching(Net):
    """A model with a configuration that is not one of transformers."""

    def __init__(self) -> None:
        super().__init__(config=SimpleNamespace(use_cache=True))

    def use(self, y: Tensor) -> Tensor:
        return y * (2.0 if self.config.use_cache else 3.0)


def test_use_cache_of_a_users_configuration_keeps_its_value_during_a_capture() -> None:
    model = Caching()
    module = _compiled(model)
    torch.testing.assert_close(module(X), model(X))
    model.config.use_cache = False
    with pytest.raises(RuntimeStateError, match=r"config\.use_cache is False"):
        module(X)


def test_settings_of_a_transformers_model_take_effect_or_are_refused_with_a_remedy() -> None:
    model, batch = zoo_small.llama()
    wanted = model(**batch).loss
    module: Any = autopar.compile(model, 1, example_inputs=batch, hardware="cpu-gloo")
    module.config.use_cache = False  # a program has no cache
    torch.testing.assert_close(module(**batch).loss, wanted)
    with pytest.raises(RuntimeStateError, match="leave it out: the plan decides"):
        module.gradient_checkpointing_enable()
    assert module.model.layers[0].self_attn.layer_idx == 0
    with pytest.raises(RuntimeStateError, match="set it on a plain copy") as raised:
        module.model.layers[0].self_attn.layer_idx = 1
    assert "register_buffer" not in str(raised.value)
    module.config.output_hidden_states = True
    with pytest.raises(RuntimeStateError, match="compile the model again"):
        module(**batch)
    module.config.output_hidden_states = False
    torch.testing.assert_close(module(**batch).loss, wanted)
