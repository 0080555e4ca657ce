"""inweave: one LoRA system. The base model is the warp, an adapter is the weft.

Read adapter files, in any dialect:

    adapter = inweave.load("style.safetensors")
    facts = inweave.inspect("style.safetensors")                  # dialect, algorithm, rank, base model, trigger words
    verdict = inweave.check(adapter, base="sdxl")                 # where every tensor goes, or what does not fit
    inweave.convert("style.safetensors", "out.safetensors", to="diffusers")

Weave them into a model's weights, in place or while it loads:

    weaver = inweave.Weaver(pipeline)                             # a diffusers pipeline, or {"unet": unet, ...}
    weaver.apply([("style.safetensors", 0.8)])                    # in milliseconds; weaver.apply([]): the base
    source = inweave.MergedSource(inweave.FileSource("model.safetensors"), ["style.safetensors:0.8"])
    inweave.build(model, source)                                  # each tensor is merged as it is read

Layers for any torch model, for training and for switching at run time:

    inweave.inject(model, rank=16, targets=["to_q", "to_v"])      # new, trainable adapters
    inweave.attach(model, adapter)                                # adapters that exist already
    inweave.merge(model); inweave.unmerge(model)                  # restores the original bits
    inweave.save(inweave.collect(model), "mine")                  # a PEFT folder; "mine.safetensors": a diffusion LoRA

Generate images and train adapters:

    pipe = inweave.pipeline("inweave/emoji", loras=["pixel:0.8"])
    pipe("a red apple", seed=7).save("apple.png")
    inweave.train(inweave.TrainConfig.load("style.toml"))

Offline, from file to file:

    inweave.bake("model.safetensors", ["style.safetensors:0.8"], "merged.safetensors")
    inweave.extract("tuned.safetensors", "base.safetensors", "lora.safetensors", rank=32)
    inweave.resize("style.safetensors", "small.safetensors", rank=8)

Everything raised on purpose is an `InweaveError`. Names are imported when first used: `import inweave` is cheap and
never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inweave.version import __version__ as __version__

#: module -> the public names it holds; the imports for type checkers below and `__all__` repeat it, and a test compares
#: them
_EXPORTS = {
    # read: adapter files
    "inweave.adapter": "Adapter",
    "inweave.models.hub": "load",
    "inweave.exchange.inspect": "Facts inspect",
    "inweave.exchange.check": "Verdict check",
    "inweave.exchange.convert": "Conversion convert save",
    "inweave.exchange.hashes": "Hashes hash_file",
    # weave: adapters in a model's weights
    "inweave.weights.weaver": "Weaver",
    "inweave.weights.stack": "Strength",
    "inweave.exchange.resolve": "resolve",
    "inweave.targets.index": "ModelIndex",
    "inweave.targets.plan": "Plan",
    "inweave.weights.networks": "index_of",
    "inweave.weights.source": "DictSource FileSource TensorSpec WeightSource",
    "inweave.weights.merged": "MergedSource",
    "inweave.weights.build": "build",
    # layers: adapters on live modules
    "inweave.layers": (
        "AdapterSpec LayerKind LinearKind ParameterCount activate attach collect disabled eject inject merge "
        "register_layer set_strength trainable trainable_parameters unmerge"
    ),
    "inweave.ops": "lora_backward",
    # generate
    "inweave.generate.config": "GenerateConfig LoraChoice",
    "inweave.generate.pipeline": "Pipeline pipeline",
    "inweave.generate.result": "Result",
    # train
    "inweave.training.config.schema": "TrainConfig",
    "inweave.training.output.result": "TrainResult",
    "inweave.training.session": "train",
    # offline: checkpoints and adapters on disk
    "inweave.weights.offline.commands": "bake extract resize",
    "inweave.weights.offline.bake": "Baked",
    "inweave.weights.offline.extract": "Extracted",
    "inweave.weights.offline.resize": "Resized",
    # errors
    "inweave.errors": (
        "AlreadyMerged BusyError CancelledError ConfigError ConflictError FormatError InweaveError LostPeerError "
        "MemoryBudgetError MergeStateError MissingError NotMerged RequestError TargetError"
    ),
}
#: package -> the extra that installs what it imports
_EXTRAS = {"weights": "torch", "layers": "torch", "ops": "torch", "generate": "generate", "training": "train"}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "Adapter", "AdapterSpec", "AlreadyMerged", "Baked", "BusyError", "CancelledError", "ConfigError", "ConflictError",
    "Conversion", "DictSource", "Extracted", "Facts", "FileSource", "FormatError", "GenerateConfig", "Hashes",
    "InweaveError", "LayerKind", "LinearKind", "LoraChoice", "LostPeerError", "MemoryBudgetError", "MergeStateError",
    "MergedSource", "MissingError", "ModelIndex", "NotMerged", "ParameterCount", "Pipeline", "Plan", "RequestError",
    "Resized", "Result", "Strength", "TargetError", "TensorSpec", "TrainConfig", "TrainResult", "Verdict", "Weaver",
    "WeightSource", "activate", "attach", "bake", "build", "check", "collect", "convert", "disabled", "eject",
    "extract", "hash_file", "index_of", "inject", "inspect", "load", "lora_backward", "merge", "pipeline",
    "register_layer", "resize", "resolve", "save", "set_strength", "train", "trainable", "trainable_parameters",
    "unmerge",
]  # fmt: skip

if TYPE_CHECKING:
    from inweave.adapter import Adapter
    from inweave.errors import (
        AlreadyMerged,
        BusyError,
        CancelledError,
        ConfigError,
        ConflictError,
        FormatError,
        InweaveError,
        LostPeerError,
        MemoryBudgetError,
        MergeStateError,
        MissingError,
        NotMerged,
        RequestError,
        TargetError,
    )
    from inweave.exchange.check import Verdict, check
    from inweave.exchange.convert import Conversion, convert, save
    from inweave.exchange.hashes import Hashes, hash_file
    from inweave.exchange.inspect import Facts, inspect
    from inweave.exchange.resolve import resolve
    from inweave.generate.config import GenerateConfig, LoraChoice
    from inweave.generate.pipeline import Pipeline, pipeline
    from inweave.generate.result import Result
    from inweave.layers import (
        AdapterSpec,
        LayerKind,
        LinearKind,
        ParameterCount,
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
        trainable_parameters,
        unmerge,
    )
    from inweave.models.hub import load
    from inweave.ops import lora_backward
    from inweave.targets.index import ModelIndex
    from inweave.targets.plan import Plan
    from inweave.training.config.schema import TrainConfig
    from inweave.training.output.result import TrainResult
    from inweave.training.session import train
    from inweave.weights.build import build
    from inweave.weights.merged import MergedSource
    from inweave.weights.networks import index_of
    from inweave.weights.offline.bake import Baked
    from inweave.weights.offline.commands import bake, extract, resize
    from inweave.weights.offline.extract import Extracted
    from inweave.weights.offline.resize import Resized
    from inweave.weights.source import DictSource, FileSource, TensorSpec, WeightSource
    from inweave.weights.stack import Strength
    from inweave.weights.weaver import Weaver


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOME:
        try:
            return getattr(import_module(_HOME[name]), name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("inweave"):
                raise
            extra = _EXTRAS.get(_HOME[name].split(".")[1], "train")
            advice = f'install with: pip install "inweave[{extra}]"'
            raise ModuleNotFoundError(f"inweave.{name} needs {error.name}; {advice}", name=error.name) from None
    raise AttributeError(f"module 'inweave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
