"""The base class of all dialects, and the file that one of them writes.

    key = prefix + module + "." + suffix

A dialect has prefixes and a naming of modules; its suffixes belong to one of two families, for which every algorithm
defines its own suffixes (`Factors.spelled`):

    kohya family   lora_down.weight lora_up.weight alpha dora_scale, LyCORIS' names for the rest
    PEFT family    lora_A.weight lora_B.weight lora_magnitude_vector, no alpha in the file

Entries that a dialect cannot express are returned as `Lost`, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from inweave.adapter import Adapter, Entry, Form, Tensor

Naming = Literal["diffusers", "original", "trained"]

#: metadata keys that inweave adds so that a later conversion restores the same bits
STORED_ALPHA = "inweave.alpha"
CANDLE_ALPHA = "inweave.candle_alpha"
CANDLE_MODULES = "inweave.candle_modules"
PEFT_CONFIG = "inweave.adapter_config"
#: metadata of an adapter for adapter_config.json: where PEFT finds the base model, and the class that it makes of it
BASE_MODEL = "inweave.base_model_name_or_path"
TASK_TYPE = "inweave.task_type"
DIFFUSERS_CONFIG = "inweave.lora_adapter_metadata"


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names of a model's networks, for a writer."""

    denoiser: str = "unet"  # "unet", "transformer", or "model" for anything else
    encoders: Mapping[str, str] = field(default_factory=dict)  # component -> clip_l, clip_g, clip_h, t5xxl, ...
    family: str = "own"
    prefix: str = ""  # of candle-lora's own structs: one of its models, or any name
    dummy_embedding: tuple[str, int, int] | None = None  # (module, rows, features) that get factors of zeros


@dataclass(frozen=True, slots=True)
class Lost:
    """Some keys that cannot be written, and why."""

    keys: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class Written:
    """A file ready to be saved; with ``config`` it becomes a directory."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    config: dict[str, object] | None = None
    lost: list[Lost] = field(default_factory=list)
    duplicates: list[Lost] = field(default_factory=list)  # not written: finer tensors of the file cover them
    notes: list[str] = field(default_factory=list)

    def same(self, other: Written) -> bool:
        """Return whether another file holds the same tensors under the same names, with the same losses."""
        tensors = other.tensors
        return (self.tensors.keys(), self.config, self.lost) == (tensors.keys(), other.config, other.lost) and all(
            tensor is tensors[name] or tensor.same(tensors[name]) for name, tensor in self.tensors.items()
        )


class ModuleKeys(NamedTuple):
    """The properties of one module's keys that determine its dialect."""

    prefix: str  # the dialect that the prefix belongs to; empty if there is none
    families: frozenset[str]  # of its suffixes
    root: str  # the first segment of the module's name
    has_adapter_name: bool


class Dialect:
    """One dialect of adapter files: how it is recognized and how it is written.

    A subclass sets ``name``, ``description`` and its prefixes. To be written it also sets ``form`` and implements
    `module`; everything else has defaults.
    """

    name: ClassVar[str]
    #: one line for lists and documentation
    description: ClassVar[str] = ""
    #: (prefix, component) of names whose dots became underscores, and of dotted names; the component of a wrapper is ""
    flat_prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()
    dotted_prefixes: ClassVar[tuple[tuple[str, str], ...]] = ()

    #: its capabilities; None if it is read-only
    form: ClassVar[Form | None] = None
    #: naming of the denoiser's modules: diffusers', the original model's, or kohya's in training
    naming: ClassVar[Naming] = "diffusers"
    #: it can hold an adapter of any torch model
    generic: ClassVar[bool] = False
    #: it is a directory, not one file
    is_directory: ClassVar[bool] = False
    #: it can hold a second denoiser
    holds_two_denoisers: ClassVar[bool] = False
    #: ComfyUI's own names are used for models that it renames
    comfy_names: ClassVar[bool] = False
    #: it takes the options ``prefix`` and ``dummy_embeddings``
    has_structs: ClassVar[bool] = False
    #: a note about the programs that read it; empty if the usual ones do

    # reading

    def claims(self, keys: ModuleKeys) -> str:
        """Return the name for reports of a module with these keys; empty if it belongs to another dialect."""
        return self.name if keys.prefix == self.name else ""

    # writing

    def write(self, adapter: Adapter, names: ModelNames) -> Written:
        """Write entries with dotted names in this dialect's naming: only adds prefixes and suffixes."""
        if self.form is not None and self.form.family == "peft":
            forms = tuple(replace(entry, factors=entry.factors.peft_form()) for entry in adapter.entries)
            adapter = replace(adapter, entries=forms)
        written = Written(metadata=carried_metadata(adapter))
        entries: list[Entry] = []
        loras = {(e.ref.component, e.ref.name): e.factors for e in adapter.entries if e.factors.peft_type == "LORA"}
        form = self.form_of(adapter, names)
        for entry in adapter.entries:
            lora = loras.get((entry.ref.component, entry.ref.name))
            paired = lora is not None and lora.scale == entry.factors.scale
            tensors = self.refusal(entry, names) or entry.factors.spelled(form, entry.param, paired=paired)
            if isinstance(tensors, str):
                written.lost.append(Lost(entry.keys, f"{entry.ref}: {tensors}"))
                continue
            entries.append(entry)
            module = self.module(entry, names)
            written.tensors |= {f"{module}.{self.suffix(entry, suffix)}": tensor for suffix, tensor in tensors.items()}
        for key, tensor in adapter.carried.items():
            if self.carries(key):
                written.tensors[key] = tensor
            else:
                written.lost.append(Lost((key,), f"a carried tensor cannot be stored in the dialect {self.name}"))
        self.finish(written, entries, adapter, names)
        written.notes += self.notes(adapter.entries, names)
        return written

    def form_of(self, adapter: Adapter, names: ModelNames) -> Form:
        """Return the capabilities of this dialect for an adapter of this model."""
        assert self.form is not None
        return self.form

    def module(self, entry: Entry, names: ModelNames) -> str:
        """Return a module's name with its prefix."""
        raise NotImplementedError(self.name)

    def suffix(self, entry: Entry, suffix: str) -> str:
        """Return a tensor's suffix in this dialect."""
        return suffix

    def refusal(self, entry: Entry, names: ModelNames) -> str:
        """Return why this dialect cannot hold an entry; empty if that depends on its algorithm."""
        return ""

    def carries(self, key: str) -> bool:
        """Return whether a tensor that no module receives can be stored."""
        return True

    def finish(self, written: Written, entries: list[Entry], adapter: Adapter, names: ModelNames) -> None:
        """Add metadata and configuration; ``entries`` are those of the adapter that are written."""

    def notes(self, entries: Sequence[Entry], names: ModelNames) -> list[str]:
        """Return notes about programs that read the file differently or not at all.

        Verified with their own loaders; the table in docs/formats.md lists the programs that read each dialect.
        """
        notes: list[str] = []
        if self.form and self.form.family == "kohya" and any(entry.factors.magnitude is not None for entry in entries):
            notes.append(
                "DoRA: ComfyUI and Forge divide by other norms, so that the change differs by a few percent, and A1111 "
                "takes the magnitudes for those of the inputs, which destroys the model; diffusers and PEFT read it as "
                "trained (write diffusers or peft)"
            )
        return notes


def carried_metadata(adapter: Adapter) -> dict[str, str]:
    """Return the source's metadata, with fields that another dialect would misread renamed or removed."""
    metadata = dict(adapter.metadata)
    if (packed := metadata.pop("lora_adapter_metadata", None)) is not None:
        metadata[DIFFUSERS_CONFIG] = packed
    if adapter.config is not None:
        metadata[PEFT_CONFIG] = json.dumps(adapter.config, separators=(",", ":"), sort_keys=True)
    for name in (STORED_ALPHA, CANDLE_ALPHA, CANDLE_MODULES, BASE_MODEL, TASK_TYPE):
        metadata.pop(name, None)
    return metadata


def alpha_record(entries: Iterable[Entry]) -> dict[str, str]:
    """Return how alphas were stored, for dialects that store only the number: {"": form, module: exception}."""
    forms: dict[str, object] = {}
    counts: dict[str, int] = {}
    for entry in entries:
        if entry.factors.whole:
            continue
        stored = entry.factors.stored_alpha
        form = json.dumps(None if stored is None and entry.factors.alpha is None else
                          ["", []] if stored is None else [stored.dtype, list(stored.shape)])  # fmt: skip
        forms[f"{entry.ref.component}:{entry.ref.name}"] = form
        counts[form] = counts.get(form, 0) + 1
    if not counts:
        return {}
    usual = max(counts, key=lambda form: counts[form])
    record = {"": json.loads(usual)} | {name: json.loads(str(f)) for name, f in forms.items() if f != usual}
    return {} if record == {"": ["", []]} else {STORED_ALPHA: json.dumps(record, separators=(",", ":"))}
