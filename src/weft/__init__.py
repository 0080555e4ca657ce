"""weft: one LoRA system. The base model is the warp, an adapter is the weft.

    import weft
    adapter = weft.load("style.safetensors")              # any dialect
    verdict = weft.check(adapter, base="sdxl")            # where every tensor goes, or what does not fit
    weft.convert("style.safetensors", "out.safetensors", to="diffusers")

    weaver = weft.Weaver({"unet": unet})                  # hot swap in a live model
    weaver.apply([("style.safetensors", 0.8)])
    weft.inject(model, rank=16, targets=["to_q", "to_v"]) # LoRA layers for any torch model
    pipe = weft.pipeline("weft/emoji", loras=["pixel:0.8"])
    pipe("a red apple", seed=7).save("apple.png")
    weft.train(weft.TrainConfig.load("style.toml"))       # a folder of pictures becomes an adapter

Names are imported when first used: `import weft` alone is cheap and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Adapter": "weft.adapter",
    "ConfigError": "weft.errors",
    "FormatError": "weft.errors",
    "GenerateConfig": "weft.generate.config",
    "MergedSource": "weft.weights.merged",
    "Strength": "weft.weights.stack",
    "TargetError": "weft.errors",
    "TrainConfig": "weft.train.config",
    "Weaver": "weft.weights.weaver",
    "WeftError": "weft.errors",
    "activate": "weft.layers",
    "build": "weft.weights.build",
    "check": "weft.exchange.check",
    "collect": "weft.layers",
    "convert": "weft.exchange.convert",
    "disabled": "weft.layers",
    "eject": "weft.layers",
    "hash_file": "weft.exchange.hashes",
    "inject": "weft.layers",
    "inspect": "weft.exchange.inspect",
    "load": "weft.exchange.load",
    "merge": "weft.layers",
    "pipeline": "weft.generate.pipeline",
    "resolve": "weft.targets.resolve",
    "save": "weft.exchange.convert",
    "trainable": "weft.layers",
    "unmerge": "weft.layers",
}

__all__ = [
    "Adapter",
    "ConfigError",
    "FormatError",
    "GenerateConfig",
    "MergedSource",
    "Strength",
    "TargetError",
    "TrainConfig",
    "Weaver",
    "WeftError",
    "activate",
    "build",
    "check",
    "collect",
    "convert",
    "disabled",
    "eject",
    "hash_file",
    "inject",
    "inspect",
    "load",
    "merge",
    "pipeline",
    "resolve",
    "save",
    "train",
    "trainable",
    "unmerge",
]

if TYPE_CHECKING:
    from weft.adapter import Adapter
    from weft.errors import ConfigError, FormatError, TargetError, WeftError
    from weft.exchange.check import check
    from weft.exchange.convert import convert, save
    from weft.exchange.hashes import hash_file
    from weft.exchange.inspect import inspect
    from weft.exchange.load import load
    from weft.generate.config import GenerateConfig
    from weft.generate.pipeline import pipeline
    from weft.layers import activate, collect, disabled, eject, inject, merge, trainable, unmerge
    from weft.targets.resolve import resolve
    from weft.train.config import TrainConfig
    from weft.weights.build import build
    from weft.weights.merged import MergedSource
    from weft.weights.stack import Strength
    from weft.weights.weaver import Weaver


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "train":  # the package itself, which can be called
        return import_module("weft.train")
    raise AttributeError(f"module 'weft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
