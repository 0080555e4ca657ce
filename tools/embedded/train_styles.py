"""Train the two shipped style adapters from the two shipped datasets, with inweave's own training.

    styles/<name>/*.png, *.txt  ->  inweave.train  ->  loras/<name>.safetensors

kohya's spelling, float16. The settings below and the preset of `inweave/emoji` determine a file: on the same machine
with the same number of threads they give the same tensors. They are also in the file's metadata.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tools.embedded.places import SHIPPED

import inweave
from inweave.models import embedded

#: attention, feed-forward, projections and convolutions of the residual blocks: under a megabyte at rank 8
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out", "conv1", "conv2"]
SETTINGS: dict[str, Any] = {"targets": TARGETS, "steps": 400, "batch_size": 4, "seed": 0}
DESCRIPTIONS = {
    "pixel": "Pixel art: 16x16 flat cells, six levels a channel, hard edges.",
    "ink": "Ink: black outlines and dark areas on white.",
}
LICENSE = "Apache-2.0; trained on pictures derived from Noto Emoji by Google Inc"


def train(name: str, steps: int, out: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        config = inweave.TrainConfig.of(
            **{**SETTINGS, "steps": steps}, model=embedded.NAME, dataset=f"inweave/{name}", name=name, output=place
        )
        done = inweave.train(
            config, on_record=lambda record: print(name, record, flush=True) if "loss" in record else None
        )
        if done.step < steps:
            raise SystemExit(f"{name}: {done.reason}")
        out.mkdir(parents=True, exist_ok=True)
        path = out / done.path.name
        adapter = inweave.load(done.path)
        metadata = {"modelspec.description": DESCRIPTIONS[name], "modelspec.license": LICENSE}
        inweave.save(
            replace(adapter, metadata={**adapter.metadata, **metadata}), path, dialect="kohya", base=embedded.NAME
        )
    last = sum(done.losses[-50:]) / len(done.losses[-50:])
    print(
        f"{path}: {path.stat().st_size} bytes, {done.step} steps in {done.seconds:.0f} s, "
        f"loss of the last 50: {last:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--styles", nargs="+", default=list(embedded.styles()), choices=list(embedded.styles()))
    parser.add_argument("--out", type=Path, default=SHIPPED / "loras")
    parser.add_argument("--steps", type=int, default=SETTINGS["steps"], help="fewer, for a trial")
    parser.add_argument("--threads", type=int, default=2, help="part of the settings: sums depend on it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.styles:
        train(name, options.steps, options.out)


if __name__ == "__main__":
    main()
