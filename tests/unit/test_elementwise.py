"""Score functions as text: the coordinates that they read are recognized, and only ATen ops that
compute are called.
"""

from __future__ import annotations

import pytest
import torch
from flex import FLEX_KINDS, flex_functions

from autopar.capture.dynamo.flex_attention import flex_attention_eager
from autopar.ops import flex as kernels
from autopar.ops.flex import Scoring, attend, attend_backward
from autopar.ops.score_functions import (
    SEEN,
    UnwritableError,
    find_reading,
    module_of,
    promoted_text,
    read_function,
)
from autopar.ops.softmax_attention import Saved

SIZES = (2, 4, 6, 6)


def reading_of(kind: str) -> tuple[dict[int, tuple[str | None, ...]], frozenset[str]]:
    score, mask, captured = flex_functions(kind, *SIZES)
    found = find_reading((score, mask), tuple(x.dim() for x in captured))
    return dict(found.indexed), found.free


@pytest.mark.parametrize(
    ("kind", "indexed", "free"),
    [
        ("causal", {}, {"q", "k"}),
        ("documents", {0: ("b", "q"), 1: ("b", None)}, {"k"}),
        ("one tensor of documents", {0: ("b", None)}, {"q", "k"}),
        ("alibi", {0: ("h",)}, {"q", "k"}),
        ("bias of all", {0: ("b", "h", "q", None)}, {"k"}),
        ("a dim read in two ways", {0: (None, "h")}, {"b"}),
        ("heads in groups", {0: (None,)}, {"h"}),
        ("casts", {0: ("h", "q")}, {"q", "k"}),
        ("learnt cap", {0: ()}, set()),
    ],
)
def test_a_dim_is_indexed_by_a_coordinate_if_all_its_uses_are(
    kind: str, indexed: object, free: set[str]
) -> None:
    assert reading_of(kind) == (indexed, frozenset(free))


def test_all_masks_that_hide_nothing_have_the_same_text() -> None:
    assert flex_functions("nothing", *SIZES)[1] == SEEN


@pytest.mark.parametrize(
    "name", ["add_.Tensor", "rand.default", "no_such_op.default", "index.Nothing"]
)
def test_a_text_that_calls_other_ops_is_refused(name: str) -> None:
    text = SEEN.replace("full.default", name)
    with pytest.raises(UnwritableError, match=name.split(".")[0]):
        read_function(text)


def test_dtypes_in_a_function_are_promoted_and_other_text_is_unchanged() -> None:
    text = (
        '{"does":[["_to_copy.default",[{"c":"q"}],{"dtype":{"dtype":"float32"}}]],"gives":{"v":0}}'
    )
    made = promoted_text(text, torch.float64)
    assert module_of(made, ("q",), 0)(torch.tensor(3)).dtype == torch.float64
    assert (
        promoted_text("abc,dc->abd", torch.float64) == "abc,dc->abd"
        and promoted_text(SEEN, torch.float64) == SEEN
    )


@pytest.mark.parametrize("kind", FLEX_KINDS)
def test_flex_attention_of_torch_with_the_functions_of_a_shard_gives_the_same_result(
    kind: str,
) -> None:
    """Test the code that runs on a GPU with the dense reference of torch instead of its kernels."""
    torch.manual_seed(0)
    b, h, s, t = SIZES
    score, mask, captured = flex_functions(kind, 2 * b, 2 * h, 2 * s, t)
    how = Scoring(captured, score, mask, 0.5, (b, h, s), ())
    q, k, v = (torch.randn(b, n, m, 4).double() for n, m in ((h, s), (2, t), (2, t)))
    wanted = [number for number, x in enumerate(captured) if x.is_floating_point()]
    out, lse = attend(q, k, v, how)
    grads = torch.randn_like(out), torch.randn_like(lse)
    seen = torch.isfinite(lse)
    with flex_attention_eager():
        expected = kernels._by_torch(q, k, v, captured, how)
        given = [*grads] if seen.all() else [grads[0], None]
        due = kernels._backward_by_torch(q, k, v, *given, wanted, how)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)
    made = attend_backward(Saved(q, k, v, out, lse), *given, wanted, how)
    torch.testing.assert_close(made, due, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", FLEX_KINDS)
def test_results_do_not_depend_on_the_block_size(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    b, h, s, t = SIZES
    score, mask, captured = flex_functions(kind, *SIZES)
    how = Scoring(captured, score, mask, 0.5, (0, 0, 0), ())
    q, k, v = (
        torch.randn(b, h, s, 4).double(),
        torch.randn(b, 2, t, 4).double(),
        torch.randn(b, 2, t, 3).double(),
    )
    wanted = [number for number, x in enumerate(captured) if x.is_floating_point()]

    def both() -> list[torch.Tensor]:
        out, lse = attend(q, k, v, how)
        return [
            out,
            lse,
            *attend_backward(
                Saved(q, k, v, out, lse),
                torch.ones_like(out),
                torch.ones_like(lse).mul_(0.1),
                wanted,
                how,
            ),
        ]

    expected = both()
    for most in (1, 2 * h * t, h * s * t):
        monkeypatch.setattr("autopar.ops.flex._BLOCK", most)
        monkeypatch.setattr("autopar.ops.flex._ROWS", 1)
        for made, due in zip(both(), expected, strict=True):
            torch.testing.assert_close(made, due, rtol=1e-12, atol=1e-12)
