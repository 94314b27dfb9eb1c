"""Small calls of convolutions and poolings: few samples and channels, and spatial dims that windows
fit into as into the large ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.rules.call import Call, Operand, TensorInfo, argument
from autopar.rules.small_calls import Trial
from autopar.rules.spatial import each

aten = torch.ops.aten
_BATCH, _CHANNELS, _STEPS, _FEW_STEPS, _WIDE = 4, 4, 12, 6, 4


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Multiples of 1/8 of both signs, the same ones each time; hardly two of a window are equal."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-2048, 2049, tuple(shape), generator=random).double() / 8


def _space(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Sizes of a small space: as many strides as two and three ranks share; what is smaller
    stays."""
    steps = [_STEPS if stride < _WIDE else _FEW_STEPS for stride in strides]
    return tuple(
        min(size, stride * n) if size % stride == 0 else size
        for size, stride, n in zip(sizes, strides, steps, strict=True)
    )


def _channels(groups: int, channels: int, made: int) -> tuple[int, int, int]:
    """Return small numbers of groups, and of channels before and behind. Groups of several channels
    keep their numbers."""
    if groups == 1:
        return 1, min(channels, _CHANNELS), min(made, _CHANNELS + 2)
    if groups == channels:
        return _CHANNELS, _CHANNELS, _CHANNELS * (made // channels)
    return groups, channels, made


def _convolution(call: Call, *, backward: bool) -> list[Trial]:
    x, weight = (call.inputs[argument(call, name).index].shape for name in ("input", "weight"))
    transposed, groups = argument(call, "transposed"), argument(call, "groups")
    stride = each(argument(call, "stride"), len(x) - 2)
    made = weight[1] * groups if transposed else weight[0]
    few, c, o = _channels(groups, x[1], made)
    space = _space(x[2:], (1,) * len(stride) if transposed else stride)
    small = numbers((min(x[0], _BATCH), c, *space), 1)
    w = numbers((c, o // few, *weight[2:]) if transposed else (o, c // few, *weight[2:]), 2)
    names = ("stride", "padding", "dilation", "transposed", "output_padding")
    settings = [argument(call, name) for name in names]
    has_bias = not backward and isinstance(argument(call, "bias"), Operand)
    bias = numbers((o,), 3) if has_bias else None
    made_of = aten.convolution.default(small, w, bias, *settings, few)
    if not backward:
        operands = [small, w] if bias is None else [small, w, bias]
        return _trial(call, operands, [made_of], {"groups": few})
    grad, mask = numbers(made_of.shape, 4), argument(call, "output_mask")
    sizes = None if argument(call, "bias_sizes") is None else (o,)
    results = aten.convolution_backward.default(grad, small, w, sizes, *settings, few, mask)
    return _trial(call, [grad, small, w], results, {"groups": few, "bias_sizes": sizes})


def _pool(call: Call, num: int) -> list[Trial]:
    """Return small calls of a pooling over the last `num` dims, or of its backward."""
    shape = call.inputs[argument(call, "self").index].shape
    kernel = argument(call, "kernel_size")
    stride = each(argument(call, "stride", ()) or kernel, num)
    lead = tuple(min(size, _CHANNELS) for size in shape[:-num])
    x = numbers((*lead, *_space(shape[-num:], stride)), 5)
    name = call.target.__name__.split(".")[0]
    if not name.endswith("_backward"):
        results = call.target(x, *_settings(call, 1))
        return _trial(call, [x], list(results) if isinstance(results, tuple) else [results], {})
    forward = getattr(aten, name.removesuffix("_backward")).default
    taken = [argument(call, each_name) for each_name in _FORWARD[name]]
    made = forward(x, *taken)
    first, *indices = made if isinstance(made, tuple) else (made,)
    operands = [numbers(first.shape, 6), x, *indices]
    results = call.target(*(_fill_operands(a, operands) for a in call.args))
    return _trial(call, operands, [results], {})


_FORWARD: Mapping[str, tuple[str, ...]] = {
    **{
        f"max_pool{n}d_with_indices_backward": (
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "ceil_mode",
        )
        for n in (2, 3)
    },
    **{
        f"avg_pool{n}d_backward": (
            "kernel_size",
            "stride",
            "padding",
            "ceil_mode",
            "count_include_pad",
            "divisor_override",
        )
        for n in (2, 3)
    },
}


def _settings(call: Call, first: int) -> list[Any]:
    return [list(a) if isinstance(a, tuple) else a for a in call.args[first:]]


def _fill_operands(value: Any, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return operands[value.index]
    return list(value) if isinstance(value, tuple) else value


def _trial(
    call: Call,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor | None],
    changed: Mapping[str, Any],
) -> list[Trial]:
    """The call on these operands, with some settings changed, where its operands come in this
    order.
    """
    infos = [
        TensorInfo((0,), torch.uint8) if x is None else TensorInfo(tuple(x.shape), x.dtype)
        for x in results
    ]
    if len(operands) != len(call.inputs) or len(infos) != len(call.outputs):
        return []
    names = [a.name for a in call.target._schema.arguments]  # type: ignore[attr-defined]
    args = tuple(changed.get(name, value) for name, value in zip(names, call.args, strict=False))
    small = replace(
        call,
        args=args,
        inputs=tuple(TensorInfo(tuple(x.shape), x.dtype) for x in operands),
        outputs=tuple(infos),
    )
    return [(small, list(operands))]


def _dims(target: Any) -> int:
    return 3 if "3d" in target.__name__ else 2


_POOLS = (
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
)
WINDOW_SAMPLES: Mapping[Any, Callable[[Call], list[Trial]]] = {
    aten.convolution.default: lambda call: _convolution(call, backward=False),
    aten.convolution_backward.default: lambda call: _convolution(call, backward=True),
    **dict.fromkeys(_POOLS, lambda call: _pool(call, _dims(call.target))),
}
