"""Causal language models from a transformers folder: configuration and tokenizer as JSON, weights as safetensors.

    config.json ──► the settings its class declares (`inweave.models.configuration`)
    weights     ──► `open_source`: the header gate, shards next to their index; the library only gets tensors
    tokenizer   ──► `inweave.models.tokenizers`
    template    ──► for conversations: chat_template.jinja, or chat_template in tokenizer_config.json

Nothing else in the folder is opened: no adapter next to the model, no code, no other way to store weights. A template
is a program in Jinja, which the library runs in Jinja's sandbox, and only for a dataset that has conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from inweave.checked import for_message
from inweave.errors import FormatError
from inweave.files.documents import read_json
from inweave.files.paths import is_file
from inweave.files.reading import read_text
from inweave.formats.files import network_file
from inweave.models.configuration import bounded, library_errors, read_config, transformers_config
from inweave.models.lazy_imports import defer_imports
from inweave.models.tokenizers import make_tokenizer
from inweave.weights.packed import open_source
from inweave.weights.source import WeightSource

MAX_TEMPLATE = 2**20  # bytes


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder."""
    with defer_imports():
        from transformers import AutoTokenizer

    document = _document(folder)
    class_name = document.get("tokenizer_class")
    kind = class_name if isinstance(class_name, str) else None
    with _unreadable(folder):
        options = {"config": _config(folder, document), "trust_remote_code": False}
        tokenizer = make_tokenizer(folder, AutoTokenizer, tokenizer_class=kind, **options)
        tokenizer.chat_template = _chat_template(folder)
    return tokenizer


def _chat_template(folder: Path) -> str | dict[str, str] | None:
    """Return the template of a folder, or several by name; None if there is none."""
    if is_file(folder / "chat_template.jinja"):
        return read_text(folder / "chat_template.jinja", MAX_TEMPLATE)
    settings = folder / "tokenizer_config.json"
    template: Any = read_json(settings).get("chat_template") if is_file(settings) else None
    if isinstance(template, list):  # as older versions of the library write several
        try:
            template = {each["name"]: each["template"] for each in template}
        except (KeyError, TypeError):
            template = {"": None}
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    if not all(isinstance(text, str) and len(text) <= MAX_TEMPLATE for text in texts):
        raise FormatError(f"{settings}: chat_template cannot be {for_message(template)}")
    return template or None


def blank_language_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model in a precision, without weights; only the headers of its files are read."""
    with _unreadable(folder):
        return _blank(folder, dtype, _source(folder))


def load_language_model(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a folder; its code is never run, and a missing weight is an error."""
    from transformers.utils import logging

    source = _source(folder)
    tokenizer = load_tokenizer(folder)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with _unreadable(folder):
            blank = _blank(folder, dtype, source)
            # tensors that are cast are copied from the file map; the others would stay mapped
            tensors = {name: source.get(name, owned=source.spec(name).dtype == dtype) for name in source.names()}
            model, report = type(blank).from_pretrained(
                None, config=blank.config, state_dict=tensors, dtype=dtype, output_loading_info=True
            )
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if missing := sorted(report.get("missing_keys", ())):
        raise FormatError(f"{folder}: the weights lack {missing[0]!r} ({len(missing)} missing)")
    if unused := sorted(report.get("unexpected_keys", ())):
        raise FormatError(
            f"{folder}: the model of its configuration has no place for {unused[0]!r} ({len(unused)} such tensors); "
            "the configuration belongs to another model"
        )
    return model.to(device).eval().requires_grad_(False), tokenizer


def _blank(folder: Path, dtype: torch.dtype, source: WeightSource) -> Any:
    with defer_imports():
        from transformers import AutoModelForCausalLM

    config = _config(folder, _document(folder))
    with torch.device("meta"), bounded(str(folder), len(source.names())), defer_imports():
        kind: Any = AutoModelForCausalLM
        network: Any = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    return network.eval().requires_grad_(False)


def _source(folder: Path) -> WeightSource:
    weights = network_file(folder)
    if weights is None:
        raise FormatError(f"{folder}: no .safetensors weights in this folder")
    with _unreadable(folder):
        return open_source(weights)


def _document(folder: Path) -> dict[str, Any]:
    with _unreadable(folder):
        return read_config(folder / "config.json")


def _config(folder: Path, document: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise FormatError(
            f"config.json names the model_type {kind!r:.80}, which this version of transformers does not have"
        )
    return transformers_config("config.json", CONFIG_MAPPING[kind], document)


@contextmanager
def _unreadable(folder: Path) -> Iterator[None]:
    """Say of every error that it is about this folder as a language model."""
    label = f"{folder}: not a causal language model that can be read"
    try:
        with library_errors(label):
            yield
    except FormatError as error:
        raise error if str(error).startswith(f"{folder}: ") else FormatError(f"{label}: {error}") from None
