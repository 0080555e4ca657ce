"""Rendered sprites in memory: premultiplied RGBA in [0, 1], (n, 4, size, size), and the emoji of each.

premultiplied:  p = (alpha * rgb, alpha)      over a background b:  p_rgb + (1 - p_alpha) * b
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tools.embedded.captions import Emoji, from_dict
from tools.embedded.places import sprite_file


@dataclass(frozen=True, slots=True)
class Sprites:
    images: torch.Tensor
    emojis: list[Emoji]

    def __len__(self) -> int:
        return len(self.emojis)


def read_set(work: Path, name: str) -> tuple[NDArray[np.uint8], list[Emoji]]:
    """Read the rendered images of a set, uint8 (n, size, size, 4) with straight alpha, and their emoji."""
    path = sprite_file(work, name)
    if not path.exists():
        raise SystemExit(f"{path}: not there; run python -m tools.embedded.render --sets {name} first")
    with np.load(path, allow_pickle=False) as archive:
        images = archive["images"]
    return images, [from_dict(row) for row in json.loads(path.with_suffix(".json").read_text())]


def load_sprites(work: Path, name: str, device: torch.device, limit: int = 0) -> Sprites:
    """Load a set on ``device``; with ``limit`` that many images without skin tone, spread over the whole set."""
    images, emojis = read_set(work, name)
    if limit:
        plain = [i for i, emoji in enumerate(emojis) if emoji.tone == 0]
        chosen = [plain[int(i)] for i in np.linspace(0, len(plain) - 1, min(limit, len(plain)))]
        images, emojis = images[chosen], [emojis[i] for i in chosen]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    size = images.shape[1]
    result = torch.empty((len(emojis), 4, size, size), dtype=dtype, device=device)
    for start in range(0, len(emojis), 512):
        part = torch.from_numpy(images[start : start + 512]).to(device).permute(0, 3, 1, 2).float() / 255
        part[:, :3] *= part[:, 3:]
        result[start : start + 512] = part
    return Sprites(result, emojis)
