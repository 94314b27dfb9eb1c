"""A key/value cache as an argument is refused, and the remedy of the error works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError

transformers = pytest.importorskip("transformers")

IDS = torch.arange(32).reshape(4, 8) % 7


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32,
        n_head=4,
        n_layer=2,
        vocab_size=64,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def empty(model: nn.Module) -> Any:
    return transformers.DynamicCache()


def filled(model: nn.Module) -> Any:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=True).past_key_values


def pairs(model: nn.Module) -> Any:
    """Return a cache in the format of older releases."""
    return tuple((torch.randn(4, 2, 8, 8), torch.randn(4, 2, 8, 8)) for _ in range(2))


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("cache", [empty, filled, pairs])
@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_is_refused_by_name(
    build: Callable[[], nn.Module], cache: Callable[[nn.Module], Any], inference: bool
) -> None:
    model = build()
    batch = {"input_ids": IDS, "labels": IDS, "past_key_values": cache(model)}
    with pytest.raises(CaptureError, match="'past_key_values' is a key/value cache") as refusal:
        capture(model, (), batch, inference=inference)
    assert "do not pass past_key_values; pass the whole sequence" in refusal.value.remedy


@pytest.mark.parametrize("build", [llama, gpt2])
def test_the_whole_sequence_without_a_cache_gives_the_results_with_the_cache(
    build: Callable[[], nn.Module],
) -> None:
    model = build().eval()
    with torch.no_grad():
        expected = model(input_ids=IDS, past_key_values=filled(model)).logits
    whole = torch.cat([IDS, IDS], 1)
    plan = autopar.plan(
        model, 2, example_inputs={"input_ids": whole}, hardware="h100-sxm", inference=True
    )
    assert autopar.verify(plan, model, {"input_ids": whole}).ok
    with torch.no_grad():
        torch.testing.assert_close(
            model(input_ids=whole).logits[:, 8:], expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, gpt2])
def test_use_cache_is_accepted_and_the_plan_matches_the_model(
    build: Callable[[], nn.Module],
) -> None:
    batch = {"input_ids": IDS, "labels": IDS, "use_cache": True}
    plan = autopar.plan(build(), 2, example_inputs=batch, hardware="h100-sxm")
    report = autopar.verify(plan, build(), batch)
    assert report.ok, str(report)


class Own(nn.Module):
    """A custom model with a `past_key_values` argument that is not a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, past_key_values: Tensor) -> Tensor:
        return (self.linear(x) + past_key_values).square().mean()  # type: ignore[no-any-return]


def test_past_key_values_that_is_not_a_cache_is_an_input() -> None:
    trace = capture(Own(), (), {"x": torch.randn(4, 8), "past_key_values": torch.randn(4, 8)})
    assert len(trace.inputs) == 2
