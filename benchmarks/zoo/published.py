"""Architectures of transformers as tiny configurations: type and head, settings, and inputs other
than labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """One architecture.

    Attributes:
        kind: ``TYPE/AutoClass`` as in `autopar.hf`.
        settings: settings of the tiny configuration; lists and nested objects as in JSON.
        seq: tokens per sample, or samples of a sound.
        masked: whether the batch has an attention mask with padding.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seq: int = 16
    masked: bool = False


_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTH = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_TEXT = {"vocab_size": 128, "max_position_embeddings": 64, **_WIDTH, **_IDS}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
_IMAGE = {**_WIDTH, "image_size": 32, "patch_size": 8}
_HALVES = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "d_model": 64,
    "decoder_start_token_id": 1,
    "vocab_size": 128,
}
_OPT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "ffn_dim": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_GPT_NEO = {
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
}
_EXPERTS = {
    "experts_implementation": "batched_mm",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
_T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "feed_forward_proj": "gated-gelu",
}
_DISTILBERT = {
    "vocab_size": 128,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 128,
    "max_position_embeddings": 64,
}
_SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 8,
}
_CONVNEXT = {
    "num_channels": 3,
    "patch_size": 4,
    "num_stages": 2,
    "hidden_sizes": [32, 64],
    "depths": [2, 2],
    "num_labels": 8,
    "image_size": 32,
}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [4, 2],
    "hidden_sizes": [32, 64],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
    "num_labels": 8,
}
_WAV2VEC2 = {
    **_WIDTH,
    "vocab_size": 32,
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "num_labels": 8,
}
_CLIP_VISION = {**_IMAGE, "projection_dim": 32, "num_labels": 8}

CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
IMAGE_CLASSES = "AutoModelForImageClassification"

PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "gpt2": Published(f"gpt2/{CAUSAL}", _GPT2 | {"bos_token_id": 0, "eos_token_id": 0}),
        "gpt_neo": Published(
            f"gpt_neo/{CAUSAL}", _GPT_NEO | {"bos_token_id": 0, "eos_token_id": 0}
        ),
        "gptj": Published(
            f"gptj/{CAUSAL}", _GPT2 | {"rotary_dim": 8, "bos_token_id": 0, "eos_token_id": 0}
        ),
        "opt": Published(f"opt/{CAUSAL}", _OPT),
        "bloom": Published(
            f"bloom/{CAUSAL}", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}
        ),
        "llama": Published(f"llama/{CAUSAL}", _GROUPED),
        "mistral": Published(f"mistral/{CAUSAL}", _GROUPED | {"sliding_window": 8}),
        "mixtral": Published(f"mixtral/{CAUSAL}", _GROUPED | _EXPERTS),
        "qwen3": Published(f"qwen3/{CAUSAL}", _GROUPED | {"head_dim": 16}),
        "gemma2": Published(
            f"gemma2/{CAUSAL}",
            _GROUPED | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
        ),
        "phi3": Published(f"phi3/{CAUSAL}", _GROUPED),
        "mamba": Published(
            f"mamba/{CAUSAL}",
            {
                "vocab_size": 128,
                "hidden_size": 64,
                "state_size": 8,
                "num_hidden_layers": 2,
                "conv_kernel": 4,
            },
        ),
        "bert": Published(f"bert/{MASKED}", _TEXT, masked=True),
        "roberta": Published(f"roberta/{MASKED}", _TEXT, masked=True),
        "distilbert": Published(f"distilbert/{MASKED}", _DISTILBERT, masked=True),
        "albert": Published(f"albert/{MASKED}", _TEXT | {"embedding_size": 32}, masked=True),
        "t5": Published(f"t5/{SEQ2SEQ}", _T5, masked=True),
        "bart": Published(
            f"bart/{SEQ2SEQ}", {**_HALVES, **_IDS, "max_position_embeddings": 64}, masked=True
        ),
        "vit": Published(f"vit/{IMAGE_CLASSES}", _IMAGE | {"num_labels": 8}),
        "swin": Published(f"swin/{IMAGE_CLASSES}", _SWIN),
        "convnext": Published(f"convnext/{IMAGE_CLASSES}", _CONVNEXT),
        "segformer": Published("segformer/AutoModelForSemanticSegmentation", _SEGFORMER),
        "resnet": Published(
            f"resnet/{IMAGE_CLASSES}",
            {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2], "num_labels": 8},
        ),
        "whisper": Published(
            "whisper/AutoModelForSpeechSeq2Seq",
            {
                **_HALVES,
                **_IDS,
                "num_mel_bins": 16,
                "max_source_positions": 32,
                "max_target_positions": 64,
            },
        ),
        "wav2vec2": Published("wav2vec2/AutoModelForAudioClassification", _WAV2VEC2, seq=480),
        "clip": Published(
            "clip/AutoModel",
            {
                "projection_dim": 32,
                "text_config": _TEXT | {"projection_dim": 32},
                "vision_config": _CLIP_VISION,
            },
        ),
        "llava": Published(
            "llava/AutoModelForImageTextToText",
            {
                "text_config": {**_GROUPED, "model_type": "llama"},
                "vision_config": {**_CLIP_VISION, "model_type": "clip_vision_model"},
                "image_token_index": 127,
                "image_seq_length": 16,
            },
            seq=24,
        ),
    }
)
