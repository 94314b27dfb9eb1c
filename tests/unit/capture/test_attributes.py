"""Python attributes in a capture: which changes are dropped, which are refused, and which values
become constants of the program."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Trace, capture, execute
from autopar.errors import CaptureError

X = torch.arange(8.0).view(2, 4) / 8
Forward = Callable[[Any, Tensor], Tensor]
SEEN = 0


@dataclass
class Config:
    """The settings of a model. A capture switches one of them off temporarily."""

    kind: str | None = None
    scale: float = 2.0
    other: int = 7
    use_cache: bool = True


class Holder(nn.Module):
    """A linear layer with attributes of many kinds. `does` is its forward."""

    def __init__(self, does: Forward) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does
        self.count, self.mean, self.first, self.width = 0, 0.0, True, 0
        self.state: Any = None
        self.tensor = torch.zeros(4)
        self.config = Config()
        self.seen: list[Any] = []
        self.recent: deque[Any] = deque(maxlen=3)
        self.by_name: dict[Any, Any] = {}

    @functools.cached_property
    def halves(self) -> Tensor:
        return torch.full((4,), 0.5).cumsum(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x)).sum()


def counts(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y * min(1.0, self.count / 3)


def counts_to_a_thousand(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y * 2 if self.count % 1000 == 0 else y


def averages(self: Any, y: Tensor) -> Tensor:
    self.mean = 0.9 * self.mean + 0.1
    return y * self.mean


def begins(self: Any, y: Tensor) -> Tensor:
    if self.first:
        y = y * 2
        self.first = False
    return y


def returns_another_once(self: Any, y: Tensor) -> Tensor:
    first, second = y * 2, y * 3
    result = first if self.first else second
    self.first = False
    return result


def remembers(self: Any, y: Tensor) -> Tensor:
    if self.state is not None:
        y = y + self.state
    self.state = y.detach()
    return y


def begins_with_zeros(self: Any, y: Tensor) -> Tensor:
    self.state = torch.zeros(4) if self.state is None else self.state + 1
    return y + self.state


def draws_once(self: Any, y: Tensor) -> Tensor:
    if self.state is None:
        self.state = torch.rand(4)
    return y * self.state


def decays(self: Any, y: Tensor) -> Tensor:
    self.tensor = self.tensor * 0.9 + y.detach().mean(0)
    return y * self.tensor


def reads_what_it_appended(self: Any, y: Tensor) -> Tensor:
    self.recent.append(y.detach())
    return y + sum(self.recent)


def looks_at_a_length(self: Any, y: Tensor) -> Tensor:
    self.seen.append(y.detach())
    return y * 2 if len(self.seen) > 3 else y


def counts_in_a_dict(self: Any, y: Tensor) -> Tensor:
    self.by_name["n"] = self.by_name.get("n", 0) + 1
    return y * self.by_name["n"]


def counts_in_an_object(self: Any, y: Tensor) -> Tensor:
    self.config.scale += 1
    return y * self.config.scale


def counts_in_a_global(self: Any, y: Tensor) -> Tensor:
    global SEEN
    SEEN += 1
    return y * SEEN


CHANGED: dict[Forward, tuple[str, str]] = {
    counts: ("count", "self.count += 1"),
    counts_to_a_thousand: ("count", "self.count += 1"),
    averages: ("mean", "self.mean = 0.9"),
    begins: ("first", "self.first = False"),
    returns_another_once: ("first", "self.first = False"),
    remembers: ("state", "self.state = y.detach()"),
    begins_with_zeros: ("state", "self.state = torch.zeros(4)"),
    draws_once: ("state", "self.state = torch.rand(4)"),
    decays: ("tensor", "self.tensor = self.tensor"),
    reads_what_it_appended: ("recent", "self.recent.append"),
    looks_at_a_length: ("seen", "self.seen.append"),
    counts_in_a_dict: ("by_name", 'self.by_name["n"]'),
    counts_in_an_object: ("scale", "self.config.scale += 1"),
    counts_in_a_global: ("SEEN", "SEEN += 1"),
}


@pytest.mark.parametrize("does", CHANGED, ids=lambda does: does.__name__)
def test_an_attribute_that_forward_reads_and_changes_is_refused_with_module_and_line(
    does: Forward,
) -> None:
    name, line = CHANGED[does]
    model = nn.Sequential(nn.Linear(4, 4), Holder(does))
    before = {key: repr(value) for key, value in vars(model[1]).items()}
    with pytest.raises(CaptureError) as refusal:
        capture(model, (X,))
    assert repr(name) in refusal.value.what and line in str(refusal.value)
    assert "in module 1\n" in str(refusal.value) or does is counts_in_a_global
    assert "make it a buffer" in refusal.value.remedy
    assert {key: repr(value) for key, value in vars(model[1]).items()} == before and SEEN == 0


def keeps_the_last(self: Any, y: Tensor) -> Tensor:
    self.state = y.detach()
    return y + self.state


def keeps_all(self: Any, y: Tensor) -> Tensor:
    self.recent.append(y.detach())
    self.by_name["last"] = y.detach()
    return y


def counts_for_nobody(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y


def guesses_a_setting(self: Any, y: Tensor) -> Tensor:
    if self.config.kind is None:
        self.config.kind = "double"
    return y * 2 if self.config.kind == "double" else y


def fills_a_cache(self: Any, y: Tensor) -> Tensor:
    if self.width < y.shape[1]:
        self.width = y.shape[1]
        self.state = torch.ones(4).cumsum(0)
    return y * self.state[: y.shape[1]]


def fills_a_cache_by_width(self: Any, y: Tensor) -> Tensor:
    if y.shape[1] not in self.by_name:
        self.by_name[y.shape[1]] = torch.ones(4).cumsum(0)
    return y * self.by_name[y.shape[1]]


def fills_what_is_missing(self: Any, y: Tensor) -> Tensor:
    if not hasattr(self, "fresh"):
        self.fresh = torch.ones(4).cumsum(0)
    return y * self.fresh


class Recording:
    on = False


STATE = Recording()


def sets_a_global_for_a_while(self: Any, y: Tensor) -> Tensor:
    global SEEN
    y, before, SEEN, STATE.on = (y * 2 if STATE.on else y), SEEN, 5, True
    y = y * SEEN if STATE.on else y
    SEEN, STATE.on = before, False
    return y


def asks_a_cached_property(self: Any, y: Tensor) -> Tensor:
    return y * self.halves


def gathers_and_clears(self: Any, y: Tensor) -> Tensor:
    self.seen.clear()
    self.seen.append(y.mean())
    return y + sum(self.seen)


HARMLESS: dict[Forward, set[str]] = {
    keeps_the_last: {"state"},
    keeps_all: {"recent", "by_name"},
    counts_for_nobody: {"count"},
    guesses_a_setting: set(),
    fills_a_cache: set(),
    fills_a_cache_by_width: set(),
    fills_what_is_missing: set(),
    gathers_and_clears: {"seen"},
    sets_a_global_for_a_while: set(),
    asks_a_cached_property: set(),
}


@pytest.mark.parametrize("does", HARMLESS, ids=lambda does: does.__name__)
def test_attribute_changes_that_no_later_forward_reads_are_dropped_with_one_warning(
    does: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "autopar")
    trace = capture(Root(Holder(does), does.__name__), (X,))
    capture(Root(Holder(does), does.__name__), (X,))
    told = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("forward sets ")
    ]
    assert len(told) == (1 if HARMLESS[does] else 0)
    for name in HARMLESS[does]:
        assert (
            f"self.{does.__name__}.{name}" in told[0]
            and "a compiled call does not update" in told[0]
        )
    _assert_steps_equal(trace, does)


KEPT: list[Tensor] = []


def test_values_stored_by_hooks_are_dropped_with_a_warning_and_their_ops_are_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: dict[str, Tensor] = {}

    class Storing:
        def __init__(self) -> None:
            self.last: Tensor | None = None

        def __call__(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.last = out
            return out * 2

    def storing(module: nn.Module, args: Any, out: Tensor) -> None:
        KEPT.append(out.detach())
        seen["out"] = out

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    model = nn.Sequential(nn.Linear(4, 4), Mean())
    model[0].register_forward_hook(storing)
    model[0].register_forward_hook(Storing())
    caplog.set_level(logging.WARNING, "autopar")
    trace = capture(model, (X,))
    (told,) = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("forward sets ")
    ]
    for name in ("global variable KEPT of", "variable seen around", "last of a hook on 0"):
        assert told.count(name) == 1
    (found,), _, _ = execute(trace, dict(model.named_parameters()), {}, (X,))
    torch.testing.assert_close(found, model(X))


def test_only_rank_0_warns_about_dropped_attribute_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "autopar")
    monkeypatch.setenv("RANK", "1")
    capture(Root(Holder(keeps_the_last), "of_the_second_rank"), (X,))
    monkeypatch.setenv("RANK", "0")
    assert not caplog.records
    capture(Root(Holder(keeps_the_last), "of_the_first_rank"), (X,))
    (told,) = caplog.records
    assert (
        told.getMessage()
        == "forward sets self.of_the_first_rank.state, but a compiled call does not update it"
    )


class Root(nn.Module):
    """A module that holds `inner` under a given name."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.name)(x)


def _assert_steps_equal(trace: Trace, does: Forward) -> None:
    """Assert that the first three losses of the plain model equal the loss of the graph."""
    model = Root(Holder(does), does.__name__)
    (loss,), _, _ = execute(
        trace, dict(model.named_parameters()), dict(model.named_buffers()), (X,)
    )
    for _ in range(3):
        torch.testing.assert_close(model(X), loss)


def test_a_filled_cache_and_a_counter_in_a_buffer_are_captured() -> None:
    model = Holder(draws_once)
    model(X)
    trace = capture(model, (X,))
    (loss,), _, _ = execute(
        trace, dict(model.named_parameters()), dict(model.named_buffers()), (X,)
    )
    torch.testing.assert_close(loss, model(X))
    model = Holder(counts_by_buffer)
    model.register_buffer("steps", torch.zeros(()))
    assert set(capture(model, (X,)).mutated) == {"steps"}


def counts_by_buffer(self: Any, y: Tensor) -> Tensor:
    self.steps += 1
    return y * self.steps


def test_an_in_place_change_of_a_plain_tensor_is_refused_with_a_remedy() -> None:
    def grows(self: Any, y: Tensor) -> Tensor:
        self.tensor.add_(1)
        return y + self.tensor

    with pytest.raises(CaptureError, match=r"a buffer: self\.register_buffer"):
        capture(Holder(grows), (X,))


class Scaled(nn.Module):
    """A model that reads numbers from itself, from repeated layers and from a configuration, and
    one that the capture changes temporarily."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(num_layers))
        self.beta, self.unread, self.name = 0.5, 3, "n"
        self.config = Config()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.beta * self.config.scale * (1 if self.config.use_cache else 2)).sum()


class Layer(nn.Module):
    """A linear layer and a dropout. The layer has a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.drop, self.number, self.gamma = (
            nn.Linear(4, 4),
            nn.Dropout(0.25),
            number,
            1.5,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(x)) * self.gamma if self.number >= 0 else x


@pytest.mark.parametrize("num_layers", [1, 8], ids=["in full", "folded"])
def test_the_trace_lists_exactly_the_plain_values_that_forward_reads(
    num_layers: int,
) -> None:
    trace = capture(Scaled(num_layers), (X,))
    assert bool(trace.folding.runs) == (num_layers == 8)
    expected: dict[tuple[str, str], Any] = {
        ("", "beta"): 0.5,
        ("", "config.scale"): 2.0,
        ("", "config.use_cache"): True,
    }
    for number in range(num_layers):
        here = f"layers.{number}"
        expected |= {
            (here, "gamma"): 1.5,
            (here, "number"): number,
            (f"{here}.drop", "p"): 0.25,
            (f"{here}.drop", "inplace"): False,
        }
    assert {(each.path, each.name): each.value for each in trace.attributes} == expected
    assert len(trace.attributes) == len(expected)


def test_a_capture_keeps_no_reference_to_the_model() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            found = self.drop(self.layer(x))
            return {"loss": found.pow(2).mean(), "found": found}

    model = Small()
    held = [weakref.ref(each) for each in (model, model.layer, model.layer.weight)]
    trace = capture(model, (torch.randn(2, 4),))
    del model
    gc.collect()
    assert [each() for each in held] == [None, None, None] and trace.parameters
