"""Discovery of rules by experiments on small tensors, and the cache of discovered rules."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.rules import (
    axis_options,
    call_on,
    discovery,
    is_discovered,
    is_fallback,
    why_replicated,
)
from autopar.rules import discovery as discovered
from autopar.rules.call import Call
from autopar.rules.discovery import experiment

aten = torch.ops.aten


@torch.library.custom_op("tests_discovery::mixture", mutates_args=())
def mixture(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """[b, s, k] × [n, k], scaled by rows: a product that is nonlinear in one operand only."""
    return torch.einsum("bsk,nk->bsn", x, w) * torch.tanh(scale)


@torch.library.custom_op("tests_discovery::rough_average", mutates_args=())
def rough_average(x: Tensor) -> Tensor:
    return x.mean(0)


@torch.library.custom_op("tests_discovery::extremes", mutates_args=())
def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(1), x.amin(1)


@torch.library.custom_op("tests_discovery::loud", mutates_args=())
def loud(x: Tensor) -> Tensor:
    return (x.abs() > 0.5).any(1)


@torch.library.custom_op("tests_discovery::checked", mutates_args=())
def checked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a status per row that is zero on success, as many algorithms do."""
    return x.cumsum(1), torch.zeros(x.shape[0], dtype=torch.int32)


@torch.library.custom_op("tests_discovery::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("tests_discovery::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@torch.library.custom_op("tests_discovery::whole", mutates_args=())
def whole(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x)


@torch.library.custom_op("tests_discovery::backwards", mutates_args=())
def backwards(x: Tensor) -> Tensor:
    return x.cumsum(0).flip(0)


@torch.library.custom_op("tests_discovery::crashing", mutates_args=())
def crashing(x: Tensor, y: Tensor) -> Tensor:
    """Abort on mismatched shapes, as kernels without checks do."""
    if x.shape != y.shape:
        os.abort()
    return x * y


@torch.library.custom_op("tests_discovery::slow", mutates_args=())
def slow(x: Tensor) -> Tensor:
    time.sleep(0.2)
    return x * 2


@torch.library.custom_op("tests_discovery::headed", mutates_args=())
def headed(x: Tensor, num_heads: int) -> Tensor:
    """Softmax within each head of the last dim."""
    return x.unflatten(-1, (num_heads, -1)).softmax(-1).flatten(-2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "autopar"))
    discovery._discover.cache_clear()
    return tmp_path / "autopar" / "discovered.json"


def call(target: Any, *args: Any) -> Call:
    return call_on(target, args, {}, target(*args))[0]


def options_of(op_call: Call) -> list[str]:
    return [
        f"{' '.join(map(str, o.inputs))} -> {' '.join(map(str, o.outputs))}"
        for o in discovery.discover(op_call).options
    ]


mine = torch.ops.tests_discovery
MIXTURE = [
    "R R R -> R",
    "S(0) R R -> S(0)",
    "S(1) R R -> S(1)",
    "S(2) S(1) R -> P(sum)",
    "R S(0) S(0) -> S(2)",
    "P(sum) R R -> P(sum)",
    "R P(sum) R -> P(sum)",
]


def test_strategies_of_an_unknown_op_are_found_by_experiments() -> None:
    op_call = call(mine.mixture.default, torch.ones(4, 512, 64), torch.ones(96, 64), torch.ones(96))
    assert sorted(options_of(op_call)) == sorted(MIXTURE)
    assert (
        is_discovered(op_call)
        and not is_fallback(op_call)
        and axis_options(op_call) == discovery.discover(op_call).options
    )


def test_mean_does_not_return_a_partial_sum() -> None:
    assert options_of(call(mine.rough_average.default, torch.ones(8, 6))) == [
        "R -> R",
        "S(1) -> S(0)",
        "P(sum) -> P(sum)",
    ]


def test_partial_maximum_and_partial_minimum_are_distinguished() -> None:
    assert options_of(call(mine.extremes.default, torch.ones(8, 6))) == [
        "R -> R R",
        "S(0) -> S(0) S(0)",
        "S(1) -> P(max) P(min)",
    ]


def test_boolean_reduction_is_not_partial() -> None:
    assert options_of(call(mine.loud.default, torch.ones(8, 6))) == ["R -> R", "S(0) -> S(0)"]


def test_constant_result_is_sharded_but_never_partial() -> None:
    assert options_of(call(mine.checked.default, torch.ones(8, 6))) == [
        "R -> R R",
        "S(0) -> S(0) S(0)",
    ]


def test_partial_sum_is_not_passed_through_a_rounding_cast() -> None:
    options = options_of(call(mine.rough_average.default, torch.ones(8, 6, dtype=torch.bfloat16)))
    assert options == [
        "R -> R",
        "S(1) -> S(0)",
        "P(sum) -> P(sum)",
    ]  # the result has the dtype of the operand
    narrow = call(mine.rough_average.default, torch.ones(8, 6))
    narrow = Call(
        narrow.target,
        narrow.args,
        narrow.kwargs,
        narrow.inputs,
        (type(narrow.outputs[0])((6,), torch.bfloat16),),
    )
    assert options_of(narrow) == ["R -> R", "S(1) -> S(0)"]


def test_ops_with_size_arguments_are_tried_on_small_shapes() -> None:
    assert options_of(call(mine.headed.default, torch.ones(64, 512, 256), 8)) == [
        "R -> R",
        "S(0) -> S(0)",
        "S(1) -> S(1)",
    ]


@pytest.mark.parametrize(
    ("op_call", "why"),
    [
        (lambda: call(mine.noise.default, torch.ones(4, 6)), "differ between two runs"),
        (lambda: call(mine.constant.default, torch.ones(4, 6)), "does not depend on its operands"),
        (lambda: call(mine.whole.default, torch.ones(6, 4)), "no sharding"),
        (lambda: call(aten.add_.Tensor, torch.ones(4), torch.ones(4)), "modifies its operands"),
        (lambda: call(aten.rand_like.default, torch.ones(4)), "random"),
        (lambda: call(aten.nonzero.default, torch.ones(4)), "depends on values"),
    ],
)
def test_op_without_strategies_is_replicated_with_a_reason(op_call: Any, why: str) -> None:
    assert (
        is_fallback(op_call())
        and len(axis_options(op_call())) == 1
        and why in why_replicated(op_call())
    )


def test_op_that_only_passes_partial_sums_counts_as_replicated() -> None:
    op_call = call(mine.backwards.default, torch.ones(8))
    assert (
        options_of(op_call) == ["R -> R", "P(sum) -> P(sum)"]
        and is_fallback(op_call)
        and "no sharding" in why_replicated(op_call)
    )


def test_op_that_aborts_on_mismatched_shapes_does_not_end_the_process() -> None:
    op_call = call(mine.crashing.default, torch.ones(8, 6), torch.ones(8, 6))
    assert options_of(op_call) == [
        "R R -> R",
        "S(0) S(0) -> S(0)",
        "S(1) S(1) -> S(1)",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    ]


def test_slow_op_is_replicated_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    op_call = call(mine.slow.default, torch.ones(8, 6))
    monkeypatch.setattr(discovery, "_LONGEST_S", 0.05)
    assert is_fallback(op_call) and "timed out" in why_replicated(op_call)


def test_experiments_do_not_change_the_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    discovery.discover(call(mine.rough_average.default, torch.ones(8, 6)))
    assert torch.equal(torch.rand(4), expected)


def test_discovered_rules_are_cached_per_torch_version(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    options = discovery.discover(op_call).options
    data = json.loads(cache.read_text())
    assert data["torch"] == torch.__version__ and len(data["rules"]) == 1
    assert discovered.load(op_call) == options[1:]
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert discovered.load(op_call) == ()


def test_cached_rules_are_verified_before_use(cache: Path) -> None:
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    right = discovery.discover(op_call).options
    wrong = json.loads(cache.read_text())
    wrong["rules"] = {key: [[["S(0)"], ["P"]], [["S(1)"], ["S(0)"]]] for key in wrong["rules"]}
    wrong["sha256"] = discovered.digest(wrong["rules"])
    cache.write_text(json.dumps(wrong))
    discovery._discover.cache_clear()
    assert discovery.discover(op_call).options == right


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rules": 3}', "\x00", "[" * 100_000, '{"format": 1e999}', "\udcff"]
)
def test_damaged_cache_file_is_ignored_with_one_warning(
    cache: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True, mode=0o700)
    cache.write_bytes(text.encode(errors="surrogateescape"))
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    assert discovered.load(op_call) == discovered.load(op_call) == ()
    assert caplog.text.count("discovered.json cannot be read") == 1
    discovery.discover(op_call)
    assert discovered.load(op_call), "the file is written again"


@pytest.mark.parametrize(
    "change",
    [lambda d: d["rules"].popitem(), lambda d: d.update(rules=[]), lambda d: d.pop("sha256")],
)
def test_edited_cache_file_is_not_read(
    cache: Path, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    discovery.discover(op_call)
    data = json.loads(cache.read_text())
    change(data)
    cache.write_text(json.dumps(data))
    assert discovered.load(op_call) == () and "it was changed after it was written" in caplog.text


@pytest.mark.parametrize(
    "entry", [3, "x", [3], [["x"]], [[["x"], [3]]], [[["?"], ["R"]]], [[], []], {"a": 1}, None]
)
def test_cache_entry_with_a_wrong_structure_is_not_read(cache: Path, entry: Any) -> None:
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    discovery.discover(op_call)
    data = json.loads(cache.read_text())
    data["rules"] = dict.fromkeys(data["rules"], entry)
    cache.write_text(json.dumps({**data, "sha256": discovered.digest(data["rules"])}))
    assert discovered.load(op_call) == ()


def test_cache_file_writable_by_others_is_not_read(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    discovery.discover(op_call)
    assert cache.parent.stat().st_mode & 0o777 == 0o700 and discovered.load(op_call)
    cache.chmod(0o666)
    assert discovered.load(op_call) == () and "other users can write" in caplog.text
    cache.chmod(0o600)
    cache.parent.chmod(0o777)
    assert discovered.path() != cache and discovered.load(op_call) == ()
    discovery._discover.cache_clear()
    discovery.discover(op_call)
    assert discovered.load(op_call), "the process uses a private folder"
    assert cache.parent.stat().st_mode & 0o777 == 0o777, "the folder does not change"


def test_cached_rules_replace_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    op_call = call(mine.rough_average.default, torch.ones(8, 6))
    known = experiment(op_call)[0]
    monkeypatch.setattr(
        "autopar.rules.discovery._proposals", lambda *_: pytest.fail("searched again")
    )
    assert experiment(op_call, known)[0] == known


def test_cache_can_be_disabled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "0")
    discovery.discover(call(mine.rough_average.default, torch.ones(8, 6)))
    assert not cache.exists()


def test_discovery_finds_all_options_of_built_in_rules() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    cases = [
        (aten.mm.default, (x, w)),
        (aten.amax.default, (x, [1])),
        (aten._softmax.default, (x, 1, False)),
        (aten.cat.default, ([x, x],)),
    ]
    for target, args in cases:
        op_call = call(target, *args)
        assert set(discovery.discover(op_call).options) >= set(axis_options(op_call)), (
            SimpleNamespace(op=target)
        )
