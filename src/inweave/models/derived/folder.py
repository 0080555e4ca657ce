"""The folder of a pipeline that no family knows, as a blueprint with a derived family.

    model_index.json   "_class_name": a pipeline of the installed diffusers, never code of the folder
    networks           models of diffusers and transformers, with configurations as data and weights as safetensors
    the others         tokenizers, processors (of text alone), guiders and the scheduler, by their settings

One network denoises (`transformer` or `unet`), `vae` encodes images, and all others are frozen. Optional parts that are
none of these are left out, by name: safety checkers, watermarks, models that rewrite a prompt.

To derive, the frozen networks are loaded and run on one caption. Then their weights are dropped: placeholders repeat
what they answered. The denoiser and the autoencoder have no weights here at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inweave.errors import FormatError
from inweave.files.paths import is_file
from inweave.files.stamps import Stamp, path_stamp
from inweave.models.blueprint import Blueprint, NetworkBlueprint
from inweave.models.configuration import read_config
from inweave.models.construct import on_meta
from inweave.models.derived.assemble import assemble, is_plain, make_guider, make_processor
from inweave.models.derived.classes import (
    guider_class,
    network_class,
    network_module,
    obstacle,
    pipeline_class,
    processor_class,
    tokenizer_class,
)
from inweave.models.derived.derive import derive
from inweave.models.derived.family import DerivedFamily
from inweave.models.derived.proof import TEXTS
from inweave.models.derived.recording import Shapes, record
from inweave.models.families import families, network_classes
from inweave.models.families.base import ModelView, Network
from inweave.models.folder import NETWORKS, weights_of
from inweave.models.naming import under_names_of
from inweave.models.samplers import own_scheduler, pipeline_scheduler
from inweave.models.tokenizers import check_vocabulary, make_tokenizer
from inweave.weights.build import build, stored_bytes
from inweave.weights.packed import open_source

LARGE = 2 << 30  # bytes of text encoders beyond which they are loaded in half precision
DENOISERS = ("transformer", "unet")
#: the folder, the stamps of everything in it -> its blueprint
_known: dict[tuple[str, tuple[Stamp, ...]], Blueprint] = {}


def is_unknown_pipeline(folder: Path, index: Mapping[str, Any]) -> bool:
    """Return whether no family runs the networks of a folder, whose classes the libraries have."""
    own = {name for family in families() for name in (family.pipeline, family.inpaint_pipeline)}
    if index.get("_class_name") in own or pipeline_class(index.get("_class_name")) is None:
        return False
    known, foreign = network_classes(), False
    for part, library, name in _entries(index):
        if part in NETWORKS or part.startswith("text_encoder"):
            if network_class(library, name) is None:
                return False
            foreign = foreign or name not in known
            if part in DENOISERS and is_file(folder / part / "config.json"):
                config = read_config(folder / part / "config.json")
                foreign = foreign or not any(family.recognizes(name, config) for family in families())
    return foreign


def open_pipeline(folder: Path, name: str, index: Mapping[str, Any]) -> Blueprint:
    """Return the blueprint of a pipeline's folder.

    Raises:
        FormatError: what about it cannot be derived, by name.
    """
    key = str(folder), tuple(map(path_stamp, (folder, *sorted(filter(Path.is_dir, folder.iterdir())))))
    if key not in _known:
        _known.clear()  # one at a time: a folder that changed is another model
        _known[key] = _open(folder, name, index)
    return _known[key]


@dataclass(slots=True)
class _Parts:
    """The parts of a folder by how they are made; ``left_out``: those that are not."""

    networks: dict[str, NetworkBlueprint] = field(default_factory=dict)
    declared: list[Network] = field(default_factory=list)
    makers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    guiders: dict[str, Callable[..., Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def _open(folder: Path, name: str, index: Mapping[str, Any]) -> Blueprint:
    kind = _pipeline_class(folder, index)
    if reason := obstacle(kind):
        raise FormatError(f"{folder}: {kind.__name__} {reason}")
    parts = _parts(folder, kind, index)
    if "vae" not in parts.networks:
        raise FormatError(f"{folder}: it has no vae; images are trained in its latents")
    denoisers = [part for part in DENOISERS if part in parts.networks]
    if len(denoisers) != 1:
        raise FormatError(f"{folder}: {kind.__name__} has no transformer or unet, or both; one network denoises")
    own = parts.networks[denoisers[0]].class_name
    if others := [part for part, each in parts.networks.items() if each.class_name == own and part not in denoisers]:
        raise FormatError(
            f"{folder}: {kind.__name__} denoises with {', '.join((*denoisers, *others))}; one network should"
        )
    settings = folder / "scheduler" / "scheduler_config.json"
    scheduler = pipeline_scheduler(str(settings), read_config(settings))
    options = {key: index[key] for key in kind._get_signature_keys(kind)[1] if is_plain(index.get(key))}
    family = _derived(kind, parts, scheduler, options)
    if not family.derivation.shifts:
        vae = parts.networks["vae"]
        parts.networks["vae"] = replace(vae, config={**vae.config, "shift_factor": None})
    evidence = [
        f"model_index.json names {kind.__name__}; derived from diffusers' pipeline:", *family.derivation.lines(),
    ]  # fmt: skip
    if parts.left_out:
        evidence.append(f"left out   {', '.join(parts.left_out)}")
    # the family holds the tokenizers: what a pipeline does with them is its own
    return Blueprint(name, family, parts.networks, {}, scheduler, folder, None, options, tuple(evidence))


def _parts(folder: Path, kind: Any, index: Mapping[str, Any]) -> _Parts:
    parts = _Parts()
    for part, library, name in _entries(index):
        optional = part in kind._optional_components and part != "vae" and part not in DENOISERS
        if part == "scheduler":
            continue
        if network_class(library, name) is not None and not (optional and not part.startswith("text_encoder")):
            module = network_module(library)
            parts.declared.append(Network(part, name, module))
            config = read_config(folder / part / "config.json")
            source = open_source(weights_of(folder / part))
            parts.networks[part] = NetworkBlueprint(part, name, config, source, module)
        elif tokenizer_class(library, name) is not None:
            parts.makers[part] = partial(make_tokenizer, folder / part, tokenizer_class(library, name), chat=True)
        elif processor_class(name) is not None and library == "transformers":
            parts.makers[part] = partial(make_processor, folder / part, processor_class(name))
        elif guider_class(name) is not None:
            parts.guiders[part] = partial(make_guider, folder / part, guider_class(name))
        elif optional:
            parts.left_out.append(part)
        else:
            raise FormatError(f"{folder}: {kind.__name__} needs the part {part!r} ({name}), which is not run here")
    return parts


def _derived(kind: Any, parts: _Parts, scheduler: Mapping[str, Any], options: Mapping[str, Any]) -> DerivedFamily:
    networks = {folder: on_meta(part).eval() for folder, part in parts.networks.items()}
    _load_statistics(networks["vae"], parts.networks["vae"])
    encoders = {folder: network for folder, network in networks.items() if folder not in (*DENOISERS, "vae")}
    sources = {folder: under_names_of(network, parts.networks[folder].source) for folder, network in encoders.items()}
    total = sum(stored_bytes(source, each) for source in sources.values() for each in source.names())
    dtype = torch.bfloat16 if total > LARGE else torch.float32
    for folder, encoder in encoders.items():
        build(encoder, sources[folder], device="cpu", dtype=dtype)
    made = {folder: make() for folder, make in parts.makers.items()}
    for folder, tokenizer in made.items():
        reader = encoders.get(folder.replace("tokenizer", "text_encoder"))
        if hasattr(reader, "get_input_embeddings") and hasattr(tokenizer, "get_vocab"):
            check_vocabulary(f"{kind.__name__}: {folder}", tokenizer, reader)

    def assembled(model: ModelView, device: torch.device, guidance: float | None) -> Any:
        guiders = {folder: make(guidance) for folder, make in parts.guiders.items()}
        every = {**model.networks, **made, **guiders, "scheduler": own_scheduler(scheduler)}
        return assemble(kind, every, options, device)

    # without guiders, which would ask for a second prediction
    pipe = assemble(kind, {**networks, **made, "scheduler": own_scheduler(scheduler)}, options, torch.device("cpu"))
    denoiser = networks["transformer" if "transformer" in networks else "unet"]
    derivation = derive(pipe, denoiser)
    shapes = Shapes(denoiser)
    size = derivation.reference
    answers = list(_answers(pipe, shapes, encoders, size, derivation.strength))
    for encoder, outputs in zip(encoders.values(), answers, strict=True):
        _placeholder(encoder, outputs)
    record(pipe, shapes, TEXTS[:1], size, derivation.strength, calls=1)  # without them
    strengths = [getattr(make(None), "guidance_scale", None) for make in parts.guiders.values()]
    strength = next((each for each in strengths if each is not None), None)
    return DerivedFamily(derivation, (pipe, shapes), parts.declared, assembled, strength)


def _load_statistics(vae: nn.Module, part: NetworkBlueprint) -> None:
    """Load the mean and variance of latents where they are among the weights of an autoencoder."""
    norm = getattr(vae, "bn", None)
    if isinstance(norm, nn.BatchNorm2d):
        for name in ("running_mean", "running_var"):
            norm._buffers[name] = part.source.get(f"bn.{name}", dtype=torch.float32)


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


def _entries(index: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (part, library, class) of a model_index.json."""
    for part, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(each, str) for each in entry):
            yield part, entry[0], entry[1]
