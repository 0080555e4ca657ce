"""Sample prompts of other trainers, as lines with kohya's flags: `a cat --n blurry --w 512 --h 768 --d 7`.

A value that holds for every sample is a setting of the run where there is one (`sample_seed`, ...), and a flag
otherwise. Negative prompts are left out where the model's sampler has none.
"""

from __future__ import annotations

import re
from typing import Any

from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, parse_number, parse_sizes

_FLAGS = {"width": "w", "height": "h", "seed": "d", "guidance": "l", "steps": "s"}


def sample_line(out: Translation, prompt: Any, negative: Any = "", **values: Any) -> str:
    """Return a prompt with its flags; ``values``: width, height, seed, guidance, steps, of which some are None."""
    line = " ".join(str(prompt).split())
    own = set(re.findall(r"(?:^| )--([A-Za-z]+)", line))  # flags of the prompt itself count first
    if not is_off(negative) and out.family != "flux" and "n" not in own:
        line += f" --n {' '.join(str(negative).split())}"
    for name, value in values.items():
        if value is not None and value != "" and _FLAGS[name] not in own and parse_number(value) >= 0:
            line += f" --{_FLAGS[name]} {parse_number(value):g}"
    return line


def parse_size(value: Any) -> dict[str, int]:
    """Return width and height of 512, "512" or "512x768"; of several sizes the first."""
    first = str(value).split(",")[0].strip()
    sides = parse_sizes(first.replace("x", ",").replace("X", ",")) if first else []
    return dict(zip(("width", "height"), (sides * 2)[:2], strict=True)) if sides else {}
