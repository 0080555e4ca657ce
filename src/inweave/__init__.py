"""inweave: one LoRA system. The base model is the warp, an adapter is the weft.

    import inweave
    adapter = inweave.load("style.safetensors")              # any dialect
    verdict = inweave.check(adapter, base="sdxl")            # where every tensor goes, or what does not fit
    inweave.convert("style.safetensors", "out.safetensors", to="diffusers")

    weaver = inweave.Weaver({"unet": unet})                  # hot swap in a live model
    weaver.apply([("style.safetensors", 0.8)])
    inweave.inject(model, rank=16, targets=["to_q", "to_v"]) # new LoRA layers for any torch model
    inweave.attach(model, "style.safetensors", name="style") # or those of a file
    pipe = inweave.pipeline("inweave/emoji", loras=["pixel:0.8"])
    pipe("a red apple", seed=7).save("apple.png")
    inweave.train(inweave.TrainConfig.load("style.toml"))       # a folder of pictures becomes an adapter

Names are imported when first used: `import inweave` alone is cheap and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

#: module -> the public names it holds; the imports for type checkers below and `__all__` repeat it, and a test compares them
_EXPORTS = {
    "inweave.errors": "AlreadyMerged CancelledError ConfigError FormatError InweaveError LostPeerError MemoryBudgetError MergeStateError NotMerged RequestError TargetError",
    "inweave.adapter": "Adapter",
    "inweave.exchange.load": "load",
    "inweave.exchange.inspect": "inspect",
    "inweave.exchange.check": "check",
    "inweave.exchange.convert": "convert save",
    "inweave.exchange.hashes": "hash_file",
    "inweave.exchange.resolve": "resolve",
    "inweave.targets.index": "ModelIndex",
    "inweave.targets.plan": "Plan",
    "inweave.weights.source": "DictSource FileSource WeightSource",
    "inweave.weights.networks": "index_of",
    "inweave.weights.offline.commands": "bake extract resize",
    "inweave.weights.weaver": "Weaver",
    "inweave.weights.stack": "Strength",
    "inweave.weights.merged": "MergedSource",
    "inweave.weights.build": "build",
    "inweave.layers": "AdapterSpec LayerKind LinearKind activate attach collect disabled eject inject merge register_layer set_strength trainable unmerge",
    "inweave.generate.config": "GenerateConfig",
    "inweave.generate.pipeline": "pipeline",
    "inweave.training.config.schema": "TrainConfig",
    "inweave.training.session": "train",
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "Adapter",
    "AdapterSpec",
    "AlreadyMerged",
    "CancelledError",
    "ConfigError",
    "DictSource",
    "FileSource",
    "FormatError",
    "GenerateConfig",
    "InweaveError",
    "LayerKind",
    "LinearKind",
    "LostPeerError",
    "MemoryBudgetError",
    "MergeStateError",
    "MergedSource",
    "ModelIndex",
    "NotMerged",
    "Plan",
    "RequestError",
    "Strength",
    "TargetError",
    "TrainConfig",
    "Weaver",
    "WeightSource",
    "activate",
    "attach",
    "bake",
    "build",
    "check",
    "collect",
    "convert",
    "disabled",
    "eject",
    "extract",
    "hash_file",
    "index_of",
    "inject",
    "inspect",
    "load",
    "merge",
    "pipeline",
    "register_layer",
    "resize",
    "resolve",
    "save",
    "set_strength",
    "train",
    "trainable",
    "unmerge",
]

if TYPE_CHECKING:
    from inweave.adapter import Adapter
    from inweave.errors import (
        AlreadyMerged,
        CancelledError,
        ConfigError,
        FormatError,
        InweaveError,
        LostPeerError,
        MemoryBudgetError,
        MergeStateError,
        NotMerged,
        RequestError,
        TargetError,
    )
    from inweave.exchange.check import check
    from inweave.exchange.convert import convert, save
    from inweave.exchange.hashes import hash_file
    from inweave.exchange.inspect import inspect
    from inweave.exchange.load import load
    from inweave.exchange.resolve import resolve
    from inweave.generate.config import GenerateConfig
    from inweave.generate.pipeline import pipeline
    from inweave.layers import (
        AdapterSpec,
        LayerKind,
        LinearKind,
        activate,
        attach,
        collect,
        disabled,
        eject,
        inject,
        merge,
        register_layer,
        set_strength,
        trainable,
        unmerge,
    )
    from inweave.targets.index import ModelIndex
    from inweave.targets.plan import Plan
    from inweave.training.config.schema import TrainConfig
    from inweave.training.session import train
    from inweave.weights.build import build
    from inweave.weights.merged import MergedSource
    from inweave.weights.networks import index_of
    from inweave.weights.offline.commands import bake, extract, resize
    from inweave.weights.source import DictSource, FileSource, WeightSource
    from inweave.weights.stack import Strength
    from inweave.weights.weaver import Weaver


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'inweave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
