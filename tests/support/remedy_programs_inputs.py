"""Programs for the remedies of calls: the arguments of a model, its state, and its results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.tensor_kinds import refuse_state_and_inputs
from tests.support.remedy_programs import Called, Net, Program, captured, forward


class Tagged(Tensor):
    """A tensor subclass."""


@dataclass
class Batch:
    """A batch whose fields are all arguments of the constructor."""

    x: Tensor


@dataclass
class Counted:
    """A batch with a field that is not an argument of the constructor."""

    x: Tensor
    size: int = field(init=False, default=4)


def _of_batch(layer: nn.Module, batch: Any) -> Tensor:
    return layer(batch.x).square().mean()


def _given(x: Tensor | Callable[[], Tensor]) -> Callable[[], object]:
    """Check a call with an input."""
    return lambda: refuse_state_and_inputs(
        nn.Linear(4, 4), [("x", x if isinstance(x, Tensor) else x())]
    )


def _held(x: Tensor) -> Callable[[], object]:
    """Check a model with a buffer."""
    return lambda: refuse_state_and_inputs(Net(lambda self, x: x, held=x), [])


def _nested(padded: bool) -> Callable[[], Tensor]:
    def make() -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that they are a prototype
            x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
            return torch.nested.to_padded_tensor(x, 0.0) if padded else x

    return make


def _quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it will remove them
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


_DENSE = torch.eye(4)
_EDGES = _DENSE.to_sparse_coo().coalesce()


def _multiplies(layer: nn.Module, x: Tensor, a: Tensor) -> Tensor:
    return layer(a @ x).square().mean()


def _by_edges(layer: nn.Module, x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    rows, columns = places
    zeros = x.new_zeros(4, x.shape[1])
    return layer(zeros.index_add(0, rows, values.unsqueeze(1) * x[columns])).square().mean()


class Waiting(nn.Module):
    """Doubles the result of its layer after more than two calls, or as an argument says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, count: int | None = None) -> Tensor:
        y = self.layer(x)
        if count is None:
            y = y * 2 if int(self.count) > 2 else y
            self.count.add_(1)
        elif count > 2:
            y = y * 2
        return y.square().mean()


def _raises(layer: nn.Module, x: Tensor) -> Tensor:
    if x.shape[0] % 4:
        raise ValueError("a batch is of fours")
    return layer(x).mean()


_TABLE = torch.ones(8, 4, dtype=torch.float64)

PROGRAMS: dict[str, Program] = {
    "capture/calls.py check_call 0": Program(
        lambda: capture(nn.Linear(4, 4), (), {"x": torch.ones(8, 4)}),
        "to pass the mapping itself as the only argument, pass (input,)",
        lambda: capture(nn.Linear(4, 4), (torch.ones(8, 4),)),
    ),
    "capture/calls.py check_call 0 | signature": Program(
        lambda: capture(Waiting(), (), {"x": torch.ones(8, 4), "counts": 1}),
        "did you mean 'count'?",
        lambda: capture(Waiting(), (), {"x": torch.ones(8, 4), "count": 1}),
    ),
    "capture/calls.py refused_by_forward 0": Program(
        captured(Called(lambda layer, x: None)),
        "return the loss, or the outputs",
        captured(Called(lambda layer, x: layer(x).mean())),
    ),
    "capture/calls.py refused_by_forward 1": Program(
        captured(nn.Linear(4, 4), torch.ones(8, 5)),
        "pass arguments that the plain model accepts",
        captured(nn.Linear(4, 4), torch.ones(8, 4)),
    ),
    "capture/calls.py _error_of_forward 0": Program(
        captured(Called(_raises), torch.ones(6, 4)),
        "check the line, and pass arguments",
        captured(Called(_raises), torch.ones(8, 4)),
    ),
    "capture/tensor_kinds.py _refuse 0 | sparse": Program(
        captured(Called(_multiplies), torch.ones(4, 4), _DENSE.to_sparse_coo()),
        "`a.to_dense()`",
        captured(Called(_multiplies), torch.ones(4, 4), _DENSE),
    ),
    "capture/tensor_kinds.py _refuse 0 | sparse by edges": Program(
        captured(Called(_multiplies), torch.ones(4, 4), _DENSE.to_sparse_coo()),
        "`x.new_zeros(num_rows, x.shape[1]).index_add(0, rows, values.unsqueeze(1) * x[columns])`",
        captured(Called(_by_edges), torch.ones(4, 4), _EDGES.indices(), _EDGES.values()),
    ),
    "capture/tensor_kinds.py _refuse 0 | nested": Program(
        _given(_nested(False)), "torch.nested.to_padded_tensor(x, 0.0)", _given(_nested(True))
    ),
    "capture/tensor_kinds.py _refuse 0 | quantized": Program(
        _given(_quantized), "`x.dequantize()`", _given(lambda: _quantized().dequantize())
    ),
    "capture/tensor_kinds.py _refuse 0 | class": Program(
        _given(torch.ones(4).as_subclass(Tagged)),
        "`x.as_subclass(torch.Tensor)`",
        _given(torch.ones(4).as_subclass(Tagged).as_subclass(Tensor)),
    ),
    "capture/tensor_kinds.py _refuse 0 | mkldnn": Program(
        _given(torch.ones(4, 4).to_mkldnn()),
        "`x.to_dense()`",
        _given(torch.ones(4, 4).to_mkldnn().to_dense()),
    ),
    "capture/tensor_kinds.py _refuse 0 | conjugate": Program(
        _held(torch.ones(4, dtype=torch.complex64).conj()),
        "x.resolve_conj()",
        _held(torch.ones(4, dtype=torch.complex64).conj().resolve_conj().resolve_neg()),
    ),
    "capture/tensor_kinds.py of_forward 0": Program(
        forward(lambda self, x: torch.sparse.mm(torch.relu(x).to_sparse(), self.layer.weight)),
        "compute with dense tensors",
        forward(lambda self, x: torch.relu(x) @ self.layer.weight),
    ),
    "capture/trees.py see_into_dataclasses 0": Program(
        captured(Called(_of_batch), Counted(torch.ones(8, 4))),
        "no init=False, no InitVar",
        captured(Called(_of_batch), Batch(torch.ones(8, 4))),
    ),
    "capture/capturing.py Border._known_buffers 0": Program(
        captured(Waiting()),
        "pass the number as a plain argument",
        captured(Waiting(), torch.ones(8, 4), 3),
    ),
    "capture/precision.py _mixed_error 0 | argument": Program(
        captured(nn.Linear(4, 4), _TABLE),
        "pass an argument in the dtype of the parameters",
        captured(nn.Linear(4, 4), _TABLE.float()),
    ),
    "capture/precision.py _mixed_error 0": Program(
        captured(Called(lambda layer, x: F.linear(_TABLE * x, layer.weight).mean())),
        "one dtype",
        captured(Called(lambda layer, x: F.linear((_TABLE * x).float(), layer.weight).mean())),
    ),
}
