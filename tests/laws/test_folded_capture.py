"""Folded capture equals full capture node for node on many architectures, and gives the same
plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from same_trace import assert_same_trace

from autopar import hf
from autopar.capture import capture, execute
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import PlanOptions, make_plan

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
DECODER = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 7}
ENCODER = {**SIZES, "num_hidden_layers": 7}
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 7,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SEQ2SEQ = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0}
BART = {
    f"{part}_{name}": n
    for part in ("encoder", "decoder")
    for name, n in (("layers", 7), ("ffn_dim", 48), ("attention_heads", 4))
}
DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "n_group": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
}

# Type or type/head, settings, description of the folding.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", DECODER, "7 layers of model.layers"),
    "gpt2": ("gpt2", GPT2, "7 layers of transformer.h"),
    "gpt2 with dropout": (
        "gpt2",
        {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        "7 layers of transformer.h",
    ),
    "bert": ("bert/AutoModelForMaskedLM", ENCODER, "7 layers of bert.encoder.layer"),
    "vit": (
        "vit/AutoModelForImageClassification",
        {
            **{name: ENCODER[name] for name in ENCODER if name != "vocab_size"},
            "image_size": 16,
            "patch_size": 8,
        },
        "7 layers of vit.layers",
    ),
    "qwen3": ("qwen3", {**DECODER, "head_dim": 8}, "7 layers of model.layers"),
    "qwen3, half with a window": (
        "qwen3",
        {
            **DECODER,
            "num_hidden_layers": 13,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 6,
        },
        "6 layers of model.layers; 7 layers of model.layers",
    ),
    "mixtral": (
        "mixtral",
        {**DECODER, "num_local_experts": 4, "experts_implementation": "grouped_mm"},
        "7 layers of model.layers",
    ),
    "gemma2": (
        "gemma2",
        {**DECODER, "num_hidden_layers": 11, "head_dim": 8},
        "10 layers of model.layers, 2 alternating kinds",
    ),
    "gemma3": (
        "gemma3_text",
        {
            **DECODER,
            "num_hidden_layers": 16,
            "head_dim": 8,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 5
            + ["full_attention"],
        },
        "15 layers of model.layers, 3 alternating kinds",
    ),
    "t5": (
        "t5/AutoModelForSeq2SeqLM",
        {
            **SEQ2SEQ,
            "num_layers": 7,
            "num_decoder_layers": 8,
            "d_kv": 8,
            "d_ff": 48,
            "num_heads": 4,
        },
        "6 layers of encoder.block; 7 layers of decoder.block",
    ),
    "bart": (
        "bart/AutoModelForSeq2SeqLM",
        {**SEQ2SEQ, **BART},
        "7 layers of model.encoder.layers; 7 layers of model.decoder.layers",
    ),
    "gpt neo": (
        "gpt_neo",
        {
            "hidden_size": 32,
            "num_heads": 4,
            "vocab_size": 64,
            "num_layers": 12,
            "attention_types": [[["global", "local"], 6]],
        },
        "12 layers of transformer.h, 2 alternating kinds",
    ),
    "bloom": (
        "bloom",
        {"hidden_size": 32, "n_head": 4, "vocab_size": 64, "n_layer": 7},
        "7 layers of transformer.h",
    ),
    "mamba": (
        "mamba",
        {"hidden_size": 32, "state_size": 4, "vocab_size": 64, "num_hidden_layers": 6},
        "6 layers of backbone.layers",
    ),
    "deepseek": ("deepseek_v3", {**DECODER, **DEEPSEEK}, "6 layers of model.layers"),
    "resnet": (
        "resnet/AutoModelForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [8, 2], "layer_type": "basic"},
        "layers of resnet.encoder.stages.0.layers",
    ),
    "swin": (
        "swin/AutoModelForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 12],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "12 layers of swin.encoder.layers.1.blocks, 2 alternating kinds",
    ),
    "albert": (
        "albert/AutoModelForMaskedLM",
        {**ENCODER, "embedding_size": 16},
        "in full: no list of modules is long enough to fold",
    ),
    "gpt2 with scaling by layer": (
        "gpt2",
        {**GPT2, "scale_attn_by_inverse_layer_idx": True},
        "in full: layers 5 and 6 of transformer.h differ",
    ),
}
FAST = ("gpt2 with dropout",)


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Replace the fixture that shares captures between tests, so that each model is traced."""


def build(name: str, **how: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    kind, settings, _ = MODELS[name]
    return hf.build(f"{kind}:{json.dumps(settings)}", batch=4, seq=8, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_a_folded_capture_equals_a_full_capture_node_for_node(name: str) -> None:
    model, batch = build(name)
    folded = capture(model, (), batch)
    assert MODELS[name][2] in str(folded.folding)
    assert bool(folded.folding.runs) == ("in full" not in MODELS[name][2])
    assert_same_trace(folded, capture(model, (), batch, fold=False))


@pytest.mark.slow
def test_a_folded_trace_matches_the_model_and_gives_the_plan_of_a_full_trace() -> None:
    model, batch = build("llama", device="cpu")
    traces = [capture(model, (), batch, fold=fold) for fold in (True, False)]
    values = dict(model.named_parameters()), dict(model.named_buffers()), list(batch.values())
    (loss, *_), gradients, _ = execute(traces[0], *values)
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    profile, mesh = HardwareProfile.load("h100-sxm"), Mesh.parse("node=2,gpu=2")
    plans = [make_plan(trace, mesh, profile, PlanOptions()).plan for trace in traces]
    assert traces[0].folding.runs and not traces[1].folding.runs
    assert "folded: " in plans[0].capture and "in full" in plans[1].capture
    assert replace(plans[0], capture="").dumps() == replace(plans[1], capture="").dumps()


@pytest.mark.slow
def test_a_deep_published_model_is_folded() -> None:
    model, batch = hf.build("llama3-70b", dtype=torch.bfloat16, batch=2, seq=4096)
    folded = capture(model, (), batch)
    assert str(folded.folding) == "folded: 80 layers of model.layers"
    assert_same_trace(folded, capture(model, (), batch, fold=False))
