"""Arguments that are constants of a program select the program; other objects are refused by
name."""

from __future__ import annotations

import copy
import decimal
import enum
import fractions
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.call_constants import is_constant, same_constant
from autopar.errors import CaptureError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
Use = Callable[[Tensor, Any], Tensor]


TABLE = numpy.arange(4, dtype=numpy.float32)


class Net(nn.Module):
    """A model that passes its result and a setting to a function."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, setting: Any) -> Tensor:
        return self.use(self.layer(x), setting).mean()


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass(frozen=True)
class Inner:
    power: int = 2


@dataclass(frozen=True)
class Config:
    scale: float
    dtype: torch.dtype = torch.float64
    inner: tuple[Inner, ...] = (Inner(),)


@dataclass
class Changeable:
    scale: float


class Derived(Config):
    """Objects of this class accept further attributes."""


USES: dict[str, tuple[Use, Any, Any]] = {
    "dtype": (lambda h, d: h.to(d), torch.float64, torch.float32),
    "device": (lambda h, d: h + torch.ones(4, device=d), torch.device("cpu"), torch.device("cpu")),
    "layout": (lambda h, d: h + torch.ones(4, layout=d), torch.strided, torch.strided),
    "complex": (lambda h, z: (h * z).abs(), 1 + 2j, 2 + 0j),
    "bytes": (lambda h, b: h * len(b), b"1", b"12"),
    "numpy float": (lambda h, f: h * float(f), numpy.float64(2), numpy.float64(3)),
    "numpy int": (lambda h, n: h[:n], numpy.int64(2), numpy.int64(3)),
    "numpy float32": (lambda h, f: h.double() * (f * 3.1), numpy.float32(0.1), numpy.float32(0.3)),
    "numpy dtypes": (lambda h, f: h.double() * (f * 3.1), numpy.float64(0.1), numpy.float32(0.1)),
    "numpy function": (
        lambda h, f: h.double() * float(numpy.sqrt(f) + numpy.clip(f, 0.2, 0.3)),
        numpy.float32(0.1),
        0.1,
    ),
    "numpy overflow": (
        lambda h, n: h * float(n - numpy.uint8(100)),
        numpy.uint8(200),
        numpy.uint8(201),
    ),
    "numpy bool": (
        lambda h, b: h + torch.arange(4) * b / 3 if b else h * 2,
        numpy.bool_(True),
        numpy.bool_(False),
    ),
    "numpy class": (
        lambda h, n: h * (2 if isinstance(n, int) else 3 if n.dtype == numpy.int64 else 4),
        numpy.int64(2),
        numpy.int32(2),
    ),
    "numpy or python": (
        lambda h, n: h * (2 if isinstance(n, int) else 3),
        numpy.int64(2),
        2,
    ),
    "numpy size": (lambda h, n: h[: 2 * n].reshape(n, -1), numpy.int32(2), numpy.int32(4)),
    "numpy string": (lambda h, s: h * {"two": 2.0, "x": 1.0}[s], numpy.str_("two"), "x"),
    "numpy array": (
        lambda h, f: h.double() * torch.from_numpy(TABLE * f),
        numpy.float64(0.1),
        numpy.float32(0.1),
    ),
    "enum": (lambda h, kind: h * (2 if kind is Kind.ONE else 5), Kind.ONE, Kind.TWO),
    "dataclass": (
        lambda h, c: (h * c.scale).to(c.dtype) ** c.inner[0].power,
        Config(2.0),
        Config(2.0, inner=(Inner(3),)),
    ),
    "in a dict": (lambda h, held: h.to(held["d"]), {"d": torch.float64}, {"d": torch.float32}),
}


@pytest.mark.parametrize("name", USES)
def test_other_constants_run_another_program(name: str) -> None:
    use, first, second = USES[name]
    torch.manual_seed(0)
    plain = Net(use)
    module: Any = autopar.compile(
        copy.deepcopy(plain), example_inputs=(X, first), hardware="cpu-gloo"
    )
    for setting in (first, second, first):
        wanted, found = plain(X, setting), module(X, setting)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted)
        for each in (plain, module):
            each.zero_grad()
        wanted.backward()
        found.backward()
        torch.testing.assert_close(module.layer.weight.grad.full_tensor(), plain.layer.weight.grad)


REFUSED: dict[str, tuple[Any, str]] = {
    "decimal.Decimal": (decimal.Decimal("1.5"), r"float\(x\)"),
    "fractions.Fraction": (fractions.Fraction(1, 2), r"float\(x\)"),
    "numpy.complex64": (numpy.complex64(2), r"x\.item\(\)"),
    "numpy.longdouble": (numpy.longdouble(2), r"float\(x\)"),
    "numpy.datetime64": (numpy.datetime64("2020-01-01"), r"x\.astype\(int\)\.item\(\)"),
    "numpy.ndarray": (numpy.ones(()), r"array\.item\(\)"),
    "pathlib.PosixPath": (pathlib.PosixPath("/a"), r"str\(path\)"),
    "range": (range(3), r"tuple\(x\)"),
    "generator": ((i for i in range(3)), r"tuple\(x\)"),
    "torch.nn.modules.activation.ReLU": (nn.ReLU(), "submodule"),
    "Changeable": (Changeable(2.0), r"@dataclass\(frozen=True\)"),
    "Derived": (Derived(2.0), r"@dataclass\(frozen=True\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_objects_are_refused_by_the_name_of_the_argument(kind: str) -> None:
    setting, remedy = REFUSED[kind]
    with pytest.raises(
        CaptureError, match=rf"the argument 'setting' has type \S*{kind}[\s\S]*{remedy}"
    ):
        capture(Net(lambda h, _: h), (X, setting))


def test_constants_are_compared_by_type_and_value() -> None:
    nan = float("nan")
    assert same_constant(Config(nan), Config(nan))
    assert not same_constant(Config(1.0), Config(2.0))
    assert not same_constant(Config(1.0), Config(1))
    assert not same_constant(Config(1.0), Config(1.0, inner=()))
    held: Any = [Inner()]
    assert not is_constant(Config(1.0, inner=held))


@pytest.mark.parametrize("value", [numpy.float32(0.1), numpy.bool_(True), numpy.str_("a")])
def test_numpy_scalars_are_compared_by_dtype_and_value(value: Any) -> None:
    assert is_constant(value) and same_constant(value, copy.deepcopy(value))
    assert not same_constant(value, value.item())
    assert not same_constant(value, type(value)())


def test_an_array_of_numpy_scalars_is_refused() -> None:
    with pytest.raises(CaptureError, match="array of NumPy scalars"):
        capture(Net(lambda h, f: h * torch.from_numpy(numpy.array([f, f, f, f]))), (X, TABLE[1]))
