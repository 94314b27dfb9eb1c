"""Programs for the remedies of values in forward: reads, prints, results and arguments; and of flex
attention."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from autopar.capture import capture
from autopar.capture.hugging_face import refuse_caches
from tests.support.remedy_programs import Called, Program, captured, forward

X = torch.ones(8, 4)


class FunctionModel(nn.Module):
    """A model whose forward is a function of (layer, x, given)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, given: Any) -> Any:
        return self.function(self.layer, x, given)


class Returning(nn.Module):
    """Returns its loss and a buffer, or a function of the buffer."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 4), made
        self.register_buffer("name", torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"loss": self.layer(x).mean(), "name": self.made(self.name)}


def _capture_with(function: Callable[..., Any], given: Any) -> Callable[[], object]:
    return captured(FunctionModel(function), X, given)


def _flex(score: Callable[..., Tensor]) -> Callable[[], object]:
    def attends(layer: nn.Module, x: Tensor) -> Tensor:
        q = layer(x).view(1, 1, 8, 4)
        result = flex_attention(q, q, q, score_mod=score)
        assert isinstance(result, Tensor)
        return result.square().mean()

    return captured(Called(attends))


def _biased(layer: nn.Module, x: Tensor, given: Tensor) -> Tensor:
    """Use a tensor of the caller in a score function."""
    q = layer(x).view(1, 1, 8, 4)
    result = flex_attention(q, q, q, score_mod=lambda score, b, h, q, k: score + given[h % 2])
    assert isinstance(result, Tensor)
    return result.square().mean()


def _dense(layer: nn.Module, x: Tensor) -> Tensor:
    q = layer(x).view(1, 1, 8, 4)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8)).square().mean()


def _autocast(*kinds: str) -> Callable[[], object]:
    """Capture under autocast of several device types with different dtypes, as if the devices
    existed."""
    dtypes = {"cpu": torch.bfloat16, "cuda": torch.float16}

    def program() -> object:
        try:
            for kind in kinds:
                torch.set_autocast_enabled(kind, True)
                torch.set_autocast_dtype(kind, dtypes[kind])
            return capture(nn.Linear(4, 4), (X,))
        finally:
            for kind in kinds:
                torch.set_autocast_enabled(kind, False)

    return program


class Cache:
    """A cache of keys and values with the name of the class in transformers."""

    __module__ = "transformers.cache_utils"


def _weighted_loss(dtype: torch.dtype) -> Callable[[], object]:
    """Compute a loss in float64 with weights of a dtype."""
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)

    def loss(layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(layer(x), y, weight=weights)

    return captured(FunctionModel(loss).double(), X.double(), torch.ones(8, dtype=torch.int64))


def _linear(scripted: bool) -> nn.Module:
    layer = nn.Linear(4, 4)
    part: nn.Module = torch.jit.trace(layer, X) if scripted else layer
    return part


def _prints(self: Any, x: Tensor) -> Tensor:
    torch.ops.aten._print("x")
    return x


_TABLE = torch.ones(200, 200)

PROGRAMS: dict[str, Program] = {
    "capture/dynamo/call_objects.py refuse_other_objects 0": Program(
        _capture_with(lambda layer, x, given: layer(x * torch.as_tensor(given)), numpy.ones(4)),
        "`torch.as_tensor(array)`",
        _capture_with(
            lambda layer, x, given: layer((x * given).float()), torch.as_tensor(numpy.ones(4))
        ),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | function": Program(
        _capture_with(lambda layer, x, given: layer(given(x)), torch.relu),
        "store the object as an attribute of the model in __init__",
        captured(nn.Sequential(nn.Linear(4, 4), nn.ReLU())),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | number of an array": Program(
        _capture_with(lambda layer, x, given: layer(x * float(given)), numpy.ones(())),
        "or as a number, `array.item()`",
        _capture_with(lambda layer, x, given: layer(x * float(given)), numpy.ones(()).item()),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | numpy": Program(
        _capture_with(lambda layer, x, given: layer(x * given.real), numpy.complex64(2.0)),
        "pass it as a Python number: `x.item()`",
        _capture_with(lambda layer, x, given: layer(x * given.real), numpy.complex64(2.0).item()),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | longdouble": Program(
        _capture_with(lambda layer, x, given: layer(x * float(given)), numpy.longdouble(2.0)),
        "pass it as a Python number: `float(x)`",
        _capture_with(lambda layer, x, given: layer(x * float(given)), 2.0),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | complex longdouble": Program(
        _capture_with(lambda layer, x, given: layer(x * given.real), numpy.clongdouble(2.0)),
        "pass it as a Python number: `complex(x)`",
        _capture_with(
            lambda layer, x, given: layer(x * given.real), complex(numpy.clongdouble(2.0))
        ),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | time": Program(
        _capture_with(lambda layer, x, given: layer(x * int(given)), numpy.timedelta64(2, "D")),
        "`x.astype(int).item()`",
        _capture_with(
            lambda layer, x, given: layer(x * int(given)),
            numpy.timedelta64(2, "D").astype(int).item(),
        ),
    ),
    "capture/dynamo/numpy_scalars.py _refuse_within 0": Program(
        _capture_with(
            lambda layer, x, given: layer(x * torch.from_numpy(numpy.array([given] * 4))),
            numpy.float32(2.0),
        ),
        "`torch.tensor([x.item() for x in scalars])`",
        _capture_with(
            lambda layer, x, given: layer(x * torch.tensor([y.item() for y in [given] * 4])),
            numpy.float32(2.0),
        ),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | number": Program(
        _capture_with(lambda layer, x, given: layer(x * float(given)), Fraction(1, 2)),
        "pass it as a Python number, such as `float(x)`",
        _capture_with(lambda layer, x, given: layer(x * float(given)), float(Fraction(1, 2))),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | path": Program(
        _capture_with(lambda layer, x, given: layer(x), Path("weights")),
        "pass it as a string: `str(path)`",
        _capture_with(lambda layer, x, given: layer(x), str(Path("weights"))),
    ),
    "capture/dynamo/call_objects.py refuse_other_objects 0 | set": Program(
        _capture_with(lambda layer, x, given: layer(x) * len(given), {1, 2}),
        "pass a tuple or a list of its elements: `tuple(x)`",
        _capture_with(lambda layer, x, given: layer(x) * len(given), tuple({1, 2})),
    ),
    "capture/diagnostics.py _of_result 0": Program(
        _capture_with(lambda layer, x, given: given, [torch.ones(3)]),
        "return results that are computed from it",
        _capture_with(lambda layer, x, given: layer(x), [torch.ones(3)]),
    ),
    "capture/diagnostics.py _of_graph 0 | generator": Program(
        forward(lambda self, x: x * torch.rand(4, generator=torch.Generator().manual_seed(0))),
        "torch.rand and similar functions follow torch.manual_seed",
        forward(lambda self, x: x * torch.rand(4)),
    ),
    "capture/diagnostics.py _of_graph 0 | list": Program(
        forward(lambda self, x: x * self.layer(x)[0].tolist()[0]),
        "compute with the tensor instead",
        forward(lambda self, x: x * self.layer(x)[0][0]),
    ),
    "capture/diagnostics.py of_inputs 0": Program(
        _capture_with(
            lambda layer, x, given: layer(x) * min(sorted(map(int, given))), torch.ones(3)
        ),
        "pass the value that forward computes from 'given' as an argument",
        _capture_with(lambda layer, x, given: layer(x) * given, 1),
    ),
    "capture/diagnostics.py of_inputs 1": Program(
        _capture_with(lambda layer, x, given: layer(x)[: int(given.sum())].mean(), torch.ones(3)),
        "or pass the value that forward computes from 'given' as an argument",
        _capture_with(lambda layer, x, given: layer(x)[:given].mean(), 3),
    ),
    "capture/diagnostics.py of_flex_attention 0": Program(
        _flex(lambda score, b, h, q, k: score if q > k else score * 2),
        "use torch.where",
        _flex(lambda score, b, h, q, k: torch.where(q > k, score, score * 2)),
    ),
    "capture/diagnostics.py of_flex_attention 0 | dense": Program(
        _flex(lambda score, b, h, q, k: score if q > k else score * 2),
        "call F.scaled_dot_product_attention with the mask as attn_mask",
        captured(Called(_dense)),
    ),
    "capture/dynamo/flex_attention.py text_of 0": Program(
        _flex(lambda score, b, h, q, k: score + torch.linalg.inv(score.view(1, 1)).sum()),
        "elementwise functions (add, mul",
        _flex(lambda score, b, h, q, k: score + 1 / score),
    ),
    "ops/score_functions.py overload_of 0": Program(
        _flex(lambda score, b, h, q, k: score + torch.rand_like(score)),
        "that do not write into tensors or draw random numbers",
        _flex(lambda score, b, h, q, k: score + torch.ones_like(score)),
    ),
    "ops/score_functions.py _write_value 0": Program(
        _flex(lambda score, b, h, q, k: score + torch.tensor([1.0, 2.0])[h % 2]),
        "create tensors outside the function",
        _capture_with(_biased, torch.ones(2)),
    ),
    "ops/score_functions.py _write_value 1": Program(
        _flex(lambda score, b, h, q, k: (score * (1 + 2j)).real),
        "tensors and numbers only",
        _flex(lambda score, b, h, q, k: score * 1),
    ),
    "capture/dynamo/joint.py _placeholder_kind 0": Program(
        forward(_prints), "remove writes and prints from forward", forward(lambda self, x: x)
    ),
    "capture/dynamo/outputs.py others_detached 0": Program(
        captured(Returning(lambda x: x)),
        "return a copy (`self.name.clone()`)",
        captured(Returning(lambda x: x.clone())),
    ),
    "capture/dynamo/outputs.py others_detached 0 | left out": Program(
        captured(Returning(lambda x: x)), "do not return it", captured(Returning(lambda x: None))
    ),
    "capture/hugging_face.py refuse_caches 0": Program(
        lambda: refuse_caches(nn.Linear(4, 4), {"past": Cache()}),
        "do not pass past; pass the whole sequence",
        lambda: refuse_caches(nn.Linear(4, 4), {}),
    ),
    "capture/execute.py _check_alike 0": Program(
        _weighted_loss(torch.float32), "one dtype", _weighted_loss(torch.float64)
    ),
    "capture/autocast.py gpu_autocast 0": Program(
        _autocast("cpu", "cuda"), "enter only the torch.autocast", _autocast("cuda")
    ),
    "capture/normalize/clean.py inline_constants 0": Program(
        forward(lambda self, x: x * _TABLE.mean()),
        "make it a buffer of the module (register_buffer)",
        forward(lambda self, x: x * self.table.mean(), table=_TABLE),
    ),
    "capture/normalize/clean.py inline_constants 0 | built": Program(
        forward(lambda self, x: x * _TABLE.mean()),
        "create it with torch.arange, full or ones",
        forward(lambda self, x: x * torch.ones(200, 200).mean()),
    ),
    "capture/diagnostics.py _scripted_error 0": Program(
        captured(_linear(True)),
        "use the nn.Module from which it was created",
        captured(_linear(False)),
    ),
}
