"""diffusers' own pipeline of a model folder, to compare images and speed with."""

from __future__ import annotations

import os
from typing import Any

import torch


def library_pipeline(
    folder: str | os.PathLike[str], device: torch.device, dtype: torch.dtype, *, compiled: bool = False
) -> Any:
    """Return diffusers' pipeline; ``compiled``: its denoiser by `torch.compile`, with CUDA graphs."""
    import diffusers

    library: Any = diffusers.DiffusionPipeline
    pipe = library.from_pretrained(folder, torch_dtype=dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    if compiled:
        part = "unet" if hasattr(pipe, "unet") else "transformer"
        pipe.register_modules(**{part: torch.compile(getattr(pipe, part), mode="reduce-overhead")})
    return pipe
