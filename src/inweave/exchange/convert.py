"""Write an adapter in another dialect: the matrices stay, names and scaling move.

    load -> respell (the target's naming of the same model) -> write (prefixes, suffixes, metadata)

Tensors that the target cannot express are an error that names them, unless `drop` is set.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from inweave.adapter import Adapter
from inweave.arguments import expect
from inweave.errors import ConfigError, TargetError
from inweave.exchange.load import load, open_base
from inweave.exchange.own_names import has_own_root, own_names
from inweave.exchange.programs import original_names_refusal, reader_notes
from inweave.files.paths import as_path
from inweave.files.writing import make_folder, write_atomic
from inweave.formats.alphas import Alphas
from inweave.formats.dialects import WRITTEN, DialectName, dialect_named, written_dialects
from inweave.formats.dialects.base import Lost, ModelNames, Written
from inweave.formats.dialects.candle import MODELS
from inweave.formats.files import maps_of, refuse_truncated, write_file
from inweave.targets.bases import known_index
from inweave.targets.detect import detect
from inweave.targets.fit import widens_unasked
from inweave.targets.index import Component, ModelIndex
from inweave.targets.links import Naming
from inweave.targets.respell import BLOCKS, blocks_metadata, respell
from inweave.targets.tables import SPELLINGS

#: dialects that can hold an adapter of any torch model
GENERIC = tuple(name for name in WRITTEN if dialect_named(name).generic)
_GENERIC_CALL = 'save(adapter, "FOLDER", dialect="peft"), convert IN FOLDER --to peft'


@dataclass(slots=True, repr=False)
class Conversion:
    """The result of `convert` and `save`.

    ``lost`` lists every tensor that was not written, with the reason; ``notes`` are the changes that the dialect
    needed; ``warnings`` are those of reading; ``assumed_alphas`` names modules that were written with alpha = rank
    because the source states no alpha for them.
    """

    path: str = ""
    dialect: str = ""
    base: str | None = None
    tensors: int = 0
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    assumed_alphas: tuple[str, ...] = ()

    def __repr__(self) -> str:
        dropped = f", {len(self.lost)} modules dropped" if self.lost else ""
        return f"<Conversion: {self.path}: {self.tensors} tensors as {self.dialect}{dropped}>"

    def as_dict(self) -> dict[str, object]:
        """Return the documented JSON of `inweave convert`."""
        return {
            "ok": not self.lost,
            "path": self.path,
            "dialect": self.dialect,
            "base": self.base,
            "tensors": self.tensors,
            "dropped": [{"keys": list(lost.keys), "reason": lost.reason} for lost in self.lost],
            "notes": self.notes,
            **({"assumed_alphas": len(self.assumed_alphas)} if self.assumed_alphas else {}),
            "warnings": self.warnings,
        }


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    to: DialectName | str,
    base: str | os.PathLike[str] | None = None,
    drop: bool = False,
    name: str | None = None,
    alpha: Alphas | None = None,
    prefix: str = "",
    dummy_embeddings: bool = False,
) -> Conversion:
    """Read ``source`` in any dialect and write it to ``out`` in the dialect ``to``; matrices are never changed.

    Args:
        source: the adapter to read.
        out: the file to write; for "peft", the directory.
        to: "kohya", "diffusers", "peft", "comfy", "onetrainer", "bfl" or "candle".
        base: the base model, if it cannot be detected: a name or a path.
        drop: leave out tensors that the dialect cannot express, and list them in the result.
        name: the adapter to read if the keys carry several PEFT adapter names.
        alpha: for modules without an alpha, as in `load`.
        prefix: for candle, the model of candle-lora whose names to write ("llama", "mistral", "falcon", "dinov2",
            "bert", ...), or any other name.
        dummy_embeddings: for candle, add the zero pair that its llama looks for.

    Returns:
        A report on the written file.

    Raises:
        TargetError: the base is not known, or the dialect cannot express a tensor and ``drop`` is not set.
        FormatError: the source cannot be read.
        ConfigError: an argument is invalid.
    """
    adapter = load(source, name=name, alpha=alpha)
    return save(adapter, out, dialect=to, base=base, drop=drop, prefix=prefix, dummy_embeddings=dummy_embeddings)


def save(
    adapter: Adapter,
    out: str | os.PathLike[str],
    *,
    dialect: DialectName | str | None = None,
    base: str | os.PathLike[str] | ModelIndex | None = None,
    drop: bool = False,
    prefix: str = "",
    dummy_embeddings: bool = False,
) -> Conversion:
    """Write ``adapter`` to ``out`` in another dialect.

    Args:
        adapter: the adapter to write; `load` reads one from a file.
        out: the file to write; for "peft", the directory.
        dialect: as ``to`` of `convert`; None: peft for a name that does not end in .safetensors; for others kohya, or
            diffusers if kohya's names of this model are not known.
        base: the base model, if it cannot be detected: a name, a path or an index.
        drop: leave out tensors that the dialect cannot express, and list them in the result.
        prefix: as in `convert`.
        dummy_embeddings: as in `convert`.

    Returns:
        A report on the written file.

    Raises:
        TargetError: the base is not known, or the dialect cannot express a tensor and ``drop`` is not set.
        ConfigError: an argument is invalid.
    """
    if not isinstance(adapter, Adapter):
        raise ConfigError(
            f"expected an Adapter, got {type(adapter).__name__}; "
            "load(path) reads one, and convert goes from file to file"
        )
    expect("dialect", dialect, str, type(None))
    usual = dialect or ("kohya" if as_path(out).suffix == ".safetensors" else "peft")
    dialect_named(usual)
    refuse_truncated(maps_of(adapter.tensors.values()), "the adapter's file")
    _check_candle(usual, prefix, dummy_embeddings)
    index, tie = _index(adapter, base, usual, prefix)
    dialect = dialect or default_dialect(index, usual)
    if reason := dialect_refusal(dialect, index):
        raise TargetError(reason)
    written = rewrite(adapter, dialect, index, prefix=prefix, dummy_embeddings=dummy_embeddings)
    written.lost += [Lost(problem.keys, problem.reason) for problem in adapter.problems]
    if written.lost and not drop:
        raise TargetError(_refusal(dialect, written.lost) + _alternatives(adapter, dialect, index))
    if not written.tensors:
        raise TargetError(f"nothing of this adapter can be written as {dialect}")
    dropped = [*written.lost, *written.duplicates, *_unaccounted(adapter, written)]
    path = _store(as_path(out), written)
    return Conversion(
        str(path), dialect, index.base, len(written.tensors), dropped, [*tie, *written.notes],
        list(adapter.warnings), adapter.assumed_alphas,
    )  # fmt: skip


def default_dialect(index: ModelIndex, usual: str = "kohya") -> str:
    """Return the dialect to write where the caller names none: the usual one, or one that can hold the names."""
    return "diffusers" if index.denoiser is not None and dialect_refusal(usual, index) else usual


def refuse_output(out: Path, dialect: str, index: ModelIndex) -> None:
    """Raise ConfigError before any work if `save` would refuse the dialect or the name of the output."""
    expect("dialect", dialect, str)
    directory = dialect_named(dialect).is_directory
    if directory == (out.suffix == ".safetensors"):
        form = "a directory; use a name without .safetensors" if directory else "one file, NAME.safetensors"
        raise ConfigError(f"{out}: {dialect} is written as {form}")
    if reason := dialect_refusal(dialect, index):
        raise ConfigError(reason)


def dialect_refusal(dialect: str, index: ModelIndex) -> str:
    """Return why a model's adapters cannot be written in a dialect, or nothing."""
    if "model" in index.components and not dialect_named(dialect).generic:
        what = index.base or index.source or "this model"
        return (
            f"{dialect} is for diffusion models whose names inweave knows, and {what} is none of them: "
            f"write this adapter as {' or '.join(GENERIC)} ({_GENERIC_CALL})"
        )
    return original_names_refusal(dialect, index)


def rewrite(
    adapter: Adapter, dialect: str, index: ModelIndex, *, prefix: str = "", dummy_embeddings: bool = False
) -> Written:
    """Return the tensors, metadata and configuration of ``adapter`` in the names of ``dialect``."""
    writer = dialect_named(dialect)
    index = _spelled_for(writer.comfy_names, index)
    respelling = respell(adapter, index, lambda component: naming_for(dialect, component, index))
    metadata = {key: value for key, value in adapter.metadata.items() if key != BLOCKS} | blocks_metadata(
        respelling.blocks
    )
    second = [
        entry for entry in respelling.entries if entry.ref.component == "unet2" and not writer.holds_two_denoisers
    ]
    unsaid = writer.form is not None and writer.form.family == "peft"  # no tensor states the width of the base
    wide = [entry for entry in respelling.entries if unsaid and not widens_unasked(entry, index)]
    apart = {id(entry) for entry in (*second, *wide)}
    entries = tuple(entry for entry in respelling.entries if id(entry) not in apart)
    renamed = replace(adapter, entries=entries, metadata=metadata)
    names = replace(
        model_names(index), prefix=prefix, dummy_embedding=_embedding_size(index) if dummy_embeddings else None
    )
    written = writer.write(renamed, names)
    modules = list(dict.fromkeys(entry.ref.name for entry in entries if entry.ref.component == "unet"))
    written.notes += reader_notes(dialect, index, modules)
    written.lost += [Lost(finding.keys, f"{finding.module}: {finding.reason}") for finding in respelling.lost]
    written.duplicates += [Lost(each.keys, f"{each.module}: {each.reason}") for each in respelling.duplicates]
    written.lost += [Lost(entry.keys, f"{entry.ref}: {_ONE_DENOISER}") for entry in second]
    written.lost += [Lost(entry.keys, f"{entry.ref}: {_NO_WIDER}") for entry in wide]
    return written


_ONE_DENOISER = "this dialect holds one denoiser, the file changes two (transformer_2); write it as diffusers"


_NO_WIDER = "a widened weight cannot be expressed in this dialect, but for a control adapter's first layer"


def _spelled_for(comfy: bool, index: ModelIndex) -> ModelIndex:
    """Return the index with ComfyUI's own names of models that it renames, or with their makers' names."""
    components = dict(index.components)
    for name, component in index.components.items():
        own = f"{component.table.name.removesuffix('-comfy')}{'-comfy' if comfy else ''}"
        if own in SPELLINGS.get(component.table.name, ()):
            components[name] = component.spelled_by(own)
    return replace(index, components=components)


def naming_for(dialect: str, component: Component, index: ModelIndex) -> Naming:
    """Return a dialect's naming of a component.

    kohya trains SD 1 and 2 under diffusers' names, SDXL and all transformers under the original ones.
    """
    if component.name not in ("unet", "unet2"):
        return "diffusers"
    naming = dialect_named(dialect).naming
    if naming == "trained":
        old_unet = component.table.name == "unet" and len([c for c in index if c.name.startswith("te")]) < 2
        return "diffusers" if old_unet and "add_embedding.linear_1.weight" not in component.parts else "original"
    return naming


def _check_candle(dialect: str, prefix: str, dummy_embeddings: bool) -> None:
    if (prefix or dummy_embeddings) and not dialect_named(dialect).has_structs:
        raise ConfigError(f"prefix and dummy embeddings belong to candle-lora's files, not to {dialect}")
    if not isinstance(prefix, str) or not re.fullmatch(r"[A-Za-z0-9_.]*", prefix) or prefix.strip(".") != prefix:
        raise ConfigError(
            f"prefix {str(prefix)[:60]!r}: one of {', '.join(MODELS)}, or a name of letters, digits, _ and dots"
        )
    if dummy_embeddings and prefix != "llama":
        raise ConfigError("dummy embeddings are what candle-lora's llama looks for: write with prefix llama")


def _embedding_size(index: ModelIndex) -> tuple[str, int, int]:
    """Return the name of the token embedding, its rows and its features."""
    for component in index:
        for name, shape in component.parts.items():
            if name.endswith("embed_tokens.weight") and len(shape) == 2:
                return name.removesuffix(".weight"), shape[0], shape[1]
    raise ConfigError("dummy embeddings need the size of the token embedding: name the base by its path (base, --base)")


def model_names(index: ModelIndex) -> ModelNames:
    """Return the names of a model's networks."""
    denoiser = index.denoiser
    family = denoiser.table.name if denoiser else "own"
    kind = "model" if denoiser is None else "unet" if family == "unet" else "transformer"
    return ModelNames(kind, {c.name: _encoder(c) for c in index.encoders}, family)


_LANGUAGE_MODELS = {3584: "qwen25_7b", 2560: "qwen3_4b", 1024: "qwen3_06b", 2304: "gemma2_2b"}


def _encoder(component: Component) -> str:
    """Return the name of a text encoder.

    T5 has no token_embedding; CLIP-L, OpenCLIP-H and bigG differ in width, and one of unknown width is named by its
    position. A language model has `embed_tokens`, and its width decides which one it is.
    """
    tokens = [shape[1] for name, shape in component.parts.items() if name.endswith("embed_tokens.weight")]
    if tokens and tokens[0] in _LANGUAGE_MODELS:
        return _LANGUAGE_MODELS[tokens[0]]
    widths = [shape[1] for name, shape in component.parts.items() if name.endswith("embeddings.token_embedding.weight")]
    if not widths:
        return "t5xxl"
    known = {768: "clip_l", 1024: "clip_h", 1280: "clip_g"}.get(widths[0])
    return known or {"te2": "clip_g"}.get(component.name, "clip_l")


def _index(
    adapter: Adapter, base: str | os.PathLike[str] | ModelIndex | None, dialect: str, prefix: str
) -> tuple[ModelIndex, list[str]]:
    """Return the base, with a note if others fit as well; a base that is not proven is asked for."""
    if isinstance(base, ModelIndex):
        return base, []
    if base is not None:
        return open_base(base), []
    detection = detect(adapter)
    generic = dialect_named(dialect).generic and all(
        not (e.ref.flat or e.ref.below or (e.ref.component and not has_own_root(e))) for e in adapter
    )
    if detection.base is None or not detection.proven:
        if generic:
            return own_names(adapter), []
        known = (
            f" (the best guess is {detection.base}, confidence {detection.confidence:.2f})" if detection.base else ""
        )
        other = "" if generic else f"; of any other model, write a PEFT folder: {_GENERIC_CALL}"
        raise TargetError(
            f"which base model is this adapter for?{known} {detection.evidence[-1]}; name it with base (--base){other}"
        )
    index = known_index(detection.base)
    if not detection.rivals or dialect_refusal(dialect, index):
        return index, []
    names = [detection.base, *detection.rivals]
    first = rewrite(adapter, dialect, index, prefix=prefix)
    rivals = (rewrite(adapter, dialect, known_index(name), prefix=prefix) for name in detection.rivals)
    if all(map(first.same, rivals)):
        return index, [f"it fits {', '.join(names)} equally; this file is the same for each of them"]
    if generic:
        return own_names(adapter), []
    raise TargetError(
        f"which base model is this adapter for? It fits {', '.join(names)} equally, and what {dialect} holds "
        "depends on it: name it with base (--base)"
    )


def _refusal(dialect: str, lost: list[Lost]) -> str:
    rows = [
        f"{row.keys[0]}{f' and {len(row.keys) - 1} more' if len(row.keys) > 1 else ''}: {row.reason}"
        for row in lost[:5]
    ]
    more = [f"and {len(lost) - 5} more"] if len(lost) > 5 else []
    count = sum(len(row.keys) for row in lost)
    head = f"{count} tensors cannot be written as {dialect} (drop=True or --drop leaves them out):"
    return "\n  ".join([head, *rows, *more])


def _alternatives(adapter: Adapter, dialect: str, index: ModelIndex) -> str:
    """Return a hint at the dialects that can express the whole adapter, if its file is complete."""
    if adapter.problems:
        return ""
    others = (
        []
        if "model" in index.components
        else [name for name in written_dialects() if not (dialect_named(name).generic or dialect_refusal(name, index))]
    )
    whole = [name for name in others if name != dialect and not rewrite(adapter, name, index).lost]
    return f"\n  all of it can be written as {' or '.join(whole)}" if whole else ""


def _unaccounted(adapter: Adapter, written: Written) -> list[Lost]:
    """Return tensors of the source that are not in any entry, carried tensor or reason; there should be none."""
    used = {key for entry in adapter.entries for key in entry.keys} | set(adapter.carried)
    used.update(key for row in (*written.lost, *written.duplicates) for key in row.keys)
    keys = tuple(key for key in adapter.tensors if key not in used)
    return [Lost(keys, "no part of the adapter uses it")] if keys else []


def _store(out: Path, written: Written) -> Path:
    if written.config is None:
        if out.suffix != ".safetensors":
            raise ConfigError(f"{out}: the output is one file; give it a name that ends in .safetensors")
        make_folder(out.parent)
        return write_file(out, written.tensors, written.metadata)
    if out.suffix == ".safetensors":
        raise ConfigError(f"{out}: a PEFT adapter is a directory; give a name without .safetensors")
    make_folder(out, error=ConfigError)
    write_file(out / "adapter_model.safetensors", written.tensors, written.metadata)
    document = json.dumps(written.config, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"
    write_atomic(out / "adapter_config.json", [document])
    return out
