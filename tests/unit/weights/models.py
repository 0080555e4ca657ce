"""Small models on disk, in every layout a base comes in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from inweave.adapter import Adapter, Tensor
from inweave.exchange.load import open_base
from inweave.formats.read import read
from inweave.targets.index import ModelIndex
from inweave.targets.resolve import resolve
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource, FileSource, Renamed
from inweave.weights.stack import Strength
from tests.golden.weave import small
from tests.support import random, tensor

DENOISER, ENCODER = "model.diffusion_model.", "text_encoders.clip_l.transformer."
Q = "transformer_blocks.0.attn.to_q"


def flux(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A tiny Flux as one file: the transformer in BFL's names, a CLIP, a VAE, and an integer table."""
    generator = torch.Generator().manual_seed(seed)
    index = small("flux1-dev", "original").index
    names = {DENOISER + name: shape for name, shape in index.components["unet"].tensors.items()}
    for leaf in ("q_proj", "k_proj", "v_proj", "out_proj"):
        names[f"{ENCODER}text_model.encoder.layers.0.self_attn.{leaf}.weight"] = (6, 6)
    names[f"{ENCODER}text_model.embeddings.token_embedding.weight"] = (11, 6)
    names[f"{ENCODER}text_model.final_layer_norm.weight"] = (6,)
    names["vae.decoder.conv_in.weight"] = (5, 3, 3, 3)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names.items()}
    tensors[f"{ENCODER}text_model.embeddings.position_ids"] = torch.arange(7)
    return tensors


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata or None)
    return path


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int = 3, stem: str = "model") -> Path:
    """Shards that separate neighboring tensors, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    mapping = {name: files[number % count] for number, name in enumerate(tensors)}
    for file in files:
        write_file(folder / file, {n: t for n, t in tensors.items() if mapping[n] == file}, format="pt", shard=file)
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1, "note": "kept"}, "weight_map": mapping}))
    return index


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """The same model as a diffusers folder: components under their own names, along with other files."""
    folder.mkdir()
    single = write_file(folder.parent / f"{folder.name}-single.safetensors", tensors)
    index = open_base(single)
    source = FileSource(single)
    for name, component in (("transformer", "unet"), ("text_encoder", "te1")):
        (folder / name).mkdir()
        view = Renamed(source, index.components[component])
        parts = {part: view.get(part).clone() for part in view.names()}
        stem = "diffusion_pytorch_model" if component == "unet" else "model"
        write_file(folder / name / f"{stem}.safetensors", parts, format="pt")
        (folder / name / "config.json").write_text(f'{{"of": "{name}"}}')
    (folder / "vae").mkdir()
    write_file(
        folder / "vae" / "diffusion_pytorch_model.safetensors", {"decoder.conv_in.weight": torch.ones(5, 3, 3, 3)}
    )
    (folder / "model_index.json").write_text("{}")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "config.json").write_text("{}")
    single.unlink()
    return folder


def pair(
    module: str, out: int, into: int, rank: int = 3, seed: int = 1, alpha: float | None = None
) -> dict[str, Tensor]:
    factors = {
        f"{module}.lora_down.weight": random(seed, rank, into),
        f"{module}.lora_up.weight": random(seed + 1, out, rank),
    }
    return factors | ({f"{module}.alpha": tensor(alpha)} if alpha is not None else {})


def flux_lora(seed: int = 1) -> dict[str, Tensor]:
    """Pairs on fused and plain layers and the text encoder, a DoRA along the inputs, a LoKr and a bias."""
    tensors = pair("lora_unet_double_blocks_0_img_attn_qkv", 24, 8, 3, seed, alpha=2.0)
    tensors |= pair("lora_unet_single_blocks_0_linear1", 56, 8, 2, seed + 2)
    tensors |= pair("lora_unet_final_layer_linear", 6, 8, 2, seed + 4, alpha=1.0)
    tensors |= pair("lora_te1_text_model_encoder_layers_0_self_attn_q_proj", 6, 6, 2, seed + 6)
    tensors |= pair("lora_unet_double_blocks_0_txt_attn_proj", 8, 8, 2, seed + 8)
    tensors["lora_unet_double_blocks_0_txt_attn_proj.dora_scale"] = tensor([[0.5 + 0.1 * i for i in range(8)]])
    tensors["lora_unet_double_blocks_0_img_mlp_0.lokr_w1"] = random(seed + 10, 2, 2)
    tensors["lora_unet_double_blocks_0_img_mlp_0.lokr_w2"] = random(seed + 11, 16, 4)
    tensors["lora_unet_double_blocks_0_img_attn_proj.diff_b"] = random(seed + 12, 8)
    return tensors


def adapter(tensors: Mapping[str, Tensor], **metadata: str) -> Adapter:
    loaded = read(tensors, metadata)
    assert not loaded.problems
    return loaded


def merged_with(
    tensors: Mapping[str, torch.Tensor],
    index: ModelIndex,
    stack: list[tuple[Adapter, Strength]],
    component: str | None = None,
) -> MergedSource:
    plans = [(resolve(each, index), strength) for each, strength in stack]
    return MergedSource(DictSource(tensors), plans, component=component, index=index)


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
