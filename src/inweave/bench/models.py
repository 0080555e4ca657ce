"""Full-size models with random weights in published configurations, for measuring time and memory.

    random_model("sdxl", device, dtype)     the denoiser on the device; text encoders and autoencoder on meta
    random_batch(model, batch, size)        latents, noise, times and text of one batch, on the device

Weights have a standard deviation of 1 / sqrt(fan in), so that activations keep their scale through the network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from inweave.errors import ConfigError
from inweave.models import bundled, embedded
from inweave.models.blank import blank
from inweave.models.blueprint import Blueprint, NetworkBlueprint
from inweave.models.families import family_named
from inweave.models.families.base import Tensors
from inweave.models.model import Model, on_meta
from inweave.models.open import open_model
from inweave.models.variants import find_variant
from inweave.training.adapters.targets import select_modules
from inweave.training.config.schema import TrainConfig
from inweave.weights.source import DictSource

_META = torch.device("meta")
#: more tensors than any published network has, so that no bundled configuration is refused as too large
_ROOM = 10_000


@cache
def published_blueprint(name: str) -> Blueprint:
    """Return the blueprint of a variant whose configurations are bundled; its sources hold meta tensors."""
    if name == embedded.NAME:
        return open_model(name)
    known = find_variant(name)
    if known is None or known.name not in bundled.variants():
        choices = ", ".join((embedded.NAME, *bundled.variants()))
        raise ConfigError(f"no model of this name can be measured: {name!r}; choose one of {choices}")
    configs = {folder: bundled.component_config(known, folder) for folder in bundled.folders(known)}
    parts = {
        folder: NetworkBlueprint(folder, class_name, config, _tensors_of(folder, class_name, config))
        for folder, (class_name, config) in configs.items()
        if not folder.startswith(("tokenizer", "scheduler"))
    }
    return Blueprint(known.name, family_named(known.family), parts, {}, configs["scheduler"][1], Path(), known)


def _tensors_of(folder: str, class_name: str, config: bundled.Config) -> DictSource:
    enough = DictSource(dict.fromkeys(map(str, range(_ROOM)), torch.empty(0)))
    return DictSource(on_meta(NetworkBlueprint(folder, class_name, config, enough)).state_dict())


def random_model(name: str, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> Model:
    """Return a model whose denoiser has random weights on the device; its other networks stay on meta."""
    model = blank(published_blueprint(name), dtype)
    folder = model.blueprint.denoiser.folder
    network = model.networks[folder].to_empty(device=device)
    fill_random(network, seed)
    model.family.complete(folder, network)
    return Model(model.blueprint, {**model.networks, folder: network}, {}, None, device, dtype)


@torch.no_grad()
def fill_random(network: nn.Module, seed: int) -> None:
    """Fill in random weights that preserve the scale of activations; norms multiply by 1, biases add 0."""
    generator: torch.Generator | None = None
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(seed)
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            tensor.normal_(std=tensor[0].numel() ** -0.5, generator=generator)


@torch.no_grad()
def write_lora(path: Path, model: Model, rank: int, seed: int) -> Path:
    """Write a LoRA in the diffusers dialect on every attention projection of the denoiser."""
    network, folder = model.denoiser, model.blueprint.denoiser.folder
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in select_modules("unet", network, TrainConfig.of(dataset="-", targets="attention")):
        out, into = network.get_submodule(module).weight.shape
        down, up = (torch.randn(shape, generator=generator) * 0.02 for shape in ((rank, into), (out, rank)))
        tensors[f"{folder}.{module}.lora_A.weight"] = down.to(model.dtype)
        tensors[f"{folder}.{module}.lora_B.weight"] = up.to(model.dtype)
    save_file(tensors, path)
    return path


@torch.no_grad()
def random_batch(model: Model, batch: int, size: int, *, seed: int = 1) -> Tensors:
    """Return a training batch: latents, noise, times, sizes of the images, and text as from the encoders."""
    if size % model.patch:
        raise ConfigError(f"size: {size} pixels, but {model.name} takes multiples of {model.patch}")
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    family = model.family
    template = Model(model.blueprint, blank(model.blueprint, model.dtype).networks, {}, None, _META, model.dtype)
    text = family.encode(template, family.example_ids(template, 1, _META), None)
    shape = (batch, *model.latent_space.shape(size, size)[1:])
    times = torch.rand(batch, device=device, generator=generator)
    tensors = {f"text.{name}": value.new_ones((batch, *value.shape[1:]), device=device) for name, value in text.items()}
    for name, value in tensors.items():
        if value.is_floating_point():
            tensors[name] = random(*value.shape).to(value.dtype)
    return {
        "latents": random(*shape),
        "noise": random(*shape),
        "times": times if model.flow else (times * 1000).long(),
        "sizes": torch.tensor([[size, size, 0, 0, size, size]] * batch, dtype=torch.float32, device=device),
        **tensors,
    }
