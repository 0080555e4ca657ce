"""The four parts of the model: their configurations, and their weights between stages.

    VAE            128x128x3 -> 16x16x8, channels 48, 96, 128, 128
    text encoder   CLIP, width 192, 4 layers, 6 heads, 32 tokens
    UNet           channels 96, 160, cross-attention in both, 1 layer a block
    scheduler      DDIM, v-prediction, zero terminal SNR, trailing timesteps

Few GroupNorm groups on purpose: where a group is one channel, the norm removes absolute brightness and the decoder
encodes it as one bright speck per image. White backgrounds need zero terminal SNR.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from tools.embedded.places import weights_file
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

SCALING = 0.18215
LATENT_CHANNELS = 8
TEXT_WIDTH = 192
TOKENS = 32


def new_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(48, 96, 128, 128),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=128,
        scaling_factor=SCALING,
    )


def new_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(96, 160),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=TOKENS,
        hidden_act="quick_gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return CLIPTextModel(config)


def new_scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )


def load_tokenizer(work: Path) -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(work / "tokenizer")


def token_ids(tokenizer: CLIPTokenizer, captions: list[str], device: torch.device) -> torch.Tensor:
    rows = tokenizer(captions, padding="max_length", truncation=True, max_length=TOKENS).input_ids
    return torch.tensor(rows, device=device)


def parameters_of(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def round_to_half(network: nn.Module) -> None:
    """Round the weights to float16, the shipped dtype: all later stages use the rounded values."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.half().float())


def keep_weights(network: nn.Module, work: Path, name: str) -> None:
    path = weights_file(work, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().cpu().contiguous() for key, value in network.state_dict().items()}
    save_file(state, path)


def take_weights(network: nn.Module, work: Path, name: str) -> None:
    path = weights_file(work, name)
    if not path.exists():
        raise SystemExit(f"{path}: not there; run the stage that trains the {name} first")
    network.load_state_dict(load_file(path))
