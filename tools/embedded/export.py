"""Write the trained parts as a diffusers folder in float16: <work>/model, or --out.

    model_index.json   scheduler/   text_encoder/   tokenizer/   unet/   vae/

The VAE is the one whose decoder was trained on generated latents, if that stage was run. The text encoder's keys have
the level `text_model.` that files of Stable Diffusion have, whatever the class in memory calls them.

    --inputs plain     the UNet of text to image: the first 8 of its 25 channels
    --inputs inpaint   8 + 1 + 8: a StableDiffusionInpaintPipeline, which sees the mask and what is around it
    --inputs edit      8 + 8: a StableDiffusionInstructPix2PixPipeline, which sees another image
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tools.embedded.networks import (
    INPUT_CHANNELS,
    LATENT_CHANNELS,
    MASK_CHANNELS,
    load_tokenizer,
    new_text_encoder,
    new_unet,
    new_vae,
    read_size,
    scheduler_config,
    take_weights,
    text_config,
    unet_config,
    vae_config,
)
from tools.embedded.places import SHIPPED, add_work, weights_file
from torch import nn

WEIGHTS = "diffusion_pytorch_model.safetensors"
_TEXT_LEVEL = "text_model."
_MASKED = LATENT_CHANNELS + MASK_CHANNELS
#: pipeline, and the channels of the trained UNet that it has
INPUTS = {
    "plain": ("StableDiffusionPipeline", [*range(LATENT_CHANNELS)]),
    "inpaint": ("StableDiffusionInpaintPipeline", [*range(_MASKED)]),
    "edit": ("StableDiffusionInstructPix2PixPipeline", [*range(LATENT_CHANNELS), *range(_MASKED, INPUT_CHANNELS)]),
}


def write_weights(network: nn.Module, path: Path, level: str = "") -> None:
    """Write the network's state in float16; ``level`` is prepended to every key that lacks it."""
    state = {
        key if key.startswith(level) else level + key: value.detach().cpu().half().contiguous()
        for key, value in network.state_dict().items()
        if not key.endswith("position_ids")
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path, metadata={"format": "pt"})
    print(f"{path.parent.name}/{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


@torch.no_grad()
def export(work: Path, out: Path, inputs: str = "plain") -> None:
    """Write the folder of a model that takes these inputs."""
    size, tokenizer = read_size(work), load_tokenizer(work)
    vae, unet, text_encoder = new_vae(size), new_unet(size), new_text_encoder(size, tokenizer)
    adapted = weights_file(work, "vae_adapted").exists()
    take_weights(vae, work, "vae_adapted" if adapted else "vae")
    take_weights(unet, work, "unet")
    take_weights(text_encoder, work, "text_encoder")
    pipeline, channels = INPUTS[inputs]
    unet.conv_in.weight = nn.Parameter(unet.conv_in.weight[:, channels].clone())
    write_weights(vae, out / "vae" / WEIGHTS)
    write_weights(unet, out / "unet" / WEIGHTS)
    write_weights(text_encoder, out / "text_encoder" / "model.safetensors", _TEXT_LEVEL)
    _write_json(out / "vae" / "config.json", vae_config(size))
    _write_json(out / "unet" / "config.json", unet_config(size, len(channels)))
    _write_json(out / "text_encoder" / "config.json", text_config(size, tokenizer))
    _write_json(out / "scheduler" / "scheduler_config.json", scheduler_config())
    shutil.copytree(work / "packed" / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    index = json.loads((SHIPPED / "model_index.json").read_text())
    _write_json(out / "model_index.json", {**index, "_class_name": pipeline})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--out", type=Path, default=None, help="the folder to write (default: <work>/model)")
    parser.add_argument("--inputs", choices=INPUTS, default="plain")
    options = parser.parse_args()
    export(options.work, options.out or options.work / "model", options.inputs)


if __name__ == "__main__":
    main()
