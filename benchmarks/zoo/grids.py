"""Tiny models of transformers that read sizes of images from an input, with a batch of text and two
images of the same size per sample.

``python -m benchmarks.parity --module benchmarks/zoo/grids.py:qwen3_vl`` checks one. Positions are
passed, as in the training of Qwen and GLM. Positions that a model derives from the kinds of its
tokens would depend on where images begin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

SAMPLES, LENGTH, MARK, VIDEO, BEGIN, END = 4, 24, 5, 6, 7, 8
Built = tuple[nn.Module, dict[str, Any]]

_TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_GRID = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 64,
}
_SIDES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


def qwen2_vl() -> Built:
    vision = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 4,
        "patch_size": 4,
        "mlp_ratio": 2,
    }
    return _by_grid("qwen2_vl", "qwen2_vl_text", vision)


def qwen2_5_vl() -> Built:
    return _by_grid(
        "qwen2_5_vl", "qwen2_5_vl_text", {**_GRID, "window_size": 16, "fullatt_block_indexes": [1]}
    )


def qwen3_vl() -> Built:
    return _by_grid(
        "qwen3_vl",
        "qwen3_vl_text",
        {**_GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    )


def qwen3_vl_moe() -> Built:
    vision = {**_GRID, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return _by_grid("qwen3_vl_moe", "qwen3_vl_moe_text", vision, **_EXPERTS)


def qwen3_5() -> Built:
    return _by_grid("qwen3_5", "qwen3_5_text", {**_GRID, "num_position_embeddings": 64}, **_LINEAR)


def glm4v() -> Built:
    return _by_grid("glm4v", "glm4v_text", {**_GRID, "image_size": 16})


def llava_pixtral() -> Built:
    whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return _by_size(
        "llava", "mistral", {**_SIDES, "model_type": "pixtral", "head_dim": 16}, 16, **whole
    )


def mistral3() -> Built:
    return _by_size(
        "mistral3",
        "mistral",
        {**_SIDES, "model_type": "pixtral", "head_dim": 16},
        4,
        spatial_merge_size=2,
    )


def llava_next() -> Built:
    return _by_size(
        "llava_next",
        "llama",
        {**_SIDES, "model_type": "clip_vision_model"},
        36,
        image_grid_pinpoints=[[32, 32]],
    )


def llava_onevision() -> Built:
    return _by_size(
        "llava_onevision",
        "qwen2",
        {**_SIDES, "model_type": "siglip_vision_model"},
        36,
        image_grid_pinpoints=[[32, 32]],
    )


def _by_grid(kind: str, text: str, vision: dict[str, Any], **more: Any) -> Built:
    """Return a model and a batch of images as patches of 4 × 4, with four patches per token, and
    their sizes in patches."""
    marks = {
        "image_token_id": MARK,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
    }
    if kind == "glm4v":
        marks |= {"image_start_token_id": BEGIN, "image_end_token_id": END}
    model = _built(
        kind, {**_TEXT, "model_type": text, "rope_parameters": _ROPE, **more}, vision, **marks
    )
    ids = torch.randint(10, 128, (SAMPLES, LENGTH))
    for first in (0, 10):
        ids[:, first], ids[:, first + 1 : first + 5], ids[:, first + 5] = BEGIN, MARK, END
    sizes, kinds = torch.tensor([[1, 4, 4]] * 2 * SAMPLES), (ids == MARK).int()
    positions = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=sizes)[0]
    patches = torch.randn(2 * SAMPLES * 16, 3 * 2 * 4 * 4)
    return model, {
        "input_ids": ids,
        "pixel_values": patches,
        "image_grid_thw": sizes,
        "position_ids": positions,
        "labels": ids.clone(),
    }


def _by_size(kind: str, text: str, vision: dict[str, Any], num_tokens: int, **more: Any) -> Built:
    """Return a model and a batch with an image of 32 × 32 per sample, twice if it is split into
    parts, and its size in pixels."""
    model = _built(kind, {**_TEXT, "model_type": text}, vision, image_token_index=MARK, **more)
    ids = torch.randint(10, 128, (SAMPLES, num_tokens + 8))
    ids[:, 1 : 1 + num_tokens] = MARK
    parts = (2,) if "image_grid_pinpoints" in more else ()
    pixels = torch.randn(SAMPLES, *parts, 3, 32, 32)
    return model, {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_sizes": torch.tensor([[32, 32]] * SAMPLES),
        "labels": ids.clone(),
    }


def _built(kind: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **more)
    model: nn.Module = AutoModelForImageTextToText.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # zeros would hide lost values
                parameter.normal_(std=0.02)
    return model
