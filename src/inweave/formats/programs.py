"""What other programs make of a written file: notes for the dialects and algorithms they read differently.

Tried with their own loaders: kohya files of LoRA load whole and equal in ComfyUI, Forge, A1111 and sd-scripts for SD 1.5 to
Flux; the table in docs/formats.md lists who reads what. A note is printed only where a common program reads the file
differently from what was written, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from inweave.adapter import Entry
from inweave.formats.spell import Target

_READERS = {
    "comfy": "these names are read by ComfyUI and Forge; A1111, sd-scripts and diffusers do not read them: for those write kohya",
    "bfl": "these names are read by BFL's own code, and by ComfyUI and diffusers for Flux; for other programs write kohya",
    "onetrainer": "these names are read by OneTrainer and ComfyUI; for A1111 and sd-scripts write kohya",
}


def program_notes(dialect: str, entries: Sequence[Entry], target: Target) -> list[str]:
    """What to know about ``entries`` written in ``dialect``, for those who load them elsewhere."""
    notes = []
    if dialect in _READERS:
        notes.append(_READERS[dialect])
    if dialect == "diffusers" and target.denoiser == "unet":
        notes.append("ComfyUI does not find a UNet's attention under these names: for it write kohya or comfy")
    scales = sorted({entry.factors.scale for entry in entries if entry.factors.rank and entry.factors.scale != 1.0})
    if dialect == "diffusers" and scales:
        listed = ", ".join(f"{scale:g}" for scale in scales[:3]) + (", ..." if len(scales) > 3 else "")
        notes.append(
            f"the scale (alpha / rank = {listed}) is in the metadata alone, which diffusers reads; ComfyUI and others ignore it and "
            "apply the file at scale 1: for them write kohya or comfy"
        )
    if dialect in ("kohya", "comfy", "onetrainer") and any(entry.factors.magnitude is not None for entry in entries):
        notes.append(
            "DoRA: ComfyUI and Forge divide by other norms, so that the change differs by some percent, and A1111 takes the "
            "magnitudes for those of the inputs, which destroys the model; diffusers and PEFT read it as trained (write diffusers or peft)"
        )
    return notes
