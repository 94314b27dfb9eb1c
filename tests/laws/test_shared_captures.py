"""Captures shared between tests equal new captures. Different models do not share a
capture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shared_captures
import stored_captures
import torch
import zoo_small
from same_trace import assert_same_trace, differs
from torch import nn

from autopar.capture import capture, capturing


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Replace the fixture that shares captures between tests."""


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list with one entry per traced model. Captures are shared in this process while the
    test runs."""
    seen: list[str] = []

    def counted(model: nn.Module, *rest: Any) -> Any:
        seen.append(type(model).__name__)
        return capturing_itself(model, *rest)

    capturing_itself = shared_captures._captured
    monkeypatch.delenv(stored_captures.FOLDER)
    monkeypatch.setattr(shared_captures, "_captured", counted)
    monkeypatch.setattr(shared_captures, "_kept", type(shared_captures._kept)())
    monkeypatch.setattr(capturing, "_capture_once", shared_captures.captured)
    return seen


@pytest.mark.slow
def test_a_shared_capture_equals_a_new_capture_and_has_its_own_graph(
    traced: list[str],
) -> None:
    model, batch = zoo_small.gpt2()
    first, again, third = (
        capture(m, (), batch) for m in (model, copy.deepcopy(model), zoo_small.gpt2()[0])
    )
    assert len(traced) == 1
    shared_captures._kept.clear()
    fresh = capture(model, (), batch)
    assert len(traced) == 2
    for other in (again, third, fresh):
        assert_same_trace(first, other)
        assert [n.name for n in first.graph.nodes] == [n.name for n in other.graph.nodes]
        assert [n.meta for n in first.graph.nodes if n.op == "output"] == [
            n.meta for n in other.graph.nodes if n.op == "output"
        ]
    next(
        n for n in again.graph.nodes if n.op == "call_function"
    ).target = torch.ops.aten.neg.default
    assert differs(first, again)
    assert_same_trace(capture(model, (), batch), first)


class Scaled(nn.Module):
    """A linear layer and a mean. `by` and `how` are plain attributes, which appear in no tensor and
    not in the printed module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop, self.again = nn.Dropout(0.5), nn.Dropout(0.5)
        self.by, self.how = 2.0, [torch.relu]
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        y = self.how[0](self.other(self.again(self.drop(self.linear(x))))) * self.by + self.shift
        return y.mean() * (2 if twice else 1)


class Further(Scaled):
    pass


def _model(
    change: Callable[[Any], Any] = lambda m: None, kind: type[nn.Module] = Scaled
) -> nn.Module:
    model = kind()
    change(model)
    return model


def _tie(model: Any) -> None:
    model.other.weight = model.linear.weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a plain number": lambda m: setattr(m, "by", 3.0),
    "a number's type": lambda m: setattr(m, "by", 2),
    "a function": lambda m: setattr(m, "how", [torch.tanh]),
    "evaluation": lambda m: m.eval(),
    "evaluation of a part": lambda m: m.drop.eval(),
    "the dropout": lambda m: setattr(m.drop, "p", 0.25),
    "a frozen weight": lambda m: m.linear.weight.requires_grad_(False),
    "tied weights": _tie,
    "one module twice": lambda m: setattr(m, "again", m.drop),
    "float64": lambda m: m.double(),
    "no bias": lambda m: setattr(m.linear, "bias", None),
    "strides": lambda m: setattr(
        m.linear, "weight", nn.Parameter(torch.ones(4, 4).t().contiguous().t())
    ),
    "a buffer's shape": lambda m: setattr(m, "shift", torch.ones(1)),
    "a hook": lambda m: m.linear.register_forward_hook(_doubled),
    "a forward of its own": lambda m: setattr(m.linear, "forward", torch.relu),
}


def _doubled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


@pytest.mark.parametrize("name", CHANGES)
def test_different_models_have_different_keys(name: str) -> None:
    assert shared_captures.look(_model()) == shared_captures.look(_model())
    assert shared_captures.look(_model(CHANGES[name])) == shared_captures.look(
        _model(CHANGES[name])
    )
    assert shared_captures.look(_model(CHANGES[name])) != shared_captures.look(_model())


def test_other_classes_have_other_keys_and_incomparable_models_are_not_shared(
    traced: list[str],
) -> None:
    assert shared_captures.look(_model(kind=Further)) != shared_captures.look(_model())
    state = object()
    for change in (
        lambda m: setattr(m, "by", state),
        lambda m: setattr(m, "how", [lambda y: y if state else -y]),
    ):
        with pytest.raises(shared_captures.Unknown):
            shared_captures.look(_model(change))
    for _ in range(2):
        capture(
            _model(lambda m: setattr(m, "how", [lambda y: y if state else -y])), (torch.ones(2, 4),)
        )
    assert len(traced) == 2


def test_another_call_has_another_capture(traced: list[str]) -> None:
    model, x = _model(), torch.ones(2, 4)
    others: list[Any] = [x[:1], x.clone().requires_grad_(), torch.ones(4, 2).t()]
    calls: list[Any] = [
        ((x,), {}),
        *(((other,), {}) for other in others),
        ((x,), {"twice": True}),
        ((), {"x": x}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            capture(model, args, kwargs)
    assert len(traced) == len(calls)
    capture(model, (x,), fold=False)
    assert len(traced) == len(calls) + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture(model, (x,))
    assert len(traced) == len(calls) + 2


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "vit"])
def test_a_capture_written_by_another_process_equals_a_new_capture(
    traced: list[str], kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(stored_captures.FOLDER, str(tmp_path))
    model, batch = getattr(zoo_small, kind)()
    fresh = capture(model, (), batch)
    shared_captures._kept.clear()  # simulate another process
    read = capture(model, (), batch)
    assert len(traced) == 1
    assert_same_trace(fresh, read)
    assert [n.name for n in fresh.graph.nodes] == [n.name for n in read.graph.nodes]
    assert (fresh.folding, fresh.precision) == (read.folding, read.precision)
    assert _sharing(fresh) == _sharing(read)
    assert stored_captures.dumps(fresh) == stored_captures.dumps(read)


def _sharing(trace: Any) -> list[int]:
    """Return the number of the storage of each tensor, in the order of their first use."""
    numbers: dict[int, int] = {}
    values = [
        n.meta["val"] for n in trace.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    return [numbers.setdefault(value.untyped_storage()._cdata, len(numbers)) for value in values]


def test_models_without_a_stable_key_are_traced_in_each_process(
    traced: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def words(change: Callable[[Any], Any] = lambda m: None, kind: type[nn.Module] = Scaled) -> str:
        return "\n".join(stored_captures._words(shared_captures.look(_model(change, kind))))

    assert words() == words()
    assert len(
        {words(), words(kind=Further), *(words(change) for change in CHANGES.values())}
    ) == 2 + len(CHANGES)
    monkeypatch.setenv(stored_captures.FOLDER, str(tmp_path))

    class Hidden(Scaled):
        """A class that another process cannot find by its name."""

    with pytest.raises(stored_captures.Untold):
        words(kind=Hidden)
    for _ in range(2):
        shared_captures._kept.clear()
        capture(_model(kind=Hidden), (torch.ones(2, 4),))
    assert len(traced) == 2 and not list(tmp_path.iterdir())
