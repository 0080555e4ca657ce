"""Untrusted configurations: which settings of a config.json reach a library, and which networks may be built from them.

    fields     those the class declares; all others are dropped. So nothing in a folder chooses code (`auto_map`,
               `_attn_implementation`), files (`transformers_weights`) or another way to store weights
    types      as declared: a number is not text, true is not 1
    numbers    finite; integers up to `MAX_INTEGER`, but for lengths and frequencies that nothing is allocated for
    lists      at most `MAX_ENTRIES` long and `MAX_NESTING` deep; text of at most `MAX_TEXT` characters
    networks   at most about as many parameters as its weight files hold tensors (`bounded`): ten million layers are
               refused after the first few too many, for any setting

Allowed settings can still be wrong: `library_errors` turns an exception of a library into a `FormatError`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import threading
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Union

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from inweave.checked import for_message
from inweave.errors import FormatError, InweaveError
from inweave.files.documents import read_json

MAX_BYTES = 4 * 1024 * 1024
MAX_INTEGER = 1 << 20
MAX_ENTRIES = 1024
MAX_NESTING = 4
MAX_TEXT = 256
#: integers that may be larger: they bound positions or set frequencies, and nothing is allocated for them
_UNBOUNDED = ("max_position_embeddings", "original_max_position_embeddings", "rope_theta", "sliding_window", "theta")
_INFINITE = ("time_step_limit", "lambda_min_clipped")  # without an end
_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # of older files, now `rope_parameters`
_QUANTIZED = ("quantization_config", "compression_config")
_UNPACKED = ("bitsandbytes",)  # by the names of stored tensors (`inweave.weights.packed`)


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration without checks; NaN and infinity are allowed, because some fields use them."""
    return read_json(path, MAX_BYTES, finite=False)


def diffusers_config(label: str, kind: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a diffusers class declares, each of the declared type."""
    _refuse_quantized(label, document)
    declared = {name: each for name, each in inspect.signature(kind.__init__).parameters.items() if name != "self"}
    fields: dict[str, Any] = {}
    for name, value in document.items():
        if name not in declared:
            continue
        _check_value(label, name, value)
        parameter = declared[name]
        if value != parameter.default and not _fits(value, parameter.annotation):
            expected = getattr(parameter.annotation, "__name__", None) or str(parameter.annotation)
            raise FormatError(f"{label}: {name} should be {expected}, got {for_message(value)}")
        fields[name] = value
    return fields


def transformers_config(label: str, kind: Any, document: Mapping[str, Any]) -> Any:
    """Return the configuration object of a transformers class; its own validation checks the types."""
    _refuse_quantized(label, document)
    for name, value in document.items():
        if not name.startswith("_"):
            _check_value(label, name, value)
    with library_errors(f"{label}: its configuration cannot be used for a {kind.__name__}"):
        return kind.from_dict(_declared(kind, document))


def _declared(kind: Any, document: Mapping[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = dict(getattr(kind, "sub_configs", None) or {})
    names = _field_names(kind).union(*(_field_names(each) for each in inner.values() if each is not None))
    settings: dict[str, Any] = {}
    for name, value in document.items():
        if name in inner and isinstance(value, Mapping):
            below = inner[name]
            settings[name] = _declared(below, value) if hasattr(below, "from_dict") else dict(value)
        elif name in names or name in inner:
            settings[name] = value
    return settings


def _field_names(kind: Any) -> set[str]:
    if not dataclasses.is_dataclass(kind):
        return set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
    private = ("transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type")
    own = {field.name for field in dataclasses.fields(kind) if field.name not in private}
    return own | set(getattr(kind, "attribute_map", ())) | set(_ROPE)


def _refuse_quantized(label: str, document: Mapping[str, Any]) -> None:
    if name := next((name for name in _QUANTIZED if document.get(name)), None):
        settings = document[name]
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        if method not in _UNPACKED:
            raise FormatError(
                f"{label}: its weights are quantized ({name}, {for_message(method)}), which inweave does not load; "
                "use the model in fp32, fp16, bf16 or fp8, or quantized by bitsandbytes"
            )


def _check_value(label: str, name: str, value: Any, depth: int = 0) -> None:
    """Raise FormatError for numbers that are not finite or too large, long lists and long texts."""
    if isinstance(value, float) and not math.isfinite(value) and (name not in _INFINITE or math.isnan(value)):
        raise FormatError(f"{label}: {name} should be a finite number, got {value}")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        if name not in _UNBOUNDED or abs(value) >= 1 << 63:
            raise FormatError(f"{label}: {name} should be at most {MAX_INTEGER:,}, got {for_message(value)}")
    if isinstance(value, str) and (len(value) > MAX_TEXT or not value.isprintable()):
        raise FormatError(
            f"{label}: {name} should be a text of at most {MAX_TEXT} characters, got {for_message(value)}"
        )
    if isinstance(value, list | dict):
        if depth == MAX_NESTING or len(value) > MAX_ENTRIES:
            raise FormatError(f"{label}: {name} should be at most {MAX_ENTRIES} values, {MAX_NESTING} levels deep")
        entries = value.items() if isinstance(value, dict) else ((name, each) for each in value)
        for key, each in entries:
            if not str(key).startswith("_"):
                _check_value(label, str(key), each, depth + 1)


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a JSON value has the type of a diffusers annotation, whose tuples are lists of any length."""
    if annotation is inspect.Parameter.empty or annotation is Any:
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if annotation in (None, type(None)):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation in (int, float):
        return isinstance(value, int if annotation is int else int | float) and not isinstance(value, bool)
    if annotation is str:
        return isinstance(value, str)
    if annotation in (tuple, list) or origin in (tuple, list):
        kinds = [each for each in arguments if each is not Ellipsis]
        return isinstance(value, list) and (not kinds or all(any(_fits(v, each) for each in kinds) for v in value))
    return annotation is dict or origin is dict or not isinstance(annotation, type)


@contextmanager
def bounded(label: str, tensors: int) -> Iterator[None]:
    """Raise FormatError once a network has far more parameters than its files have ``tensors``."""
    limit = 2 * tensors + 100  # tied weights and weights that files store fused have several names
    count, thread = 0, threading.get_ident()

    def on_parameter(module: torch.nn.Module, name: str, parameter: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread and parameter is not None
        if count > limit:
            raise FormatError(
                f"{label}: its configuration asks for more than {limit:,} weights, and its files hold {tensors:,}; "
                "it belongs to another model or is damaged"
            )

    handle = register_module_parameter_registration_hook(on_parameter)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def library_errors(label: str) -> Iterator[None]:
    """Turn exceptions of a library into `FormatError`; inweave's own and out-of-memory errors pass through."""
    try:
        yield
    except (InweaveError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise FormatError(f"{label}: {brief(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust, for a file it did not expect
            raise
        raise FormatError(f"{label}: {brief(error)}") from None


def brief(error: BaseException) -> str:
    """Return the first informative line of an error's message, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = ": ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    text = "".join(character if character.isprintable() else " " for character in text)
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
