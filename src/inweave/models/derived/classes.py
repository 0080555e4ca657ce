"""The classes that a model_index.json may name: those of the installed libraries, never code of a folder."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from inweave.models.lazy_imports import defer_imports

#: what a call must take, and the options of those that make videos
REQUEST = ("prompt", "width", "height", "num_inference_steps", "generator")
FRAMES = ("num_frames", "video_length")
NETWORKS = {"diffusers": "ModelMixin", "transformers": "PreTrainedModel"}


def network_class(library: Any, name: Any) -> Any:
    """Return the network of this name in a library, or beside a pipeline of diffusers; None if there is none."""
    if library in NETWORKS:
        return _class(library, name, NETWORKS[library])
    kinds = (_pipeline_part(library, name, *each) for each in NETWORKS.items())
    return next((kind for kind in kinds if kind is not None), None)


def network_module(library: str) -> str:
    """Return the module that a model_index.json means by this library."""
    return library if library in NETWORKS else f"diffusers.pipelines.{library}"


def pipeline_class(name: Any) -> Any:
    """Return diffusers' pipeline of this name; None if it has none."""
    return _class("diffusers", name, "DiffusionPipeline")


def obstacle(kind: Any) -> str:
    """Return why no family can be derived from a pipeline of this class, by its signatures; "": it may be possible."""
    parts = inspect.signature(kind.__init__).parameters
    call = inspect.signature(kind.__call__).parameters
    if frames := [name for name in FRAMES if name in call]:
        return f"makes videos ({frames[0]}); images are trained here"
    if missing := [name for name in REQUEST if name not in call]:
        return f"has no {', '.join(missing)} in a call"
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [name for name, each in call.items() if each.default is each.empty and each.kind not in free]
    if needed := [name for name in needed if name not in ("self", "prompt")]:
        return f"needs {', '.join(needed)} in a call; images are made from a text and a size"
    if "vae" not in parts:
        return "has no vae; images are trained in its latents"
    if "transformer" not in parts and "unet" not in parts:
        return "has no transformer and no unet, one of which denoises"
    return ""


def scheduler_class(name: Any) -> Any:
    """Return diffusers' scheduler of this name; None if it has none."""
    return _class("diffusers", name, "SchedulerMixin")


def guider_class(name: Any) -> Any:
    """Return diffusers' guider of this name; None if it has none."""
    return _class("diffusers", name, "BaseGuidance", "guiders")


def tokenizer_class(library: Any, name: Any) -> Any:
    """Return the tokenizer of this name in transformers, or beside a pipeline of diffusers; None if there is none."""
    if library == "transformers":
        return _class(library, name, "PreTrainedTokenizerBase")
    return _pipeline_part(library, name, "transformers", "PreTrainedTokenizerBase")


def processor_class(name: Any) -> Any:
    """Return the processor of texts and images of this name; None if transformers has none."""
    return _class("transformers", name, "ProcessorMixin")


def _pipeline_part(folder: Any, name: Any, library: str, base: str) -> Any:
    """Return the class of this name in a folder of diffusers' pipelines; None if it has none."""
    if not all(isinstance(each, str) and each.isidentifier() for each in (folder, name)):
        return None
    with defer_imports():
        if not hasattr(import_module("diffusers.pipelines"), folder):
            return None
        kind = getattr(import_module(f"diffusers.pipelines.{folder}"), name, None)
        return kind if isinstance(kind, type) and issubclass(kind, getattr(import_module(library), base)) else None


def _class(library: str, name: Any, base: str, module: str = "") -> Any:
    if not isinstance(name, str) or not name.isidentifier():
        return None
    with defer_imports():
        package = import_module(library)
        parent = getattr(import_module(f"{library}.{module}") if module else package, base)
        kind = getattr(package, name, None)
        return kind if isinstance(kind, type) and issubclass(kind, parent) else None
