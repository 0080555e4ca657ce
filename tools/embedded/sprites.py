"""Rendered sprites on disk: what the datasets that come with the weights are made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tools.embedded.captions import Emoji, from_dict
from tools.embedded.places import sprite_file


def read_set(work: Path, name: str) -> tuple[NDArray[np.uint8], list[Emoji]]:
    """Read the rendered images of a set, uint8 (n, size, size, 4) with straight alpha, and their emoji."""
    path = sprite_file(work, name)
    if not path.exists():
        raise SystemExit(f"{path}: not there; run python -m tools.embedded.render --sets {name} first")
    with np.load(path, allow_pickle=False) as archive:
        images = archive["images"]
    return images, [from_dict(row) for row in json.loads(path.with_suffix(".json").read_text())]
