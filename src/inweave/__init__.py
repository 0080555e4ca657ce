"""inweave: one LoRA system. The base model is the warp, an adapter is the weft.

    import inweave
    adapter = inweave.load("style.safetensors")              # any dialect
    verdict = inweave.check(adapter, base="sdxl")            # where every tensor goes, or what does not fit
    inweave.convert("style.safetensors", "out.safetensors", to="diffusers")

    weaver = inweave.Weaver({"unet": unet})                  # hot swap in a live model
    weaver.apply([("style.safetensors", 0.8)])
    inweave.inject(model, rank=16, targets=["to_q", "to_v"]) # LoRA layers for any torch model
    pipe = inweave.pipeline("inweave/emoji", loras=["pixel:0.8"])
    pipe("a red apple", seed=7).save("apple.png")
    inweave.train(inweave.TrainConfig.load("style.toml"))       # a folder of pictures becomes an adapter

Names are imported when first used: `import inweave` alone is cheap and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Adapter": "inweave.adapter",
    "ConfigError": "inweave.errors",
    "FormatError": "inweave.errors",
    "GenerateConfig": "inweave.generate.config",
    "MergedSource": "inweave.weights.merged",
    "Strength": "inweave.weights.stack",
    "TargetError": "inweave.errors",
    "TrainConfig": "inweave.training.config.schema",
    "Weaver": "inweave.weights.weaver",
    "InweaveError": "inweave.errors",
    "activate": "inweave.layers",
    "build": "inweave.weights.build",
    "check": "inweave.exchange.check",
    "collect": "inweave.layers",
    "convert": "inweave.exchange.convert",
    "disabled": "inweave.layers",
    "eject": "inweave.layers",
    "hash_file": "inweave.exchange.hashes",
    "inject": "inweave.layers",
    "inspect": "inweave.exchange.inspect",
    "load": "inweave.exchange.load",
    "merge": "inweave.layers",
    "pipeline": "inweave.generate.pipeline",
    "resolve": "inweave.targets.resolve",
    "save": "inweave.exchange.convert",
    "train": "inweave.training.session",
    "trainable": "inweave.layers",
    "unmerge": "inweave.layers",
}

__all__ = [
    "Adapter",
    "ConfigError",
    "FormatError",
    "GenerateConfig",
    "InweaveError",
    "MergedSource",
    "Strength",
    "TargetError",
    "TrainConfig",
    "Weaver",
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
    from inweave.adapter import Adapter
    from inweave.errors import ConfigError, FormatError, InweaveError, TargetError
    from inweave.exchange.check import check
    from inweave.exchange.convert import convert, save
    from inweave.exchange.hashes import hash_file
    from inweave.exchange.inspect import inspect
    from inweave.exchange.load import load
    from inweave.generate.config import GenerateConfig
    from inweave.generate.pipeline import pipeline
    from inweave.layers import activate, collect, disabled, eject, inject, merge, trainable, unmerge
    from inweave.targets.resolve import resolve
    from inweave.training.config.schema import TrainConfig
    from inweave.training.session import train
    from inweave.weights.build import build
    from inweave.weights.merged import MergedSource
    from inweave.weights.stack import Strength
    from inweave.weights.weaver import Weaver


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'inweave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
