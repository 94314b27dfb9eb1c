"""Run the plain model with autopar's random numbers, so that it can be compared with programs that
draw random numbers.

Eager torch draws in the order in which the trace numbers its draws. Each draw is replaced by the
draw of its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.analysis.microbatch_calls import cut_dim
from autopar.capture import Trace
from autopar.errors import VerificationError
from autopar.ops import random

aten = torch.ops.aten


class PositionalDraws(TorchDispatchMode):
    """A mode that replaces every random op by its counterpart in `autopar.ops.random`.

    Attributes:
        num_draws: number of draws so far.
    """

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state, self.num_draws = state, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None and func in random.WITHOUT_GENERATOR:
            func, kwargs = (
                random.WITHOUT_GENERATOR[func],
                {name: value for name, value in kwargs.items() if name != "generator"},
            )
        drawn = _DRAWN.get(func)
        if drawn is not None:
            return drawn(self, func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(
            func, "tags", ()
        ) and "dropout_p" not in str(func._schema):
            raise VerificationError(
                f"the plain model draws with {func}, which has no counterpart by position",
                remedy="draw with rand, randn or dropout",
            )
        return func(*args, **kwargs)

    def draw(self, kind: Callable[..., Tensor], shape: Any, *settings: Any) -> Tensor:
        """Return the next draw."""
        number, self.num_draws = self.num_draws, self.num_draws + 1
        return kind(self.state, tuple(shape), *settings, draw=number)


class DrawsBySample(PositionalDraws):
    """Draws of a whole batch in which each sample gets the numbers of its own microbatch, one of
    `num`.

    Args:
        dims: for each draw, the dim along which the batch is cut.
    """

    def __init__(self, state: Tensor, dims: Mapping[int, int], num: int) -> None:
        super().__init__(state)
        self._dims, self._num = dims, num

    def draw(self, kind: Callable[..., Tensor], shape: Any, *settings: Any) -> Tensor:
        """Return the next draw."""
        if self.num_draws not in self._dims:  # no node reads this draw
            return super().draw(kind, shape, *settings)
        number, self.num_draws = self.num_draws, self.num_draws + 1
        dim, part = self._dims[number], list(shape)
        part[dim] //= self._num
        return torch.cat(
            [kind(self.state + m, tuple(part), *settings, draw=number) for m in range(self._num)],
            dim,
        )


def draws_by_sample(whole: Trace, part: Trace, num: int, state: Tensor) -> DrawsBySample | None:
    """Return the draws of a whole batch that is processed in `num` microbatches. Return None if all
    samples of a microbatch share a draw.

    Args:
        whole: the trace of the batch.
        part: the trace of one microbatch.
        num: number of microbatches.
        state: state of the random generator.
    """
    shapes = [
        {n.kwargs["draw"]: tuple(n.meta["val"].shape) for n in t.graph.nodes if "draw" in n.kwargs}
        for t in (whole, part)
    ]
    dims_by_draw = {
        number: cut_dim(shape, shapes[1][number], num)
        for number, shape in shapes[0].items()
        if number in shapes[1]
    }
    dims = {number: dim for number, dim in dims_by_draw.items() if dim is not None and dim >= 0}
    return DrawsBySample(state, dims, num) if len(dims) == len(dims_by_draw) else None


Drawn = Callable[[PositionalDraws, Any, tuple[Any, ...], Mapping[str, Any]], Any]


def _dropout(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    x, p, train = args
    if train is False or p == 0.0:
        return func(*args)
    mask = mode.draw(random.keep_mask, x.shape, p)
    return random.masked_scale(x, mask, 1.0 / (1.0 - p) if p < 1.0 else 0.0), mask


def _slopes(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    x, noise, lower, upper, train = args[:5]
    if not train:
        return func(*args, **kwargs)
    return x * noise.copy_(
        torch.where(x <= 0, mode.draw(random.uniform, x.shape, lower, upper, x.dtype), 1)
    )


def _draw_new(kind: Callable[..., Tensor], settings: Callable[..., tuple[Any, ...]]) -> Drawn:
    """Return the counterpart of an op that returns a new tensor. `settings` takes the op's
    arguments."""

    def run(
        mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        like = func(*args, **kwargs)  # the counterpart has its shape, dtype and device
        return mode.draw(kind, like.shape, *settings(*args), like.dtype)

    return run


def _draw_into(kind: Callable[..., Tensor], settings: Callable[..., tuple[Any, ...]]) -> Drawn:
    """Return the counterpart of an op that fills its operand. `settings` takes the op's
    arguments."""

    def run(
        mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        keywords = {name: value for name, value in kwargs.items() if name != "generator"}
        return args[0].copy_(
            mode.draw(kind, args[0].shape, *settings(*args, **keywords), args[0].dtype)
        )

    return run


def _bernoulli(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return args[0].copy_(
        mode.draw(
            random.keep_mask,
            args[0].shape,
            1.0 - (args[1] if len(args) > 1 else kwargs.get("p", 0.5)),
        )
    )


def _bernoulli_of(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Draw by the probabilities in the last operand. If there are two operands, the first one is
    written."""
    drawn = mode.draw(random.uniform, args[0].shape, 0.0, 1.0, torch.float32) < args[-1]
    return args[0].copy_(drawn) if len(args) > 1 else drawn.to(args[0].dtype)


def _exponential(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    rate = args[1] if len(args) > 1 else kwargs.get("lambd", 1.0)
    return args[0].copy_(
        _exponentials(mode, args[0].shape, torch.promote_types(args[0].dtype, torch.float32)).div_(
            rate
        )
    )


def _exponentials(mode: PositionalDraws, shape: Any, dtype: torch.dtype) -> Tensor:
    logarithm = mode.draw(random.uniform, shape, 0.0, 1.0, dtype).neg_().log1p_()
    return logarithm.clamp_(max=-random.LEAST_EXPONENTIAL).neg_()


def _multinomial(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    weights, num = args[:2]
    replaced = (args[2] if len(args) > 2 else kwargs.get("replacement", False)) and num > 1
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    wide = wide.unsqueeze(-2) if replaced else wide
    rates = wide / _exponentials(
        mode,
        (*weights.shape[:-1], num, weights.shape[-1]) if replaced else weights.shape,
        wide.dtype,
    )
    return (
        rates.argmax(-1)
        if replaced
        else rates.argsort(dim=-1, descending=True, stable=True)[..., :num]
    )


def _gamma(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    alpha = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
    tries, settings = (*alpha.shape, random.GAMMA_TRIES), (0.0, 1.0, alpha.dtype)
    normals, uniforms = (
        mode.draw(kind, tries, *settings) for kind in (random.normal, random.uniform)
    )
    return random.gamma(
        alpha, normals, uniforms, mode.draw(random.uniform, alpha.shape, *settings)
    ).to(args[0].dtype)


def _dirichlet(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    gammas = _gamma(mode, func, args, kwargs)
    return gammas / gammas.sum(-1, keepdim=True)


def _permutation(
    mode: PositionalDraws, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    like = func(*args, **kwargs)
    return (
        mode.draw(random.randint, like.shape, 0, random.LARGEST_RANGE, torch.int64)
        .argsort(stable=True)
        .to(like.dtype)
    )


def _unit(*_: Any) -> tuple[float, float]:
    return 0.0, 1.0


_DRAWN: Mapping[Any, Drawn] = {
    aten.native_dropout.default: _dropout,
    aten.rrelu_with_noise.default: _slopes,
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli_of,
    aten.bernoulli.default: _bernoulli_of,
    **{op: _draw_new(random.uniform, _unit) for op in (aten.rand.default, aten.rand_like.default)},
    **{op: _draw_new(random.normal, _unit) for op in (aten.randn.default, aten.randn_like.default)},
    aten.randint.default: _draw_new(random.randint, lambda high, size: (0, high)),
    aten.randint.low: _draw_new(random.randint, lambda low, high, size: (low, high)),
    aten.randint_like.default: _draw_new(random.randint, lambda x, high: (0, high)),
    aten.randint_like.low_dtype: _draw_new(random.randint, lambda x, low, high: (low, high)),
    aten.uniform_.default: _draw_into(
        random.uniform, lambda x, low=0.0, high=1.0, **_: (low, high)
    ),
    aten.normal_.default: _draw_into(random.normal, lambda x, mean=0.0, std=1.0: (mean, std)),
    aten.exponential_.default: _exponential,
    aten.randperm.default: _permutation,
    aten.multinomial.default: _multinomial,
    aten._standard_gamma.default: _gamma,
    aten._sample_dirichlet.default: _dirichlet,
}
