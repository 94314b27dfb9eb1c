"""Discovery: what experiments on small tensors find, what they leave alone, and what is
remembered."""

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
    """[b, s, k] × [n, k], scaled by rows: a product with a bend in one operand only."""
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
    """As many algorithms do, with a status per row that is zero where all is well."""
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
    """As kernels do that trust their operands."""
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


def shown(made: Call) -> list[str]:
    return [
        f"{' '.join(map(str, o.inputs))} -> {' '.join(map(str, o.outputs))}"
        for o in discovery.discover(made).options
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


def test_the_splits_of_an_unknown_op_are_found_by_trying() -> None:
    made = call(mine.mixture.default, torch.ones(4, 512, 64), torch.ones(96, 64), torch.ones(96))
    assert sorted(shown(made)) == sorted(MIXTURE)
    assert (
        is_discovered(made)
        and not is_fallback(made)
        and axis_options(made) == discovery.discover(made).options
    )


def test_an_average_is_no_sum() -> None:
    assert shown(call(mine.rough_average.default, torch.ones(8, 6))) == [
        "R -> R",
        "S(1) -> S(0)",
        "P(sum) -> P(sum)",
    ]


def test_maxima_and_minima_are_told_apart() -> None:
    assert shown(call(mine.extremes.default, torch.ones(8, 6))) == [
        "R -> R R",
        "S(0) -> S(0) S(0)",
        "S(1) -> P(max) P(min)",
    ]


def test_any_is_not_all() -> None:
    assert shown(call(mine.loud.default, torch.ones(8, 6))) == ["R -> R", "S(0) -> S(0)"]


def test_a_result_that_is_always_the_same_can_only_be_split() -> None:
    assert shown(call(mine.checked.default, torch.ones(8, 6))) == ["R -> R R", "S(0) -> S(0) S(0)"]


def test_a_partial_sum_does_not_pass_where_a_cast_would_round_it() -> None:
    found = shown(call(mine.rough_average.default, torch.ones(8, 6, dtype=torch.bfloat16)))
    assert found == [
        "R -> R",
        "S(1) -> S(0)",
        "P(sum) -> P(sum)",
    ]  # its own dtype: as good as anywhere
    narrow = call(mine.rough_average.default, torch.ones(8, 6))
    narrow = Call(
        narrow.target,
        narrow.args,
        narrow.kwargs,
        narrow.inputs,
        (type(narrow.outputs[0])((6,), torch.bfloat16),),
    )
    assert shown(narrow) == ["R -> R", "S(1) -> S(0)"]


def test_settings_that_are_sizes_are_found_in_the_small() -> None:
    assert shown(call(mine.headed.default, torch.ones(64, 512, 256), 8)) == [
        "R -> R",
        "S(0) -> S(0)",
        "S(1) -> S(1)",
    ]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: call(mine.noise.default, torch.ones(4, 6)), "differ between two runs"),
        (lambda: call(mine.constant.default, torch.ones(4, 6)), "does not depend on its operands"),
        (lambda: call(mine.whole.default, torch.ones(6, 4)), "no sharding"),
        (lambda: call(aten.add_.Tensor, torch.ones(4), torch.ones(4)), "modifies its operands"),
        (lambda: call(aten.rand_like.default, torch.ones(4)), "random"),
        (lambda: call(aten.nonzero.default, torch.ones(4)), "depends on values"),
    ],
)
def test_what_cannot_be_split_is_replicated_and_says_why(made: Any, why: str) -> None:
    assert is_fallback(made()) and len(axis_options(made())) == 1 and why in why_replicated(made())


def test_an_op_that_only_passes_partial_sums_is_replicated_all_the_same() -> None:
    made = call(mine.backwards.default, torch.ones(8))
    assert (
        shown(made) == ["R -> R", "P(sum) -> P(sum)"]
        and is_fallback(made)
        and "no sharding" in why_replicated(made)
    )


def test_an_op_that_kills_the_process_on_parts_that_do_not_belong_together_does_not_kill_ours() -> (
    None
):
    made = call(mine.crashing.default, torch.ones(8, 6), torch.ones(8, 6))
    assert shown(made) == [
        "R R -> R",
        "S(0) S(0) -> S(0)",
        "S(1) S(1) -> S(1)",
        "P(sum) R -> P(sum)",
        "R P(sum) -> P(sum)",
    ]


def test_an_op_that_takes_too_long_is_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(mine.slow.default, torch.ones(8, 6))
    monkeypatch.setattr(discovery, "_LONGEST_S", 0.05)
    assert is_fallback(made) and "timed out" in why_replicated(made)


def test_experiments_leave_the_random_numbers_of_the_user_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    discovery.discover(call(mine.rough_average.default, torch.ones(8, 6)))
    assert torch.equal(torch.rand(4), expected)


def test_what_was_found_is_remembered_for_this_torch(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = call(mine.rough_average.default, torch.ones(8, 6))
    found = discovery.discover(made).options
    data = json.loads(cache.read_text())
    assert data["torch"] == torch.__version__ and len(data["rules"]) == 1
    assert discovered.load(made) == found[1:]
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert discovered.load(made) == ()


def test_what_is_remembered_is_tried_again_and_never_trusted(cache: Path) -> None:
    made = call(mine.rough_average.default, torch.ones(8, 6))
    right = discovery.discover(made).options
    wrong = json.loads(cache.read_text())
    wrong["rules"] = {key: [[["S(0)"], ["P"]], [["S(1)"], ["S(0)"]]] for key in wrong["rules"]}
    wrong["sha256"] = discovered.digest(wrong["rules"])
    cache.write_text(json.dumps(wrong))
    discovery._discover.cache_clear()
    assert discovery.discover(made).options == right


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rules": 3}', "\x00", "[" * 100_000, '{"format": 1e999}', "\udcff"]
)
def test_a_damaged_file_is_as_good_as_none(
    cache: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True, mode=0o700)
    cache.write_bytes(text.encode(errors="surrogateescape"))
    made = call(mine.rough_average.default, torch.ones(8, 6))
    assert discovered.load(made) == discovered.load(made) == ()
    assert caplog.text.count("discovered.json cannot be read") == 1
    discovery.discover(made)
    assert discovered.load(made), "it is written anew"


@pytest.mark.parametrize(
    "change",
    [lambda d: d["rules"].popitem(), lambda d: d.update(rules=[]), lambda d: d.pop("sha256")],
)
def test_entries_that_were_edited_are_not_read(
    cache: Path, change: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = call(mine.rough_average.default, torch.ones(8, 6))
    discovery.discover(made)
    data = json.loads(cache.read_text())
    change(data)
    cache.write_text(json.dumps(data))
    assert discovered.load(made) == () and "it was changed after it was written" in caplog.text


@pytest.mark.parametrize(
    "entry", [3, "x", [3], [["x"]], [[["x"], [3]]], [[["?"], ["R"]]], [[], []], {"a": 1}, None]
)
def test_an_entry_of_another_form_is_not_read(cache: Path, entry: Any) -> None:
    made = call(mine.rough_average.default, torch.ones(8, 6))
    discovery.discover(made)
    data = json.loads(cache.read_text())
    data["rules"] = dict.fromkeys(data["rules"], entry)
    cache.write_text(json.dumps({**data, "sha256": discovered.digest(data["rules"])}))
    assert discovered.load(made) == ()


def test_a_file_that_another_user_can_write_is_not_read(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = call(mine.rough_average.default, torch.ones(8, 6))
    discovery.discover(made)
    assert cache.parent.stat().st_mode & 0o777 == 0o700 and discovered.load(made)
    cache.chmod(0o666)
    assert discovered.load(made) == () and "other users can write" in caplog.text
    cache.chmod(0o600)
    cache.parent.chmod(0o777)
    assert discovered.path() != cache and discovered.load(made) == ()
    discovery._discover.cache_clear()
    discovery.discover(made)
    assert discovered.load(made), "this process remembers what it found"
    assert cache.parent.stat().st_mode & 0o777 == 0o777, "the folder is left as it is"


def test_what_is_remembered_spares_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(mine.rough_average.default, torch.ones(8, 6))
    known = experiment(made)[0]
    monkeypatch.setattr(
        "autopar.rules.discovery._proposals", lambda *_: pytest.fail("searched again")
    )
    assert experiment(made, known)[0] == known


def test_the_cache_can_be_turned_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "0")
    discovery.discover(call(mine.rough_average.default, torch.ones(8, 6)))
    assert not cache.exists()


def test_without_their_rows_ops_of_the_table_get_the_same_options() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    cases = [
        (aten.mm.default, (x, w)),
        (aten.amax.default, (x, [1])),
        (aten._softmax.default, (x, 1, False)),
        (aten.cat.default, ([x, x],)),
    ]
    for target, args in cases:
        made = call(target, *args)
        assert set(discovery.discover(made).options) >= set(axis_options(made)), SimpleNamespace(
            op=target
        )
