"""Tiny pipelines of classes that no family knows, with random weights in the libraries' networks.

Every text encoder reads the small tokenizer of `tiny_qwen`; which vocabulary it is makes no difference to a pipeline.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from tests.peers import tiny_qwen
from tests.peers.tiny_models import randomise

WIDTH = 32
_KEEP = tempfile.TemporaryDirectory(prefix="inweave-tiny-")
_MAKERS: dict[str, Callable[[], Any]] = {}


@cache
def folder(name: str) -> Path:
    """The pipeline of this class as diffusers saves it."""
    path = Path(_KEEP.name) / name
    pipeline(name).save_pretrained(path, safe_serialization=True)
    return path


@cache
def pipeline(name: str) -> Any:
    """The pipeline that is saved; it must not be changed."""
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    pipe = _MAKERS[name]()
    for number, (_, part) in enumerate(sorted(pipe.components.items())):
        if isinstance(part, torch.nn.Module):
            randomise(part.eval(), number)
    return pipe


def names() -> list[str]:
    return list(_MAKERS)


def _made(make: Callable[[], Any]) -> Callable[[], Any]:
    _MAKERS["".join(part.capitalize() for part in make.__name__.split("_"))] = make
    return make


@cache
def tokenizer() -> Any:
    """As of a language model: a mark before every text."""
    made = copy.deepcopy(tiny_qwen.tokenizer().backend_tokenizer)
    mark = "<|im_start|>"
    made.post_processor = TemplateProcessing(single=f"{mark} $A", special_tokens=[(mark, made.token_to_id(mark))])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=mark
    )


def vae(channels: int = 4, levels: int = 2, **more: Any) -> Any:
    """An autoencoder with 2 ** (levels - 1) pixels per latent."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * levels, latent_channels=channels, norm_num_groups=4, layers_per_block=1, **blocks,
        **({"scaling_factor": 0.5, "shift_factor": 0.1} | more),
    )  # fmt: skip


def flow(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def _vocabulary() -> int:
    return max(tokenizer().get_vocab().values()) + 1


def t5(kind: Any = transformers.T5EncoderModel) -> Any:
    sizes = {"d_model": WIDTH, "d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    return kind(kind.config_class(vocab_size=_vocabulary(), **sizes))


def decoder(kind: Any) -> Any:
    pad = tokenizer().pad_token_id
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = kind.config_class(vocab_size=_vocabulary(), num_key_value_heads=1, head_dim=16, pad_token_id=pad, **sizes)
    return kind(config)


@_made
def aura_flow() -> Any:
    network = diffusers.AuraFlowTransformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=WIDTH,
        out_channels=4, pos_embed_max_size=1024,
    )  # fmt: skip
    encoder = t5(transformers.UMT5EncoderModel)
    return diffusers.AuraFlowPipeline(tokenizer(), encoder, vae(shift_factor=None), network, flow())


@_made
def chroma() -> Any:
    network = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8), approximator_hidden_dim=16, approximator_layers=1,
        approximator_num_channels=16,
    )  # fmt: skip
    return diffusers.ChromaPipeline(flow(), vae(), t5(), tokenizer(), network)


@_made
def cog_view4() -> Any:
    network = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4, out_channels=4,
        text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    encoder = decoder(transformers.GlmModel)
    return diffusers.CogView4Pipeline(tokenizer(), encoder, vae(shift_factor=None), network, flow())


@_made
def lumina2() -> Any:
    network = diffusers.Lumina2Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(300, 64, 64),
        cap_feat_dim=WIDTH,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(network, flow(), vae(levels=4), decoder(transformers.Gemma2Model), tokenizer())


@_made
def sana() -> Any:
    network = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=WIDTH,
        sample_size=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock",) * 2,
        decoder_block_types=("ResBlock",) * 2, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), upsample_block_type="interpolate", downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407,
    )  # fmt: skip
    encoder = decoder(transformers.Gemma2Model)
    return diffusers.SanaPipeline(tokenizer(), encoder, autoencoder, network, flow(shift=3.0))


@_made
def pix_art_sigma() -> Any:
    network = diffusers.PixArtTransformer2DModel(
        sample_size=16, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=WIDTH,
        in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
        use_additional_conditions=False,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtSigmaPipeline(tokenizer(), t5(), vae(shift_factor=None), network, scheduler)
