"""The four parts of the model: their configurations, and their weights between stages.

    VAE            128x128x3 -> 16x16x8, channels 48, 96, 128, 128: the shipped one, trained further
    text encoder   CLIP, width 256, 4 layers, 8 heads, 32 tokens
    UNet           channels 128, 224, cross-attention in both, 1 layer a block
    scheduler      DDIM, v-prediction, zero terminal SNR, trailing timesteps

The networks are the classes of `inweave.models.sd`, whose outputs equal the libraries' bit for bit: a GPU machine
needs torch, numpy, Pillow, safetensors and tokenizers, and no diffusers.

The UNet that is trained takes 25 channels, of which a plain model is the first 8: what is absent is zero, so a
convolution without those channels computes the same.

    0-7 noisy latents    8 mask    9-16 latents of the masked image    17-24 latents of a reference image

Few GroupNorm groups on purpose: where a group is one channel, the norm removes absolute brightness and the decoder
encodes it as one bright speck per image. White backgrounds need zero terminal SNR.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tools.embedded.places import SHIPPED, weights_file
from torch import nn

from inweave.models.sd.autoencoder import AutoencoderKL
from inweave.models.sd.clip import CLIPTextModel
from inweave.models.sd.ddim import DDIMScheduler
from inweave.models.sd.unet import UNet2DConditionModel

SCALING = 0.18215
LATENT_CHANNELS = 8
MASK_CHANNELS = 1 + LATENT_CHANNELS
INPUT_CHANNELS = LATENT_CHANNELS + MASK_CHANNELS + LATENT_CHANNELS
TOKENS = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Widths and depths; kept in the work folder, so that all stages agree."""

    widths: tuple[int, ...] = (128, 224)
    layers: int = 1
    heads: int = 4
    groups: int = 8
    text_width: int = 256
    text_layers: int = 4
    text_heads: int = 8
    vae_widths: tuple[int, ...] = (48, 96, 128, 128)


SIZES = {
    "base": Size(),
    "wide": Size(widths=(128, 256)),
    "deep": Size(widths=(96, 160, 256)),
    "tiny": Size(widths=(16, 24), groups=4, text_width=16, text_layers=1, text_heads=2, vae_widths=(8, 8, 8, 8)),
}


def write_size(work: Path, size: Size) -> None:
    path = work / "size.json"
    text = json.dumps(asdict(size))
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"{path}: this work folder is of another size: {path.read_text()}; remove the folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read_size(work: Path) -> Size:
    path = work / "size.json"
    if not path.exists():
        raise SystemExit(f"{path}: not there; run python -m tools.embedded.leg first")
    document: dict[str, Any] = json.loads(path.read_text())
    settings: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in document.items()
    }
    return Size(**settings)


def vae_config(size: Size) -> dict[str, Any]:
    return {**_shipped("vae"), "block_out_channels": list(size.vae_widths)}


def unet_config(size: Size, channels: int = INPUT_CHANNELS) -> dict[str, Any]:
    levels = len(size.widths)
    return {
        **_shipped("unet"),
        "in_channels": channels,
        "block_out_channels": list(size.widths),
        "layers_per_block": size.layers,
        "down_block_types": ["CrossAttnDownBlock2D"] * levels,
        "up_block_types": ["CrossAttnUpBlock2D"] * levels,
        "cross_attention_dim": size.text_width,
        "attention_head_dim": size.heads,
        "norm_num_groups": size.groups,
    }


def text_config(size: Size, tokenizer: Vocabulary) -> dict[str, Any]:
    return {
        **_shipped("text_encoder"),
        "vocab_size": tokenizer.size,
        "hidden_size": size.text_width,
        "intermediate_size": 4 * size.text_width,
        "projection_dim": size.text_width,
        "num_hidden_layers": size.text_layers,
        "num_attention_heads": size.text_heads,
        "bos_token_id": tokenizer.start,
        "eos_token_id": tokenizer.end,
        "pad_token_id": tokenizer.end,
    }


def scheduler_config() -> dict[str, Any]:
    return _shipped("scheduler", "scheduler_config.json")


def new_vae(size: Size) -> AutoencoderKL:
    return AutoencoderKL.from_config(_arguments(AutoencoderKL, vae_config(size)))


def new_unet(size: Size) -> UNet2DConditionModel:
    unet = UNet2DConditionModel.from_config(_arguments(UNet2DConditionModel, unet_config(size)))
    with torch.no_grad():  # a plain image at first: what else may be seen comes in from nothing
        unet.conv_in.weight[:, LATENT_CHANNELS:] = 0
    return unet


def new_text_encoder(size: Size, tokenizer: Vocabulary) -> CLIPTextModel:
    encoder = CLIPTextModel.from_config(_arguments(CLIPTextModel, text_config(size, tokenizer)))
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                module.weight.normal_(std=0.02)
            if isinstance(module, nn.Linear):
                module.bias.zero_()
    return encoder


def new_scheduler() -> DDIMScheduler:
    return DDIMScheduler.from_config(_arguments(DDIMScheduler, scheduler_config()))


class Vocabulary:
    """The tokenizer of a folder; only `tokenizers` is needed for it."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.size = self._tokenizer.get_vocab_size()
        self.start, self.end = (self._tokenizer.token_to_id(settings[name]) for name in ("bos_token", "eos_token"))

    def ids(self, texts: list[str]) -> list[list[int]]:
        return [each.ids for each in self._tokenizer.encode_batch(texts)]


def load_tokenizer(work: Path) -> Vocabulary:
    return Vocabulary(work / "packed" / "tokenizer")


def token_ids(tokenizer: Vocabulary, captions: list[str], device: torch.device) -> torch.Tensor:
    """Return (captions, 32) ids: the start, the words, the end, and ends again; long captions are cut."""
    end = tokenizer.end
    rows = [[*ids[: TOKENS - 1], *[end] * max(1, TOKENS - len(ids))][:TOKENS] for ids in tokenizer.ids(captions)]
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
    network.load_state_dict({key: value.float() for key, value in load_file(path).items()})


def take_shipped_vae(vae: AutoencoderKL) -> bool:
    """Load the shipped VAE if it has the same widths."""
    state = load_file(SHIPPED / "vae" / "diffusion_pytorch_model.safetensors")
    own = {name: tuple(value.shape) for name, value in vae.state_dict().items()}
    if own != {name: tuple(value.shape) for name, value in state.items()}:
        return False
    vae.load_state_dict({name: value.float() for name, value in state.items()})
    return True


def _shipped(folder: str, name: str = "config.json") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((SHIPPED / folder / name).read_text())
    return document


def _arguments(kind: type, config: dict[str, Any]) -> dict[str, Any]:
    names = signature(kind).parameters
    return {name: tuple(v) if isinstance(v, list) else v for name, v in config.items() if name in names}
