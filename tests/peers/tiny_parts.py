"""Small parts of pipelines with the libraries' own classes: tokenizers, text encoders, autoencoders, schedulers.

Every text encoder reads the small tokenizer of `tiny_qwen`; which vocabulary it is makes no difference to a pipeline.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from tests.peers import tiny_qwen

WIDTH = 32
_CHAT = tiny_qwen.CHAT.replace(
    "{{ message['content'] }}", "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
)
LENGTH = 128  # of CLIP's texts, more than the usual 77
_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@cache
def tokenizer(length: int | None = None) -> Any:
    """As of a language model: a mark before every text."""
    made = copy.deepcopy(tiny_qwen.tokenizer().backend_tokenizer)
    mark, end = "<|im_start|>", "<|im_end|>"
    ends = [(each, made.token_to_id(each)) for each in (mark, end)]
    single = f"{mark} $A {end}" if length else f"{mark} $A"  # of CLIP: one after it too
    made.post_processor = TemplateProcessing(single=single, special_tokens=ends)
    most = {"model_max_length": length} if length else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=end, pad_token="<|endoftext|>", bos_token=mark,
        chat_template=tiny_qwen.CHAT, **most,
    )  # fmt: skip


def vae(channels: int = 4, levels: int = 2, **more: Any) -> Any:
    """An autoencoder with 2 ** (levels - 1) pixels per latent."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * levels, "up_block_types": ("UpDecoderBlock2D",) * levels}
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * levels, latent_channels=channels, norm_num_groups=4, layers_per_block=1, **blocks,
        **({"scaling_factor": 0.5, "shift_factor": 0.1} | more),
    )  # fmt: skip


def plain_vae(channels: int = 4, levels: int = 2) -> Any:
    """An autoencoder whose latents are not shifted."""
    return vae(channels, levels, shift_factor=None)


def video_vae(channels: int = 4, levels: int = 3, kind: Any = diffusers.AutoencoderKLQwenImage, **more: Any) -> Any:
    """An autoencoder for video with a mean and a deviation for every channel."""
    return kind(
        base_dim=4, z_dim=channels, dim_mult=[1] * levels, num_res_blocks=1,
        temperal_downsample=[False, True, True, True][: levels - 1], latents_mean=[0.1 * n for n in range(channels)],
        latents_std=[1.0 + 0.1 * n for n in range(channels)], **more,
    )  # fmt: skip


def compressing_vae() -> Any:
    """An autoencoder without a distribution."""
    return diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock",) * 2,
        decoder_block_types=("ResBlock",) * 2, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()), encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), upsample_block_type="interpolate", downsample_block_type="stride_conv",
        decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407,
    )  # fmt: skip


def normalized_vae() -> Any:
    """An autoencoder whose latents are patches with a mean and a variance among its weights."""
    made = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, batch_norm_eps=1e-5,
    )  # fmt: skip
    made.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    made.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return made


def text_processor(kind: Any) -> Any:
    """A processor without its image half, which needs torchvision."""
    qwen = copy.deepcopy(tiny_qwen.tokenizer())
    qwen.add_special_tokens({"additional_special_tokens": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]})
    parts = dict.fromkeys(kind.get_attributes()) | {"tokenizer": qwen}

    def saved(self: Any, folder: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        (Path(folder) / "chat_template.jinja").write_text(self.chat_template)

    methods = {
        "check_argument_for_proper_class": lambda self, name, part: type(part),
        "save_pretrained": lambda self, folder, **options: saved(self, folder),
    }
    text_only = type(kind.__name__, (kind,), methods)
    text_only.__module__ = kind.__module__
    return text_only(**parts, chat_template=_CHAT)


def flow(**more: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**more)


def diffusion(kind: Any = diffusers.DDIMScheduler, **more: Any) -> Any:
    return kind(**_DIFFUSION, **more)


def vocabulary() -> int:
    return max(tokenizer().get_vocab().values()) + 1


def t5(kind: Any = transformers.T5EncoderModel) -> Any:
    sizes = {"d_model": WIDTH, "d_ff": 24, "d_kv": 8, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    return kind(kind.config_class(vocab_size=vocabulary(), **sizes))


def decoder(kind: Any, **more: Any) -> Any:
    """A language model."""
    pad = tokenizer().pad_token_id
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"bos_token_id": None, "eos_token_id": None}
    config = kind.config_class(pad_token_id=pad, **(sizes | {"vocab_size": vocabulary()} | more))
    return kind(config)


def qwen2_5(kind: Any = transformers.Qwen2_5_VLForConditionalGeneration) -> Any:
    """A language model that sees."""
    text = tiny_qwen.QWEN2_5 | {"hidden_size": WIDTH, "num_attention_heads": 4}
    vision = text.pop("vision_config") | {"out_hidden_size": WIDTH}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return kind(config)


def qwen3(kind: Any = transformers.Qwen3VLForConditionalGeneration, layers: int = 3) -> Any:
    """A newer one."""
    text = {
        "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": vocabulary() + 8,
        "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    return kind(transformers.Qwen3VLConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]}))


def clip(kind: Any = transformers.CLIPTextModel, width: int = 16) -> Any:
    known = tokenizer(LENGTH)
    return kind(
        transformers.CLIPTextConfig(
            vocab_size=vocabulary(),
            hidden_size=width,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            projection_dim=width,
            max_position_embeddings=LENGTH,
            bos_token_id=known.bos_token_id,
            eos_token_id=known.eos_token_id,
            pad_token_id=known.pad_token_id,
        )
    )
