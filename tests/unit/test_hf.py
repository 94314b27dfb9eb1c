"""Models by name: configurations, heads, known sizes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from autopar import hf
from autopar.errors import AutoparError

TINY = (
    '{"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,'
    ' "vocab_size": 96}'
)


def test_a_configuration_becomes_a_model_on_meta_with_a_batch_that_has_labels() -> None:
    model, batch = hf.build(f"llama:{TINY}", dtype=torch.bfloat16, batch=3, seq=7)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (3, 7),
        "labels": (3, 7),
    }
    assert model.training


def test_weights_and_batch_depend_on_the_seed_and_not_on_the_global_generator() -> None:
    state = torch.get_rng_state()
    (a, x), (b, y), (c, _) = (
        hf.build(
            'gpt2:{"n_layer": 1, "n_embd": 16, "n_head": 2}', device="cpu", batch=2, seq=4, seed=s
        )
        for s in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.transformer.wte.weight, b.transformer.wte.weight) and torch.equal(
        x["input_ids"], y["input_ids"]
    )
    assert not torch.equal(a.transformer.wte.weight, c.transformer.wte.weight)
    assert a(**x).loss.isfinite()


def test_dropout_is_0_unless_the_settings_say_otherwise() -> None:
    assert hf.build("gpt2:{}")[0].config.resid_pdrop == 0.0
    assert hf.build('gpt2:{"resid_pdrop": 0.25}')[0].config.resid_pdrop == 0.25


@pytest.mark.parametrize("kind", ["data2vec-audio", "wav2vec2"])
def test_audio_inputs_are_not_masked_at_random(kind: str) -> None:
    config = hf.build(f"{kind}/AutoModelForAudioClassification:{{}}", seq=800)[0].config
    assert config.mask_time_prob == config.mask_feature_prob == 0.0
    asked = hf.build(f'{kind}/AutoModelForAudioClassification:{{"mask_time_prob": 0.25}}', seq=800)[
        0
    ].config
    assert asked.mask_time_prob == 0.25


def test_dropouts_in_lists_and_in_nested_configurations_are_0_too() -> None:
    config = hf.build("cvt/AutoModelForImageClassification:{}")[0].config
    assert config.drop_path_rate == config.drop_rate == [0.0, 0.0, 0.0]
    nested = hf.build(
        'clip/AutoModel:{"vision_config": {"attention_dropout": 0.5}}', dropout=0.25, seq=8
    )[0].config
    assert (nested.vision_config.attention_dropout, nested.text_config.attention_dropout) == (
        0.5,
        0.25,
    )


@pytest.mark.parametrize(
    ("spec", "inputs"),
    [
        (
            "siglip/AutoModel:{}",
            {"input_ids": (2, 8), "pixel_values": (2, 3, 224, 224), "return_loss": None},
        ),
        ("whisper:{}", {"input_features": (2, 80, 3000), "labels": (2, 8)}),
        ("hubert/AutoModelForAudioClassification:{}", {"input_values": (2, 8), "labels": (2,)}),
        (
            "audio-spectrogram-transformer/AutoModelForAudioClassification:{}",
            {"input_values": (2, 1024, 128), "labels": (2,)},
        ),
        (
            "segformer/AutoModelForSemanticSegmentation:{}",
            {"pixel_values": (2, 3, 64, 64), "labels": (2, 64, 64)},
        ),
        (
            "blip/AutoModelForImageTextToText:{}",
            {"pixel_values": (2, 3, 384, 384), "input_ids": (2, 8), "labels": (2, 8)},
        ),
        ("moonshine:{}", {"input_values": (2, 8), "labels": (2, 1)}),
        ("hubert/AutoModelForCTC:{}", {"input_values": (2, 8), "labels": (2, 2)}),
        ("speech_to_text:{}", {"input_features": (2, 8, 80), "labels": (2, 8)}),
        (
            "deit/AutoModelForImageClassification:{}",
            {"pixel_values": (2, 3, 224, 224), "labels": (2,)},
        ),
        ("canine/AutoModelForSequenceClassification:{}", {"input_ids": (2, 8), "labels": (2,)}),
        (
            "bert/AutoModelForQuestionAnswering:{}",
            {"input_ids": (2, 8), "start_positions": (2,), "end_positions": (2,)},
        ),
        ("qwen3_5_text/AutoModel:{}", {"input_ids": (2, 8)}),
        ("yolos/AutoModelForObjectDetection:{}", {"pixel_values": (2, 3, 512, 864)}),
        (
            'depth_anything/AutoModelForDepthEstimation:{"patch_size": 8}',
            {"pixel_values": (2, 3, 64, 64)},
        ),
        (
            "videomae/AutoModelForVideoClassification:{}",
            {"pixel_values": (2, 16, 3, 224, 224), "labels": (2,)},
        ),
        (
            "vjepa2/AutoModelForVideoClassification:{}",
            {"pixel_values_videos": (2, 64, 3, 256, 256), "labels": (2,)},
        ),
        (
            'perceiver/AutoModelForMaskedLM:{"max_position_embeddings": 8}',
            {"inputs": (2, 8), "labels": (2, 8)},
        ),
        ("parakeet_encoder/AutoModel:{}", {"input_features": (2, 8, 80)}),
        ("speecht5/AutoModelForTextToSpectrogram:{}", {"input_ids": (2, 8), "labels": (2, 8, 80)}),
        (
            'patchtst/AutoModel:{"num_input_channels": 3}',
            {
                "past_values": (2, 32, 3),
                "past_observed_mask": (2, 32, 3),
                "future_values": (2, 24, 3),
            },
        ),
        (
            (
                'time_series_transformer/AutoModel:{"context_length": 6, "prediction_length": 2,'
                ' "num_time_features": 3}'
            ),
            {
                "past_values": (2, 13),
                "past_time_features": (2, 13, 3),
                "past_observed_mask": (2, 13),
                "future_values": (2, 2),
                "future_time_features": (2, 2, 3),
            },
        ),
    ],
)
def test_a_batch_has_the_inputs_of_the_model_and_of_its_head(
    spec: str, inputs: dict[str, tuple[int, ...] | None]
) -> None:
    _, batch = hf.build(spec, batch=2, seq=8, image=64)
    assert {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else None
        for name, value in batch.items()
    } == inputs


def test_a_text_has_one_image_token_per_image_feature() -> None:
    text = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    vision = {
        "image_size": [32, 32],
        "patch_size": [8, 8],
        **{name: text[name] for name in text if name != "vocab_size"},
    }
    settings = {
        "text_config": text | {"model_type": "qwen2"},
        "vision_config": vision,
        "image_token_id": 95,
        "downsample_ratio": 0.5,
    }
    _, batch = hf.build(f"internvl:{json.dumps(settings)}", device="cpu", batch=2, seq=8)
    assert (batch["input_ids"] == 95).sum(1).tolist() == [4, 4]  # 4 x 4 patches, halved each way


@pytest.mark.parametrize(
    ("kind", "settings", "pixels", "image_sizes", "num_tokens"),
    [
        ("idefics3", {"scale_factor": 2}, (2, 1, 3, 32, 32), None, 4),
        (
            "llava_next",
            {"image_grid_pinpoints": [[32, 32]]},
            (2, 2, 3, 32, 32),
            [[32, 32], [32, 32]],
            36,
        ),
        ("mistral3", {"spatial_merge_size": 2}, (2, 3, 32, 32), [[32, 32], [32, 32]], 4),
    ],
)
def test_images_have_the_input_format_of_the_model_and_matching_image_tokens(
    kind: str,
    settings: dict[str, Any],
    pixels: tuple[int, ...],
    image_sizes: list[list[int]] | None,
    num_tokens: int,
) -> None:
    text = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    tower = {
        "idefics3": {},
        "llava_next": {"model_type": "clip_vision_model"},
        "mistral3": {"model_type": "pixtral", "head_dim": 8},
    }[kind]
    mark = "image_token_id" if kind == "idefics3" else "image_token_index"
    parts = {
        "text_config": {
            **text,
            "num_key_value_heads": 4,
            "model_type": "mistral" if kind == "mistral3" else "llama",
        },
        "vision_config": {**sizes, **tower, "image_size": 32, "patch_size": 8},
    }
    model, batch = hf.build(
        f"{kind}/AutoModelForImageTextToText:{json.dumps({**parts, mark: 95, **settings})}",
        device="cpu",
        batch=2,
        seq=48,
    )
    assert tuple(batch["pixel_values"].shape) == pixels and batch.get("image_sizes") == image_sizes
    assert (batch["input_ids"] == 95).sum(1).tolist() == [num_tokens] * 2
    assert model(**batch).loss.isfinite()


def test_a_model_that_reads_image_values_is_run_with_values_to_count_features() -> None:
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    text = {
        "model_type": "opt",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "word_embed_proj_dim": 32,
    }
    query = {**sizes, "encoder_hidden_size": 32}
    parts = {
        "vision_config": vision,
        "text_config": text,
        "qformer_config": query,
        "num_query_tokens": 3,
        "image_token_id": 95,
    }
    spec = f"blip-2/AutoModelForImageTextToText:{json.dumps(parts)}"
    assert (hf.build(spec, device="cpu", batch=2, seq=8)[1]["input_ids"] == 95).sum(1).tolist() == [
        3,
        3,
    ]
    with pytest.raises(AutoparError, match="unknown image inputs of Blip2ForConditionalGeneration"):
        hf.build(spec, batch=2, seq=8)


def test_settings_that_may_differ_between_layers_are_known() -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "head_dim": 16,
    }
    small = {
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_key_value_heads": 2,
    }
    assert hf.build(f"gemma4_text:{json.dumps(sizes | small)}")[0].config.hidden_size == 32


@pytest.mark.parametrize(
    ("spec", "kind", "labels"),
    [
        (f"bert/AutoModelForMaskedLM:{TINY}", "BertForMaskedLM", (2, 8)),
        (f"bert/AutoModelForSequenceClassification:{TINY}", "BertForSequenceClassification", (2,)),
        ('vit:{"num_hidden_layers": 1, "image_size": 32}', "ViTForImageClassification", (2,)),
        ('t5:{"num_layers": 1}', "T5ForConditionalGeneration", (2, 8)),
    ],
)
def test_the_head_is_the_named_one_or_the_first_of_the_model_type(
    spec: str, kind: str, labels: tuple[int, ...]
) -> None:
    model, batch = hf.build(spec, batch=2, seq=8)
    assert type(model).__name__ == kind
    assert tuple(batch["labels"].shape) == labels


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_known_sizes_have_the_published_number_of_parameters(
    name: str, num_parameters: int
) -> None:
    assert sum(p.numel() for p in hf.build(name)[0].parameters()) == num_parameters


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("nothing", "'nothing' is not a model"),
        ("llama:{", "not (a )?JSON"),
        ("llama:[1]", "not (a )?JSON object"),
        ("lama:{}", "no model type 'lama'"),
        ('llama:{"hiden_size": 64}', r"no setting 'hiden_size'[\s\S]*hidden_size"),
        ("llama/Llama:{}", "no class 'Llama'"),
        ('llama:{"hidden_size": 64, "num_attention_heads": 5}', "cannot build"),
        ('xlstm:{"v_head_dim": 8}', "cannot build"),
    ],
)
def test_an_invalid_spec_is_refused_with_the_reason(spec: str, complaint: str) -> None:
    with pytest.raises(AutoparError, match=complaint):
        hf.build(spec)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(AutoparError, match="has 1024 positions, but the batch has 2048"):
        hf.build("gpt2", seq=2048)
