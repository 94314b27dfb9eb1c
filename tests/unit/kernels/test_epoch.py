"""Signals are epochs that only increase. A late waiter returns at once, and a waiter without a
signal times out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from native import needs_host

from autopar.errors import KernelError
from autopar.kernels import library

pytestmark = needs_host


@pytest.fixture(autouse=True)
def debug_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOPAR_KERNELS", "debug")
    yield


def signal(flag: torch.Tensor, epoch: int) -> int:
    return library.function("host", "ap_epoch_signal_host")(flag.data_ptr(), epoch)


def wait(flag: torch.Tensor, epoch: int) -> int:
    return library.function("host", "ap_epoch_wait_host")(flag.data_ptr(), epoch)


def test_wait_returns_once_the_flag_reaches_or_exceeds_the_epoch() -> None:
    flag = torch.zeros(1, dtype=torch.int64)
    assert wait(flag, 0) == 0
    assert signal(flag, 3) == 0
    assert [wait(flag, epoch) for epoch in (1, 2, 3)] == [0, 0, 0]


def test_missing_signal_raises_a_timeout_error() -> None:
    flag = torch.full((1,), 4, dtype=torch.int64)
    with pytest.raises(KernelError, match=r"(?s)timed out.*epoch\.h"):
        library.check(wait(flag, 5), "ap_epoch_wait")


def test_signal_that_does_not_increase_the_flag_is_refused() -> None:
    flag = torch.zeros(1, dtype=torch.int64)
    assert signal(flag, 2) == 0
    assert signal(flag, 2) == signal(flag, 1) == 1
    assert flag.item() == 2


def test_waiter_reads_data_written_before_the_signal() -> None:
    """Two threads pass a buffer back and forth. Each writes only after it has waited for the
    other."""
    flags, value = torch.zeros(2, dtype=torch.int64), ctypes.c_int64(0)

    def side(own: int) -> list[int]:
        values = []
        for turn in range(1, 51):
            if own == 1 or turn > 1:
                library.check(wait(flags[1 - own :], turn - (own == 0)), "wait")
                values.append(value.value)
            value.value = 2 * turn + own
            library.check(signal(flags[own:], turn), "signal")
        return values

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(side, (0, 1))
    assert first == [2 * turn + 1 for turn in range(1, 50)]
    assert second == [2 * turn for turn in range(1, 51)]
