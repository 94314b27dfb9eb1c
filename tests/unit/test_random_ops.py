"""Random numbers by position: shards are windows of the full tensor, and the numbers pass
statistical tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.ops import random

STATE = random.initial_state(1)
KINDS: dict[str, Callable[..., Tensor]] = {
    "keep_mask": lambda shape, draw, part=None: random.keep_mask(STATE, shape, 0.3, draw, part),
    "uniform": lambda shape, draw, part=None: random.uniform(
        STATE, shape, -1.0, 3.0, torch.float64, draw, part
    ),
    "normal": lambda shape, draw, part=None: random.normal(
        STATE, shape, 1.0, 2.0, torch.float32, draw, part
    ),
    "randint": lambda shape, draw, part=None: random.randint(
        STATE, shape, -5, 1000, torch.int64, draw, part
    ),
}


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of the full tensor, and the starts and shape of a window."""
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    shape = [draw(st.integers(1, size - start)) for size, start in zip(sizes, starts, strict=True)]
    return tuple(sizes), tuple(starts), tuple(shape)


@pytest.mark.parametrize("kind", KINDS)
@given(window=windows(), inner=st.sampled_from([1, 2, 7, 24, 2**31]))
def test_a_shard_is_a_window_of_the_full_tensor(
    kind: str, window: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], inner: int
) -> None:
    sizes, starts, shape = window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_INNER", inner)
        whole, part = KINDS[kind](sizes, 3), KINDS[kind](shape, 3, (starts, sizes))
    assert torch.equal(
        part, whole[tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))]
    )
    assert whole.shape == torch.Size(sizes)


def test_shards_of_a_tensor_with_more_than_2_to_the_32_elements_differ() -> None:
    sizes, seen = (2**12, 2**14, 2**13), set()
    for start in ((0, 0, 0), (2**11, 0, 0), (0, 2**13, 0), (2**12 - 1, 2**14 - 1, 2**12)):
        seen.add(
            tuple(
                random.randint(STATE, (1, 1, 64), 0, 2**31, torch.int64, 0, (start, sizes))
                .flatten()
                .tolist()
            )
        )
    assert len(seen) == 4


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_a_dropout_mask_drops_the_requested_share(p: float) -> None:
    dropped = 1.0 - random.keep_mask(STATE, (512, 2048), p, 0).double().mean().item()
    assert abs(dropped - p) <= 5 * math.sqrt(p * (1 - p) / 2**20)


def test_uniform_normal_and_integers_have_their_moments() -> None:
    n = 2**20
    u = random.uniform(STATE, (n,), 0.0, 1.0, torch.float64, 0)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    z = random.normal(STATE, (n,), 0.0, 1.0, torch.float64, 1)
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(variance / n)
    counts = random.randint(STATE, (n,), -3, 4, torch.int64, 2).add(3).bincount(minlength=7)
    assert ((counts - n / 7).abs() < 5 * math.sqrt(n / 7)).all()


@pytest.mark.parametrize("shape", [(1024, 1024), (1024, 4, 256), (2**20,)])
def test_neighbours_draws_steps_and_seeds_are_uncorrelated_in_random_numbers(
    shape: tuple[int, ...],
) -> None:
    def signs(state: Tensor, draw: int) -> Tensor:
        return random.keep_mask(state, shape, 0.5, draw).double() * 2 - 1

    here = signs(STATE, 0)
    others = [signs(STATE, 1), signs(STATE + 1, 0), signs(random.initial_state(2), 0)]
    others += [
        here.roll(shift, dim) for dim in range(len(shape)) for shift in (1, 2, shape[dim] // 2)
    ]
    for other in others:
        assert abs((here * other).mean()) < 5 / math.sqrt(here.numel())


def test_rows_with_their_own_keys_are_uncorrelated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "_INNER", 256)
    signs = random.keep_mask(STATE, (4096, 256), 0.5, 0).double() * 2 - 1
    for shift in (1, 2, 64, 2048):
        assert abs((signs * signs.roll(shift, 0)).mean()) < 5 / math.sqrt(signs.numel())
    assert len({tuple(row) for row in signs.tolist()}) == 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_end_of_the_unit_interval_is_never_drawn(dtype: torch.dtype) -> None:
    drawn = random.uniform(STATE, (2**20,), 0.0, 1.0, dtype, 0)
    assert drawn.dtype == dtype and drawn.min() == drawn.min().clamp(0) and drawn.max() < 1
    assert drawn.float().neg().log1p().isfinite().all()


def test_no_seed_gives_initial_bits_that_are_all_zero() -> None:
    states = torch.stack([random.initial_state(seed) for seed in range(1000)])
    assert states.unique().numel() == 1000 and (states != 0).all()
    first = [
        float(random.uniform(state, [1], 0.0, 1.0, torch.float32, 0)) for state in states[:100]
    ]
    assert min(first) > 0.0


def test_scaling_keeps_the_elements_that_the_mask_keeps() -> None:
    x, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    assert random.masked_scale(x, mask, 2.0).tolist() == [2.0, 0.0, 6.0]
