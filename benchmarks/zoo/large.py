"""Published models whose sizes `autopar.hf` does not know, on meta, as functions for ``--module
FILE.py:FUNCTION``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.zoo.libraries import WithLoss, build_model


def sdxl_unet() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the U-Net of SDXL (Podell et al., 2023, table 1, with the settings of its checkpoint
    ``stable-diffusion-xl-base-1.0``), and 64 latents of images of 1024 × 1024."""
    batch = 64
    settings = {
        "sample_size": 128,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
    with torch.device("meta"):
        model = Conditioned(build_model("diffusers.UNet2DConditionModel", settings))
        inputs = {
            "sample": torch.randn(batch, 4, 128, 128),
            "timestep": torch.randint(0, 1000, (batch,)),
            "encoder_hidden_states": torch.randn(batch, 77, 2048),
            "text_embeds": torch.randn(batch, 1280),
            "time_ids": torch.randn(batch, 6),
        }
    return WithLoss(model).train(), inputs


class Conditioned(nn.Module):
    """The U-Net with the conditions of a sample as separate arguments."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, text_embeds: Tensor, time_ids: Tensor, **inputs: Tensor) -> Tensor:
        conditions = {"text_embeds": text_embeds, "time_ids": time_ids}
        predicted: Tensor = self.unet(**inputs, added_cond_kwargs=conditions).sample
        return predicted
