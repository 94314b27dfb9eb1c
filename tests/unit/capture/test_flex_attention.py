"""flex_attention is captured as one op with its functions as text. Unsupported options are refused
by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flex import KINDS, Attention, batch_of, model_of
from torch import Tensor, nn
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import ops
from autopar.capture import Trace, capture
from autopar.capture.dynamo.flex_attention import flex_attention_eager
from autopar.capture.execute import execute
from autopar.errors import CaptureError

CALLS = (ops.flex_attention, ops.flex_attention_backward)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def calls_of(trace: Trace) -> list[Any]:
    return [node for node in trace.graph.nodes if node.target in CALLS]


def assert_alike(
    model: nn.Module, batch: dict[str, Tensor], trace: Trace, tolerance: float = 1e-10
) -> None:
    """Assert that outputs and gradients equal the dense reference of torch."""
    with flex_attention_eager():
        loss = model(**batch)
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
    named = dict(model.named_parameters(remove_duplicate=False))
    inputs = [batch[i.path] for i in trace.inputs]
    outputs, gradients, _ = execute(trace, named, dict(model.named_buffers()), inputs)
    assert trace.loss is not None
    torch.testing.assert_close(
        outputs[[o.is_loss for o in trace.outputs].index(True)],
        loss.detach(),
        rtol=tolerance,
        atol=tolerance,
    )
    for name, gradient in gradients.items():
        expected = named[name].grad
        torch.testing.assert_close(
            gradient,
            torch.zeros_like(gradient) if expected is None else expected,
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_function_is_one_op_with_the_results_of_the_torch_reference(kind: str) -> None:
    model, batch = model_of(kind, 1), batch_of()
    trace = capture(model, (), batch)
    assert [node.target for node in calls_of(trace)] == list(CALLS)
    assert all(
        json.loads(text)["does"] is not None
        for node in calls_of(trace)
        for text in node.args
        if isinstance(text, str)
    )
    assert_alike(model, batch, trace)


def test_block_masks_leave_no_ops_in_the_graph() -> None:
    trace = capture(model_of("documents", 1), (), batch_of())
    assert not [
        n
        for n in trace.graph.nodes
        if any(word in str(n.target) for word in ("sort", "vmap", "arange", "cumsum"))
    ]


class Compiled(Attention):
    """A model that calls the compiled function, as users do."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in (self.query(x),) * 3)
        return torch.compile(flex_attention)(q, k, v, block_mask=self.made).square().mean()


def test_a_compiled_call_is_captured() -> None:
    model, batch = Compiled("causal").double(), batch_of()
    trace = capture(model, (), batch)
    assert len(calls_of(trace)) == 2
    assert_alike(model, batch, trace)


class Checkpointed(Attention):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, ids, use_reentrant=False)
        return out.square().mean()


def test_a_checkpointed_call_is_captured() -> None:
    torch.manual_seed(0)
    model, batch = Checkpointed("mask of init").double(), batch_of()
    trace = capture(model, (), batch)
    assert calls_of(trace)
    assert_alike(model, batch, trace)


@pytest.mark.parametrize("packed", [False, True])
def test_a_transformers_model_is_captured_without_a_compiler(packed: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=16,
        attn_implementation="flex_attention",
    )
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config).double(), torch.randint(0, 16, (2, 128))
    batch = {"input_ids": ids, "labels": ids}
    if packed:
        batch["attention_mask"] = (torch.arange(128) < torch.tensor([[100], [128]])).long()
    trace = capture(model, (), batch)
    assert len(calls_of(trace)) == 2
    assert_alike(model, batch, trace, tolerance=1e-6)  # the model computes norms in float32


Settings = Callable[[Tensor], dict[str, Any]]
REFUSED: dict[str, tuple[Settings, str]] = {
    "max scores": (lambda x: {"return_aux": AuxRequest(max_scores=True)}, "max_scores"),
    "an option that changes results": (
        lambda x: {"kernel_options": {"PRESCALE_QK": True}},
        "PRESCALE_QK",
    ),
    "an option of forward": (
        lambda x: {"kernel_options": {"fwd_ROWS_GUARANTEED_SAFE": True}},
        "ROWS_GUARANTEED_SAFE",
    ),
    "blocks without a function": (
        lambda x: {"block_mask": BlockMask.from_kv_blocks(*blocks(), BLOCK_SIZE=8)},
        "hides nothing",
    ),
    "random numbers": (
        lambda x: {"score_mod": lambda s, b, h, q, k: s + torch.rand_like(s)},
        "rand",
    ),
    "numbers of its own": (
        lambda x: {"score_mod": lambda s, b, h, q, k: s + torch.tensor([1.0, 2.0])[h % 2]},
        "from constants",
    ),
}


def blocks() -> tuple[Tensor, Tensor]:
    return torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)


class Refused(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.qkv = name, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        settings = REFUSED[self.name][0](x) if self.name else {}
        found = flex_attention(q, k, v, **settings)
        return (found if isinstance(found, Tensor) else found[0]).square().mean()


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_options_are_refused_with_the_line_and_a_remedy(name: str) -> None:
    with pytest.raises(CaptureError, match=r"torch\.nn\.attention\.flex_attention") as caught:
        capture(Refused(name), (torch.randn(2, 16, 32),), {})
    assert REFUSED[name][1] in str(caught.value) and "test_flex_attention.py" in str(caught.value)
    assert "scaled_dot_product_attention" in str(caught.value)


class Paged(Refused):
    def forward(self, x: Tensor) -> Tensor:
        mask = create_block_mask(causal, None, None, 16, 16, device="cpu")
        pages = PagedAttention(4, 8, 2, device="cpu")
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return (
            flex_attention(q, k, v, block_mask=pages.convert_logical_block_mask(mask))
            .square()
            .mean()
        )


def test_a_paged_cache_is_refused() -> None:
    with pytest.raises(CaptureError, match="paged cache"):
        capture(Paged(""), (torch.randn(2, 16, 32),), {})


def test_tuning_options_do_not_change_the_op() -> None:
    REFUSED["tuned"] = (lambda x: {"kernel_options": {"BLOCK_M": 32, "num_warps": 4}}, "")
    try:
        tuned, plain = (
            calls_of(capture(Refused(name), (torch.randn(2, 16, 32),), {}))
            for name in ("tuned", "")
        )
    finally:
        del REFUSED["tuned"]
    settings = [
        [[x for x in node.args if isinstance(x, str | float)] for node in nodes]
        for nodes in (tuned, plain)
    ]
    assert settings[0] == settings[1] and all(map(len, settings[0]))


@pytest.mark.parametrize("window", [None, 4], ids=["causal", "sliding window"])
def test_padded_batches_of_transformers_models_are_captured_for_every_mask(
    window: int | None,
) -> None:
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "sliding_window": window,
    }

    def model(attention: str) -> Any:
        config = transformers.MistralConfig(**settings, attn_implementation=attention)
        return transformers.MistralForCausalLM._from_config(config)

    flex, plain = model("flex_attention"), model("sdpa")
    plain.load_state_dict(flex.state_dict())
    ids = torch.arange(64).reshape(4, 16) % 32
    padded = torch.ones(4, 16, dtype=torch.int64)
    padded[1, -5:] = 0
    padded[2, :3] = 0
    masks = (padded, padded.roll(1, 0), torch.ones_like(padded))
    batch = {"input_ids": ids, "attention_mask": masks[0], "labels": ids}
    trace = capture(flex, (), batch)
    for mask in masks:
        inputs = list({**batch, "attention_mask": mask}.values())
        (loss, *_), _, _ = execute(
            trace, dict(flex.named_parameters()), dict(flex.named_buffers()), inputs
        )
        wanted = plain(**{**batch, "attention_mask": mask}).loss
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    plan = autopar.plan(flex, autopar.Mesh({"gpu": 2}), example_inputs=batch, hardware="cpu-gloo")
    assert plan.entries
