"""A cached capture equals the capture that tracing gives. Another budget, mesh or hardware does not
capture the model again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from same_trace import assert_same_trace
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import autopar
from autopar import hf
from autopar.api import cached_captures, tracing
from autopar.cache import origin, store, trace_json
from autopar.cache.walk import Opaque
from autopar.capture import Trace, hugging_face
from autopar.capture.trace import OutsideValue, Stamp
from autopar.core.private_folder import warn_once

SIZES = (
    '"hidden_size":32,"intermediate_size":64,"vocab_size":64,"num_attention_heads":4,'
    '"num_key_value_heads":2,"max_position_embeddings":64}'
)
TINY = 'llama:{"num_hidden_layers":7,' + SIZES
MIXED = 'mixtral:{"num_hidden_layers":1,' + SIZES
BATCH = torch.zeros(4, 8)
scale = 3.0


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Trace at each capture: replaces the fixture that shares captures."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPAR_CACHE")
    monkeypatch.setattr(origin, "_STARTED", float("inf"))  # sources may change while the tests run
    warn_once.cache_clear()
    return tmp_path / "cache" / "entries"


class Block(nn.Module):
    """A model with dropout, a running mean, a tied weight, a tensor attribute and external
    values."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(8)
        self.table = torch.arange(8.0)
        self.slope = 0.1

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = F.dropout(F.leaky_relu(self.one(x), self.slope), 0.5, self.training)
        x = self.norm(self.two(x) * scale + self.table)
        return {"loss": x.pow(2).mean(), "parts": x.chunk(2, -1), "name": "block", "rate": 0.5}


def closure_model(factor: float) -> nn.Module:
    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
            return (self.one(x) * factor).sum() if flag else self.one(x).relu().sum() * factor

    return Closed()


def llama() -> tuple[nn.Module, Any]:
    return hf.build(TINY, batch=4, seq=16)


def mixtral() -> tuple[nn.Module, Any]:
    return hf.build(MIXED, batch=4, seq=16)


CASES: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, Any]]]] = {
    "block": lambda: (Block(), BATCH, {}),
    "evaluation": lambda: (Block().eval(), BATCH, {"inference": True}),
    "bf16": lambda: (Block(), BATCH, {"precision": "bf16"}),
    "closure": lambda: (closure_model(2.0), (BATCH, True), {}),
    "gradient of an input": lambda: (closure_model(2.0), BATCH.clone().requires_grad_(), {}),
    "folded": lambda: (*llama(), {}),
    "experts": lambda: (*mixtral(), {}),
}


def trace_of(model: nn.Module, batch: Any, *, cached: bool = True, **options: Any) -> Trace:
    args, kwargs = autopar.api.as_call(batch)
    precision = options.pop("precision", None)
    with cached_captures.captures_cached(use=cached):
        return tracing.trace_call(model, args, kwargs, precision, **options)


@pytest.mark.parametrize("setting", [2.5, numpy.float64(2.5), torch.float64, True])
def test_cached_constants_of_the_call_keep_their_type(setting: Any) -> None:
    model = closure_model(2.0)
    found = [trace_of(model, (BATCH, setting)).settings[1] for _ in range(2)]
    assert found == [setting, setting]
    assert type(found[1]) is type(setting)


@pytest.mark.parametrize("case", CASES)
def test_cached_capture_equals_the_capture(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, options = CASES[case]()
    first = trace_of(model, batch, **options)
    monkeypatch.setattr(cached_captures, "capture", None)  # must not be called
    second = trace_of(model, batch, **options)
    assert_same_trace(first, second)
    assert first.graph is not second.graph
    assert list(_names(first)) == list(_names(second))
    for field in fields(Trace):
        if field.name not in ("graph", "attributes"):
            assert getattr(first, field.name) == getattr(second, field.name), field.name
    for one, two in zip(first.attributes, second.attributes, strict=True):
        assert type(one) is type(two)
        for name in one.__dataclass_fields__:
            assert _equal(getattr(one, name), getattr(two, name)), (one, two)
    if case == "closure":
        cells = [a.holder for a in second.attributes if isinstance(a, OutsideValue)]
        assert any(cell is model.forward.__closure__[0] for cell in cells)  # type: ignore[attr-defined]


def _names(trace: Trace) -> Any:
    storages: dict[int, int] = {}
    for node in trace.graph.nodes:
        values = node.meta.get("val")
        tensors = values if isinstance(values, tuple) else (values,)
        yield (
            node.name,
            sorted(node.meta),
            [
                (v.storage_offset(), storages.setdefault(v.untyped_storage()._cdata, len(storages)))
                for v in tensors
                if isinstance(v, torch.Tensor)
            ],
        )


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Stamp):
        return isinstance(two, Stamp) and one.tensor() is two.tensor()
    return one is two or (type(one) is type(two) and one == two)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the model is captured again")


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 10**8},
        {"mesh": autopar.Mesh({"gpu": 4})},
        {"hardware": "a100-sxm-80gb"},
        {"optimizer": "sgd"},
        {"outputs": "loss"},
    ],
    ids=lambda change: "-".join(change),
)
def test_changed_planning_options_do_not_capture_again(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = closure_model(2.0)
    request = {"mesh": autopar.Mesh({"gpu": 2}), "hardware": "h100-sxm"}
    autopar.plan(model, **request, example_inputs=BATCH)  # type: ignore[arg-type]
    fresh = autopar.plan(model, **{**request, **change}, example_inputs=BATCH, cache=False)
    monkeypatch.setattr(cached_captures, "capture", refuse)
    plan = autopar.plan(model, **{**request, **change}, example_inputs=BATCH)
    assert plan.dumps() == fresh.dumps()


def test_model_with_microbatches_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request: dict[str, Any] = {
        "hardware": "h100-sxm",
        "example_inputs": torch.zeros(8, 8),
        "num_microbatches": 4,
    }
    model = closure_model(2.0)
    autopar.plan(model, autopar.Mesh({"gpu": 2}), **request)
    monkeypatch.setattr(cached_captures, "capture", refuse)
    plan = autopar.plan(model, autopar.Mesh({"gpu": 2}), **request, optimizer="sgd")
    assert plan.pipeline is not None
    assert plan.pipeline.num_microbatches == 4


def packed_llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model whose outputs include a cache of keys and values."""
    model, batch = llama()
    positions = torch.cat([torch.arange(5), torch.arange(11)]).expand(4, 16).clone()
    return model, {**batch, "position_ids": positions}


def test_another_process_loads_output_types_registered_by_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = packed_llama()
    first = trace_of(model, batch)
    assert "autopar.EmptyCache" in pytree.treespec_dumps(first.out_spec)
    monkeypatch.delitem(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, "autopar.EmptyCache")
    hugging_face._empty_cache.cache_clear()
    pytree.treespec_loads.cache_clear()  # torch caches loaded specs
    monkeypatch.setattr(cached_captures, "capture", refuse)
    assert_same_trace(first, trace_of(model, batch))


def test_model_with_an_unregistered_output_type_is_captured_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_unregistered(text: str) -> Any:
        raise NotImplementedError("Deserializing tests.Pair in pytree is not registered.")

    model = closure_model(2.0)
    first = trace_of(model, BATCH)
    monkeypatch.setattr(trace_json, "treespec_loads", raise_unregistered)
    with caplog.at_level(logging.DEBUG, "autopar"):
        assert_same_trace(first, trace_of(model, BATCH))
    assert "a structure of inputs or outputs cannot be read" in caplog.text


def test_other_input_shapes_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = closure_model(2.0)
    trace_of(model, BATCH)
    monkeypatch.setattr(cached_captures, "capture", refuse)
    with pytest.raises(AssertionError, match="captured again"):
        trace_of(model, torch.zeros(2, 8))


def test_check_does_not_use_the_cached_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    model = closure_model(2.0)
    mesh = autopar.Mesh({"gpu": 2})
    plan = autopar.plan(model, mesh, example_inputs=BATCH, hardware="h100-sxm")
    monkeypatch.setattr(cached_captures, "capture", refuse)
    with pytest.raises(AssertionError, match="captured again"):
        autopar.check(plan, model, BATCH)


def test_second_compile_does_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for turn in range(2):
        torch.manual_seed(0)
        model = closure_model(2.0)
        module = autopar.compile(model, example_inputs=torch.ones(4, 8), hardware="cpu-gloo")
        loss = module(torch.ones(4, 8))
        loss.backward()
        gradients = [p.grad.full_tensor() for p in module.parameters() if p.grad is not None]
        losses.append([loss.detach(), *gradients])
        if turn == 0:
            monkeypatch.setattr(cached_captures, "capture", refuse)
    assert all(torch.equal(one, two) for one, two in zip(*losses, strict=True))
    plain = model(torch.ones(4, 8))
    torch.testing.assert_close(losses[1][0], plain.detach())


def test_module_from_a_cached_capture_still_checks_external_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    factor = 2.0

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x).sum() * factor

    results = []
    for _ in range(2):
        torch.manual_seed(0)
        factor = 2.0
        module = autopar.compile(Watched(), example_inputs=BATCH, hardware="cpu-gloo")
        factor = 3.0
        try:
            results.append(str(module(BATCH).item()))
        except autopar.AutoparError as error:
            results.append(error.what)
    assert results[0] == results[1]


def test_damaged_capture_is_logged_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = closure_model(2.0)
    first = trace_of(model, BATCH)
    (file,) = folder.iterdir()
    head, beside, text = file.read_text().rpartition("\n")[0].split("\n", 2)
    data = json.loads(text)
    nothing = [["tuple"]] * 3
    for damaged in (
        {**data, "nodes": data["nodes"][1:]},
        {**data, "in_spec": "[]"},
        {key: value for key, value in data.items() if key != "fakes"},
        {
            **data,
            "nodes": [[*data["nodes"][0][:2], ["function", "os", "system"], *nothing]],
        },
    ):
        warn_once.cache_clear()
        caplog.clear()
        store.write_entry(file.stem, f"{head}\n{beside}\n{json.dumps(damaged)}")
        assert_same_trace(first, trace_of(model, BATCH))
        assert "a cache entry is not used and will be replaced" in caplog.text


def test_capture_that_cannot_be_serialized_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def opaque(*_: Any) -> Any:
        raise Opaque("it cannot be written")

    from autopar.cache import entries

    monkeypatch.setattr(entries, "trace_to_json", opaque)
    with caplog.at_level(logging.DEBUG, "autopar"):
        trace_of(closure_model(2.0), BATCH)
    assert "the capture is not cached: it cannot be written" in caplog.text
    assert store.entries() == ()
