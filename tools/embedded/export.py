"""Write the trained parts as a diffusers folder in float16: <work>/model, or --out.

    model_index.json   scheduler/   text_encoder/   tokenizer/   unet/   vae/

The VAE is the one whose decoder was trained on generated latents, if that stage was run. The text encoder's
keys have the level `text_model.` that files of Stable Diffusion have, whatever the class in memory calls them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import diffusers
import torch
from safetensors.torch import save_file
from tools.embedded.networks import (
    load_tokenizer,
    new_scheduler,
    new_text_encoder,
    new_unet,
    new_vae,
    take_weights,
)
from tools.embedded.places import add_work, weights_file
from torch import nn

WEIGHTS = "diffusion_pytorch_model.safetensors"
_TEXT_LEVEL = "text_model."


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


def write_index(out: Path) -> None:
    absent = [None, None]
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
        "feature_extractor": absent,
        "image_encoder": absent,
        "requires_safety_checker": False,
        "safety_checker": absent,
        "scheduler": ["diffusers", "DDIMScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def export(work: Path, out: Path) -> None:
    tokenizer = load_tokenizer(work)
    vae, unet, text_encoder = new_vae(), new_unet(), new_text_encoder(tokenizer)
    adapted = weights_file(work, "vae_adapted").exists()
    take_weights(vae, work, "vae_adapted" if adapted else "vae")
    take_weights(unet, work, "unet")
    take_weights(text_encoder, work, "text_encoder")
    out.mkdir(parents=True, exist_ok=True)
    for network, name in ((vae, "vae"), (unet, "unet")):
        network.save_config(out / name)
        write_weights(network, out / name / WEIGHTS)
    text_encoder.config.save_pretrained(out / "text_encoder")
    write_weights(text_encoder, out / "text_encoder" / "model.safetensors", _TEXT_LEVEL)
    new_scheduler().save_config(out / "scheduler")
    shutil.copytree(work / "tokenizer", out / "tokenizer", dirs_exist_ok=True)
    write_index(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--out", type=Path, default=None, help="the folder to write (default: <work>/model)")
    options = parser.parse_args()
    with torch.no_grad():
        export(options.work, options.out or options.work / "model")


if __name__ == "__main__":
    main()
