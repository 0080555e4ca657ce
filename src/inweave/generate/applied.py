"""A LoRA as a request uses it: what it is, how strong it is, what it changes and how long that took."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.adapter import Adapter
from inweave.files.paths import is_file
from inweave.generate.find import hashes_of
from inweave.targets.plan import Plan


@dataclass(frozen=True, slots=True)
class AppliedLora:
    """One LoRA of a request: its file, its strengths, and how much of the model it changes."""

    name: str
    path: Path
    te: float
    unet: float
    in_prompt: bool
    modules: int
    tensors: int
    source: (
        Path | Adapter | Plan
    )  # what is woven: the file, the adapter with an alpha of the request's, or a part of it
    alpha: float | dict[str, float] | None = None
    warnings: tuple[str, ...] = ()
    file_modules: int = 0  # of which `modules` have a place in the model
    plan_seconds: float = 0.0  # to read it, and to find the place of each tensor

    def as_dict(self) -> dict[str, Any]:
        hashes = hashes_of(self.path) if is_file(self.path) else None
        return {
            "name": self.name, "te": self.te, "unet": self.unet, "in_prompt": self.in_prompt,
            "modules": self.modules, "tensors": self.tensors,
            "sha256": hashes.sha256 if hashes else None, "autov2": hashes.autov2 if hashes else None,
            "autov3": hashes.autov3 if hashes else None,
        }  # fmt: skip
