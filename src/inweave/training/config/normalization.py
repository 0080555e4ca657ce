"""Values of settings before their types are checked: lists for texts, names in any case, "none", true for "auto"."""

from __future__ import annotations

import itertools
import types
import typing
from typing import Any

from inweave.training.config.presets import TARGETS


def normalize_setting(name: str, value: Any, annotation: Any) -> Any:
    """Return the value of a setting in the form that its type expects; raises ValueError with what is wrong."""
    if name == "batch_size" and value == "auto":
        return 0
    if name == "resume" and isinstance(value, bool):
        return "auto" if value else "never"
    if name == "optimizer" and isinstance(value, str):
        return _optimizer_name(value, typing.get_args(annotation))
    if name == "lr_scheduler" and isinstance(value, str):
        return _by_class(typing.get_args(annotation)).get(_plain(value.rpartition(".")[2]), value)
    if isinstance(value, bool) and annotation is not bool:
        raise ValueError(f"true or false has no meaning here, got {value}")
    if isinstance(value, str) and value.strip().lower() == "none" and is_cleared_by_none(annotation):
        return None
    if name in ("sample_prompts", "caption_extensions", "control") and isinstance(value, str):
        value = [value] if value else []
    if name == "caption_extensions" and isinstance(value, list | tuple):
        return tuple(f".{each}" if isinstance(each, str) and each[:1] != "." else each for each in value)
    if name == "name" and isinstance(value, str) and not _is_file_name(value):
        raise ValueError("expected a file name without folders")
    if name in ("optimizer_args", "lr_scheduler_args") and isinstance(value, dict):
        lists = (each if isinstance(each, list) and name == "lr_scheduler_args" else [each] for each in value.values())
        if not all(map(_is_plain, itertools.chain.from_iterable(lists))):
            raise ValueError("expected true or false, finite numbers or text as values")
    if name == "targets" and not isinstance(value, str):
        if not isinstance(value, list | tuple) or not value or not all(isinstance(each, str) for each in value):
            raise ValueError(
                f"expected one of {', '.join(TARGETS)}, a name, or a list of names and regular expressions"
            )
        return tuple(value)
    return value


def is_cleared_by_none(annotation: Any) -> bool:
    """Return whether a type may be empty and holds no text, where "none" is unambiguous."""
    joined = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members = typing.get_args(annotation) if joined else (annotation,)
    return type(None) in members and str not in members


def _optimizer_name(value: str, known: tuple[str, ...]) -> str:
    """Return our name of an optimizer, written in any case and punctuation, or as a class of torch.optim."""
    plain = _plain(value.lower().removeprefix("torch.optim."))
    if plain in ("lbfgs", "sparseadam"):
        reason = "evaluates the loss several times per step" if plain == "lbfgs" else "is for sparse gradients"
        raise ValueError(f"{value} {reason} and cannot train an adapter")
    return ({"dadaptation": "dadapt_adam", "dadapt": "dadapt_adam"} | _by_class(known)).get(plain, value)


def _by_class(known: tuple[str, ...]) -> dict[str, str]:
    """Return names by their last part, without case and punctuation."""
    return {_plain(name.rpartition(".")[2]): name for name in known}


def _plain(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _is_file_name(value: str) -> bool:
    return value not in (".", "..") and not any(sign in "/\\" or not sign.isprintable() for sign in value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | str) or (isinstance(value, int | float) and abs(value) < 2**63)
