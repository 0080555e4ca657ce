"""weft: one LoRA system. The base model is the warp, an adapter is the weft.

    import weft
    adapter = weft.load("style.safetensors")              # any dialect
    verdict = weft.check(adapter, base="sdxl")            # where every tensor goes, or what does not fit
    weft.convert("style.safetensors", "out.safetensors", to="diffusers")

Names are imported when first used: `import weft` alone is cheap and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Adapter": "weft.adapter",
    "FormatError": "weft.errors",
    "TargetError": "weft.errors",
    "WeftError": "weft.errors",
    "check": "weft.exchange.check",
    "convert": "weft.exchange.convert",
    "hash_file": "weft.exchange.hashes",
    "inspect": "weft.exchange.inspect",
    "load": "weft.exchange.load",
    "resolve": "weft.targets.resolve",
    "save": "weft.exchange.convert",
}

__all__ = [
    "Adapter",
    "FormatError",
    "TargetError",
    "WeftError",
    "check",
    "convert",
    "hash_file",
    "inspect",
    "load",
    "resolve",
    "save",
]

if TYPE_CHECKING:
    from weft.adapter import Adapter
    from weft.errors import FormatError, TargetError, WeftError
    from weft.exchange.check import check
    from weft.exchange.convert import convert, save
    from weft.exchange.hashes import hash_file
    from weft.exchange.inspect import inspect
    from weft.exchange.load import load
    from weft.targets.resolve import resolve


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
