"""Paths: the work folder between the stages, and the folder that is shipped.

<work>/npm/<package>/            fetched packages
<work>/sprites/<set>.npz, .json  RGBA images and their captions
<work>/tokenizer/                the vocabulary
<work>/full/<network>.safetensors  float32 weights between the stages
<work>/model/                    the exported diffusers folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "src" / "inweave" / "models" / "emoji"
WORK = ROOT / "build" / "embedded"


def add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, default=WORK, help="folder shared by the stages (default: build/embedded)")


def npm_folder(work: Path, package: str) -> Path:
    return work / "npm" / package


def sprite_file(work: Path, name: str) -> Path:
    return work / "sprites" / f"{name}.npz"


def weights_file(work: Path, network: str) -> Path:
    return work / "full" / f"{network}.safetensors"
