"""All drawings of all sets in memory: premultiplied RGBA in [0, 1], (n, 4, size, size), the emoji and the set of each.

premultiplied:  p = (alpha * rgb, alpha)      over a background b:  p_rgb + (1 - p_alpha) * b

A subject is drawn by its weight and then one of the sets that have it, each as likely, so that no style is more
frequent because its set is larger.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from tools.embedded.captions import Emoji
from tools.embedded.pack import packed_file, unpack
from tools.embedded.render import TRAINED


class Library:
    """The sprites of several sets."""

    def __init__(self, images: torch.Tensor, emojis: list[Emoji], sets: list[str]) -> None:
        self.images, self.emojis, self.sets = images, emojis, sets
        self._rows: dict[str, list[int]] = {}
        self._in_set: dict[str, list[int]] = {}
        for row, (emoji, name) in enumerate(zip(emojis, sets, strict=True)):
            self._rows.setdefault(emoji.code, []).append(row)
            self._in_set.setdefault(name, []).append(row)
        self._codes = list(self._rows)
        self._sums = list(accumulate(emojis[self._rows[code][0]].weight for code in self._codes))

    def __len__(self) -> int:
        return len(self.emojis)

    def name(self, row: int) -> str:
        return self.emojis[row].name

    def row(self, rng: random.Random, of_set: str | None = None) -> int:
        """Draw a drawing, of one set or of any."""
        if of_set is not None:
            rows = self._in_set[of_set]
            while True:  # by weight, within the set
                row = rng.choice(rows)
                if rng.random() < self.emojis[row].weight:
                    return row
        place = min(bisect_left(self._sums, rng.random() * self._sums[-1]), len(self._codes) - 1)
        return rng.choice(self._rows[self._codes[place]])


def load_library(work: Path, device: torch.device, limit: int = 0, names: tuple[str, ...] = TRAINED) -> Library:
    """Load packed sets on ``device``; with ``limit`` that many images of each without skin tone, spread over it."""
    parts, emojis, sets = [], [], []
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    for name in names:
        images, own = unpack(packed_file(work, name))
        if limit:
            plain = [i for i, emoji in enumerate(own) if emoji.tone == 0]
            chosen = [plain[int(i)] for i in np.linspace(0, len(plain) - 1, min(limit, len(plain)))]
            images, own = images[chosen], [own[i] for i in chosen]
        for start in range(0, len(own), 512):
            part = torch.tensor(images[start : start + 512]).to(device).permute(0, 3, 1, 2).float() / 255
            part[:, :3] *= part[:, 3:]
            parts.append(part.to(dtype))
        emojis += own
        sets += [name] * len(own)
    return Library(torch.cat(parts), emojis, sets)
