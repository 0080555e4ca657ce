"""Files next to a LoRA that describe it.

    style.json             description, activation text, preferred weight, negative text, notes (A1111, Forge)
    style.civitai.info     the model page as JSON: trainedWords, baseModel, description
    style.preview.png      an image; also .png, .jpg, .jpeg, .webp, with or without .preview

They are small and untrusted: files that are unreadable, oversized or of the wrong type are ignored and named in
``problems``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import FormatError
from inweave.files.reading import open_regular

MAX_BYTES = 4 * 1024 * 1024
MAX_TEXT = 20_000
PREVIEWS = tuple(f"{middle}.{suffix}" for middle in (".preview", "") for suffix in ("png", "jpg", "jpeg", "webp"))


@dataclass(frozen=True, slots=True)
class Sidecars:
    """The contents of the files next to a LoRA."""

    names: tuple[str, ...] = ()
    preview: str | None = None
    description: str | None = None
    notes: str | None = None
    negative_text: str | None = None
    preferred_strength: float | None = None
    triggers: tuple[dict[str, Any], ...] = ()
    base_label: str | None = None
    problems: tuple[str, ...] = ()


def read_sidecars(folder: Path, stem: str, names: Collection[str]) -> Sidecars:
    """Read the sidecars of ``stem`` among the ``names`` of its folder."""
    problems: list[str] = []
    notes = _json(folder, f"{stem}.json", names, problems)
    page = _json(folder, f"{stem}.civitai.info", names, problems)
    preview = next((stem + ending for ending in PREVIEWS if stem + ending in names), None)
    triggers = []
    if words := _words(notes.get("activation text")):
        triggers.append({"source": f"{stem}.json", "words": words})
    if words := _words(page.get("trainedWords")):
        triggers.append({"source": f"{stem}.civitai.info", "words": words})
    present = [name for name in (f"{stem}.json", f"{stem}.civitai.info", preview) if name is not None and name in names]
    return Sidecars(
        tuple(present), preview, _text(notes.get("description")) or _text(page.get("description")),
        _text(notes.get("notes")), _text(notes.get("negative text")), _number(notes.get("preferred weight")),
        tuple(triggers), _text(notes.get("sd version")) or _text(page.get("baseModel")), tuple(problems),
    )  # fmt: skip


def _json(folder: Path, name: str, names: Collection[str], problems: list[str]) -> Mapping[str, Any]:
    if name not in names:
        return {}
    try:
        with open_regular(folder / name) as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            problems.append(f"{name}: left out, because it is larger than {MAX_BYTES // 2**20} MiB")
            return {}
        content = json.loads(text.decode("utf-8-sig"))
    except FormatError as error:
        problems.append(f"{name}: left out, because it cannot be read: {str(error).rpartition(': ')[2]}")
        return {}
    except (ValueError, RecursionError):
        problems.append(f"{name}: left out, because it is not valid JSON")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{name}: left out, because it is not a JSON object")
        return {}
    return content


def _text(value: object) -> str | None:
    return value.strip()[:MAX_TEXT] or None if isinstance(value, str) else None


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return None
    return number if 0 < abs(number) < 100 else None


def _words(value: object) -> list[str]:
    return bounded(value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [])


def bounded(words: object) -> list[str]:
    """Return untrusted words, limited in number and length."""
    listed = words if isinstance(words, list) else []
    return [word.strip()[:500] for word in listed if isinstance(word, str) and word.strip()][:200]
