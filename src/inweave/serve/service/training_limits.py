"""Limits of the settings that a request may have: what one caller may take of the memory and the time of all.

    a number at `name`, at any depth     <= LIMITS[name], else <= MAX_NUMBER
    a text                               <= MAX_TEXT characters; with numbers where LIMITS has one ("512x768"): as these
    a list or a table                    <= ITEMS[name] items, else <= MAX_ITEMS, nested at most MAX_DEPTH times

The command line has none of them: its user has the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from inweave.checked import for_message
from inweave.errors import Problem

MAX_NUMBER = 10_000_000
MAX_TEXT = 10_000
MAX_ITEMS = 1_000
MAX_DEPTH = 4
ITEMS = {"sample_prompts": 100, "optimizer_args": 50}
LIMITS: dict[str, float] = {
    "rank": 1024, "conv_rank": 1024, "lokr_factor": 1024, "batch_size": 1024, "gradient_accumulation": 65_536,
    "resolution": 4096, "bucket_step": 1024, "min_bucket": 8192, "max_bucket": 8192, "caption_variants": 100,
    "max_token_length": 7500, "max_length": 262_144, "multires_noise_iterations": 100, "cosine_cycles": 10_000,
    "epochs": 1_000_000, "sample_steps": 1000, "seed": 2**63 - 1, "sample_seed": 2**63 - 1,
}  # fmt: skip


def limit_problems(settings: Mapping[str, Any]) -> list[Problem]:
    """Return the settings that are beyond a limit."""
    return [problem for name, value in settings.items() for problem in _problems(name, name, value, 1)]


def _problems(field: str, name: str, value: object, depth: int) -> Iterator[Problem]:
    """Yield what is too large in a value; ``name`` is the setting it belongs to, ``field`` its place."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            yield Problem(field, f"at most {MAX_TEXT:,} characters here, got {len(value):,}")
        elif name in LIMITS and any(number > LIMITS[name] for number in _numbers_in(value)):
            yield Problem(field, f"at most {LIMITS[name]:,} here, got {for_message(value)}")
    elif isinstance(value, Mapping | list | tuple):
        most = ITEMS.get(name, MAX_ITEMS)
        if depth > MAX_DEPTH or len(value) > most:
            yield Problem(field, f"at most {most:,} items here, nested {MAX_DEPTH} times, got {len(value):,}")
            return
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in pairs:
            inner = key if isinstance(key, str) else name
            yield from _problems(f"{field}.{str(key)[:100]}", inner, each, depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value > LIMITS.get(name, MAX_NUMBER):
        yield Problem(field, f"at most {LIMITS.get(name, MAX_NUMBER):,} here, got {for_message(value)}")


def _numbers_in(text: str) -> Iterator[float]:
    """Yield the numbers of a text that a setting reads as such: "65536", "512x768"."""
    for part in re.split("[,x]", text):
        try:
            yield float(part)
        except ValueError:
            continue
