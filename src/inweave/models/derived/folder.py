"""The folder of a pipeline that no family knows, as a blueprint with a derived family.

    model_index.json   "_class_name": a pipeline of the installed diffusers, never code of the folder
    networks           models of diffusers and transformers, with configurations as data and weights as safetensors

To derive, the text encoders are loaded and run on one caption. Then their weights are dropped: placeholders repeat
what they answered. The denoiser and the autoencoder have no weights here at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inweave.errors import FormatError
from inweave.files.paths import is_file
from inweave.models.blueprint import Blueprint, NetworkBlueprint, check_complete
from inweave.models.configuration import library_errors, read_config
from inweave.models.construct import on_meta
from inweave.models.derived.classes import network_class, pipeline_class, tokenizer_class
from inweave.models.derived.derive import derive
from inweave.models.derived.family import DerivedFamily
from inweave.models.derived.proof import TEXTS, reference_size
from inweave.models.derived.recording import Shapes, record
from inweave.models.families import families, network_classes
from inweave.models.families.base import ModelView, Network
from inweave.models.folder import NETWORKS, weights_of
from inweave.models.lazy_imports import defer_imports
from inweave.models.naming import under_names_of
from inweave.models.samplers import checked_scheduler, own_scheduler
from inweave.models.tokenizers import make_tokenizer
from inweave.models.vae import LatentSpace
from inweave.weights.build import build, stored_bytes
from inweave.weights.packed import open_source

LARGE = 2 << 30  # bytes of text encoders beyond which they are loaded in half precision
_known: dict[tuple[str, float], Blueprint] = {}


def is_unknown_pipeline(folder: Path, index: Mapping[str, Any]) -> bool:
    """Return whether no family runs the networks of a folder, whose classes the libraries have."""
    own = {name for family in families() for name in (family.pipeline, family.inpaint_pipeline)}
    if index.get("_class_name") in own or pipeline_class(index.get("_class_name")) is None:
        return False
    libraries: dict[str, Any] = {}
    for part, entry in index.items():
        if (part in NETWORKS or part.startswith("text_encoder")) and isinstance(entry, list):
            libraries[str(entry[1])] = entry[0]
            if part in ("transformer", "unet") and is_file(folder / part / "config.json"):
                config = read_config(folder / part / "config.json")
                if not any(family.recognizes(str(entry[1]), config) for family in families()):
                    libraries[""] = ""
    known = network_classes()
    if all(name in known for name in libraries):
        return False
    return all(network_class(library, name) is not None for name, library in libraries.items() if name)


def open_pipeline(folder: Path, name: str, index: Mapping[str, Any]) -> Blueprint:
    """Return the blueprint of a pipeline's folder.

    Raises:
        FormatError: what about it cannot be derived, by name.
    """
    key = (str(folder), (folder / "model_index.json").stat().st_mtime)
    if key not in _known:
        _known.clear()  # one at a time: a configuration that changed is another model
        _known[key] = _open(folder, name, index)
    return _known[key]


def _open(folder: Path, name: str, index: Mapping[str, Any]) -> Blueprint:
    kind = _pipeline_class(folder, index)
    networks: dict[str, NetworkBlueprint] = {}
    makers: dict[str, Callable[[], Any]] = {}
    declared: list[Network] = []
    for part, library, class_name in _entries(index):
        if part in ("transformer", "unet", "vae") or part.startswith("text_encoder"):
            if network_class(library, class_name) is None:
                raise FormatError(f"{folder / part}: {class_name!r:.80} is not a network of diffusers or transformers")
            declared.append(Network(part, class_name, library))
            config = read_config(folder / part / "config.json")
            networks[part] = NetworkBlueprint(part, class_name, config, open_source(weights_of(folder / part)), library)
        elif part.startswith("tokenizer"):
            makers[part] = _tokenizer(folder / part, class_name)
        elif part != "scheduler" and part not in kind._optional_components:
            raise FormatError(
                f"{folder}: {kind.__name__} needs the part {part!r} ({class_name}), which is not run here"
            )
    if missing := [part for part in ("vae",) if part not in networks]:
        raise FormatError(f"{folder}: {kind.__name__} has no {missing[0]}; images are trained in its latents")
    if len({"transformer", "unet"} & networks.keys()) != 1:
        raise FormatError(f"{folder}: {kind.__name__} has no transformer or unet, or both; one network denoises")
    if not any(part.startswith("text_encoder") for part in networks):
        raise FormatError(f"{folder}: {kind.__name__} has no text encoder")
    settings = folder / "scheduler" / "scheduler_config.json"
    document = read_config(settings)
    flow = str(document.get("_class_name")).startswith("FlowMatch") or bool(document.get("use_flow_sigmas"))
    flow = flow or document.get("prediction_type") == "flow_prediction"
    scheduler = checked_scheduler(str(settings), document, flow=flow)
    options = {key: index[key] for key in inspect.signature(kind.__init__).parameters if _is_plain(index.get(key))}
    family = _derived(kind, networks, makers, scheduler, options, declared)
    evidence = (
        f"model_index.json names {kind.__name__}; derived from diffusers' pipeline:",
        *family.derivation.lines(),
    )
    blueprint = Blueprint(name, family, networks, makers, scheduler, folder, None, options, evidence)
    check_complete(blueprint)
    return blueprint


def _derived(
    kind: Any,
    parts: Mapping[str, NetworkBlueprint],
    makers: Mapping[str, Callable[[], Any]],
    scheduler: Mapping[str, Any],
    options: Mapping[str, Any],
    declared: list[Network],
) -> DerivedFamily:
    networks = {folder: on_meta(part).eval() for folder, part in parts.items()}
    encoders = {folder: network for folder, network in networks.items() if folder.startswith("text_encoder")}
    sources = {folder: under_names_of(network, parts[folder].source) for folder, network in encoders.items()}
    total = sum(stored_bytes(source, each) for source in sources.values() for each in source.names())
    dtype = torch.bfloat16 if total > LARGE else torch.float32
    for folder, encoder in encoders.items():
        build(encoder, sources[folder], device="cpu", dtype=dtype)
    tokenizers = {folder: make() for folder, make in makers.items()}
    schedule = own_scheduler(scheduler)

    def assembled(model: ModelView, device: torch.device) -> Any:
        parts = {**model.networks, **model.tokenizers, "scheduler": own_scheduler(scheduler)}
        return assemble(kind, parts, options, device)

    pipe = assemble(kind, {**networks, **tokenizers, "scheduler": schedule}, options, torch.device("cpu"))
    denoiser = networks["transformer" if "transformer" in networks else "unet"]
    derivation = derive(pipe, denoiser)
    shapes = Shapes(denoiser)
    size = reference_size(LatentSpace.of(pipe.vae.config).scale)
    answers = list(_answers(pipe, shapes, encoders, size, derivation.strength))
    for encoder, outputs in zip(encoders.values(), answers, strict=True):
        _placeholder(encoder, outputs)
    record(pipe, shapes, TEXTS[:1], size, derivation.strength, calls=1)  # without them
    return DerivedFamily(derivation, (pipe, shapes), declared, assembled)


def assemble(kind: Any, parts: Mapping[str, Any], options: Mapping[str, Any], device: torch.device) -> Any:
    """Return a pipeline of these parts that runs on ``device``; parts it has and nobody gave are None."""
    expected, _ = kind._get_signature_keys(kind)
    place = property(lambda self: device)
    with library_errors(f"{kind.__name__}: it cannot be made of these parts"), defer_imports():
        running = type(kind.__name__, (kind,), {"_execution_device": place, "device": place})
        known = inspect.signature(kind.__init__).parameters
        return running(**{part: parts.get(part) for part in expected if part in known}, **options)


def _answers(
    pipe: Any, shapes: Shapes, encoders: Mapping[str, nn.Module], size: tuple[int, int], strength: float
) -> Iterator[list[Any]]:
    """Yield what each text encoder answered in a run on one text."""
    outputs: dict[str, list[Any]] = {folder: [] for folder in encoders}
    handles = [
        encoder.register_forward_hook(lambda module, inputs, output, store=outputs[folder]: store.append(output))
        for folder, encoder in encoders.items()
    ]
    try:
        record(pipe, shapes, TEXTS[:1], size, strength, calls=1)
    finally:
        for handle in handles:
            handle.remove()
    yield from outputs.values()


def _placeholder(encoder: nn.Module, outputs: list[Any]) -> None:
    """Drop an encoder's weights; calls of it repeat ``outputs``."""
    repeated = cycle(outputs)
    encoder.to("meta")
    vars(encoder)["forward"] = lambda *args, **options: next(repeated)
    kind = type(encoder)
    encoder.__class__ = type(kind.__name__, (kind,), {"device": property(lambda self: torch.device("cpu"))})


def _pipeline_class(folder: Path, index: Mapping[str, Any]) -> Any:
    kind = pipeline_class(index.get("_class_name"))
    if kind is None:
        raise FormatError(
            f"{folder}: {index.get('_class_name')!r:.80} is not a pipeline of the installed diffusers; a newer version "
            "may have it, and code of the folder is never run"
        )
    return kind


def _tokenizer(folder: Path, class_name: str) -> Callable[[], Any]:
    kind = tokenizer_class(class_name)
    if kind is None:
        raise FormatError(f"{folder}: {class_name!r:.80} is not a tokenizer of the installed transformers")
    return partial(make_tokenizer, folder, kind)


def _entries(index: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for part, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(each, str) for each in entry):
            yield part, entry[0], entry[1]


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)
