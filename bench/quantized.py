"""Quantized bases, on a CPU: errors of formats, LoRAs trained on them, and quantization-aware training.

    python bench/quantized.py errors              signal to quantization noise of real and of heavy-tailed weights
    python bench/quantized.py training            the final loss of a LoRA on a base in each format
    python bench/quantized.py qat                 a LoRA merged and quantized: trained plain, and trained with qat

The bundled model, style "pixel"; a loss is the mean over half of its images with fixed noise, without dropout. fp8
rounds inputs too, as its products do on a GPU; here they are computed in float32.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn

from inweave.bench.embedded import closer_to_style, style_set
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.layers import LoraLayer, lora_layers, merge
from inweave.models.quantization import quantized_names
from inweave.ops.quantized import FORMATS, relative_error
from inweave.training.config.schema import TrainConfig
from inweave.training.session import prepare

STYLE, SEEDS = "pixel", range(5)
Values = dict[str, torch.Tensor]


def errors() -> None:
    """Print the signal to noise ratio of every format, in dB."""
    network = pipeline("inweave/emoji", device="cpu").model.denoiser
    names = sorted(quantized_names(network, "nf4"))
    weights = {"bundled model": [network.get_submodule(name).weight.detach() for name in names]}
    weights["Flux block, heavy tails"] = list(heavy_block())
    print("| weights | " + " | ".join(FORMATS) + " |\n|---|" + "---|" * len(FORMATS))
    for label, group in weights.items():
        cells = []
        for kind in FORMATS.values():
            noise = sum((relative_error(w, kind.weights.of(w)) * float(w.norm())) ** 2 for w in group)
            cells.append(f"{10 * math.log10(sum(float(w.norm()) ** 2 for w in group) / noise):.1f} dB")
        print(f"| {label} ({len(group)} matrices) | " + " | ".join(cells) + " |", flush=True)


def heavy_block() -> Any:
    """Yield weights of the size of a Flux block: Student's t with 4 degrees, and every 97th input 20 times as large."""
    generator = torch.Generator().manual_seed(0)
    for out, into in ((3072, 3072), (3072, 3072), (3072, 3072), (3072, 3072), (12288, 3072), (3072, 12288)):
        normal = torch.randn(5, out, into // 4, generator=generator).repeat(1, 1, 4)
        chosen = torch.randperm(into, generator=generator)
        weight = normal[0] / normal[1:].square().mean(0).sqrt() * torch.randn(out, into, generator=generator).sign()
        weight[:, chosen[::97]] *= 20
        yield weight / 64


def config_of(folder: str, steps: int, seed: int, **settings: Any) -> TrainConfig:
    return TrainConfig.of(
        model="inweave/emoji", dataset=f"inweave/{STYLE}", output=folder, name=f"run-{seed}", device="cpu", seed=seed,
        steps=steps, resolution=64, targets="attention-mlp", rank=8, batch_size=2, lr_scheduler="cosine", **settings,
    )  # fmt: skip


def on_base(network: nn.Module, format: str) -> None:
    """Quantize the adapted layers that a format can hold; fp8 takes those of int8, whatever their size."""
    if format:
        names = quantized_names(network, "int8" if format == "fp8" else format)
        for name, layer in lora_layers(network).items():
            if name in names and isinstance(layer, LoraLayer) and isinstance(layer.base, nn.Linear):
                FORMATS[format].quantize(layer.base)


def trained(steps: int, seed: int, *, base: str = "", **settings: Any) -> Values:
    """Train and return the parameters."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = prepare(config_of(folder, steps, seed, **settings))
        on_base(run.model.denoiser, base)
        run.train()
        return {name: value.detach().clone() for name, value in run.trainable.parameters.items()}


def evaluated(values: Values, *, base: str = "", stored: str = "") -> tuple[float, nn.Module]:
    """Return the loss of an adapter on a base, or merged and then stored in a format; and the denoiser."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = prepare(config_of(folder, 1, 0, validation_split=0.5))
        on_base(run.model.denoiser, base)
        with torch.no_grad():
            for name, value in run.trainable.parameters.items():
                value.copy_(values[name])
        if stored:
            merge(run.model.denoiser)
            on_base(run.model.denoiser, stored)
        return run.validate(), run.model.denoiser


def training(steps: int) -> None:
    """Print final losses: float32 with five seeds, every format with the first of them."""
    plain = [evaluated(trained(steps, seed))[0] for seed in SEEDS]
    print(f"float32, seeds {SEEDS.start} to {SEEDS.stop - 1}: {', '.join(f'{loss:.5f}' for loss in plain)}", flush=True)
    print(f"spread: {min(plain):.5f} to {max(plain):.5f}\n| base | final loss | against float32 |\n|---|---|---|")
    for format in FORMATS:
        loss, _ = evaluated(trained(steps, 0, base=format), base=format)
        inside = "inside" if min(plain) <= loss <= max(plain) else "outside"
        print(f"| {format} | {loss:.5f} | {loss / plain[0] - 1:+.2%}, {inside} the spread |", flush=True)


def images_of(pipe: Pipeline, captions: list[str]) -> list[Image.Image]:
    return [pipe(text, seed=7, steps=5).images[0] for text in captions]


def qat(steps: int, seed: int, formats: Sequence[str], count: int = 6) -> None:
    """Print loss and style distance of an adapter, and of the merged and stored model with and without qat."""
    captions, style = style_set(STYLE)
    pipe, chosen = pipeline("inweave/emoji", device="cpu"), captions[:count]
    original, base = pipe.model.denoiser, images_of(pipe, chosen)

    def row(label: str, values: Values, stored: str = "") -> None:
        loss, denoiser = evaluated(values, stored=stored)
        pipe.model.networks[pipe.model.blueprint.denoiser.folder] = denoiser.eval()
        with torch.no_grad():
            distance = closer_to_style(images_of(pipe, chosen), style, base)["to_style"]
        pipe.model.networks[pipe.model.blueprint.denoiser.folder] = original
        print(f"| {label} | {loss:.5f} | {distance:.4f} |", flush=True)

    print("| adapter | loss | style distance |\n|---|---|---|")
    plain = trained(steps, seed)
    row("trained plain, not quantized", plain)
    for format in formats:
        row(f"trained plain, merged, {format}", plain, format)
        row(f'trained with qat = "{format}", merged, {format}', trained(steps, seed, qat=format), format)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("part", choices=("errors", "training", "qat"))
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--seed", type=int, default=0, help="of qat")
    arguments.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["nf4", "int8"], help="of qat")
    options = arguments.parse_args()
    if options.part == "errors":
        errors()
    elif options.part == "training":
        training(options.steps)
    else:
        qat(options.steps, options.seed, options.formats)


if __name__ == "__main__":
    main()
