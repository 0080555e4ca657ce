"""Names of image files: the grammar of `--picture-names`, as in AUTOMATIC1111's file name patterns.

    pattern = part ("/" part)*            folders, and the name of the file without its ending
    part    = (text | "[" token "]")+

    [seed] [steps] [cfg] [width] [height] [sampler] [scheduler] [denoising] [clip_skip] [model_name]    settings
    [prompt] [prompt_spaces] [prompt_words] [prompt_hash]     the prompt; its first eight words; a hash of it
    [date] [time] [datetime] [datetime<FORMAT>]               when it was made; FORMAT as in strftime
    [number] [job] [batch_number]                             a running number, the job, the place in the job

A setting that an image does not have is "none". Every part becomes a name that Linux, macOS and Windows accept, of at
most ``MAX_PART`` bytes: other characters become "_", and a part that would be hidden or empty gets a visible name. The
gallery adds "-2", "-3", ... to a name that exists.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from inweave.errors import ConfigError, Problem

DEFAULT_NAMES = "[date]/[seed]-[prompt_words]"
MAX_PATTERN = 300
MAX_PARTS = 8
#: bytes of a part; encrypted file systems accept 143, and an ending and a number follow
MAX_PART = 120
_WORDS = 8
_TOKEN = re.compile(r"\[([^\[\]<>]*)(?:<([^<>\[\]/]*)>)?\]")
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f<>:"/\\|?*]')
_TAG = re.compile(r"<[^<>]*>")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
#: token -> the name of the setting
_SETTINGS = {
    "seed": "seed", "steps": "steps", "cfg": "guidance", "width": "width", "height": "height", "sampler": "sampler",
    "scheduler": "schedule", "denoising": "strength", "clip_skip": "clip_skip", "model_name": "model", "job": "job",
}  # fmt: skip
_OTHERS = (
    "prompt", "prompt_spaces", "prompt_words", "prompt_hash", "date", "time", "datetime", "number", "batch_number",
)  # fmt: skip
TOKENS = tuple(sorted((*_SETTINGS, *_OTHERS)))


def ensure_pattern(pattern: str, field: str = "picture_names") -> str:
    """Return a pattern; raise ConfigError with everything that is wrong with it."""
    problems = []
    if not pattern.strip() or len(pattern) > MAX_PATTERN:
        problems.append(f"a pattern of 1 to {MAX_PATTERN} characters is needed, got {len(pattern)}")
    parts = pattern.split("/")
    if pattern and not all(part.strip() for part in parts):
        problems.append(f"{pattern[:80]!r}: an empty folder or file name; write folders as FOLDER/NAME")
    if len(parts) > MAX_PARTS:
        problems.append(f"at most {MAX_PARTS - 1} folders in each other, got {len(parts) - 1}")
    for token, form in _TOKEN.findall(pattern):
        if token not in TOKENS:
            problems.append(f"no token is called [{token[:40]}]; there are {', '.join(TOKENS)}")
        elif form and token != "datetime":
            problems.append(f"[{token}<...>]: only datetime has a format")
    if "[" in _TOKEN.sub("", pattern) or "]" in _TOKEN.sub("", pattern):
        problems.append(f"{pattern[:80]!r}: a bracket without its other half; tokens are written [seed]")
    if problems:
        raise ConfigError([Problem(field, text) for text in problems])
    return pattern


def file_path(pattern: str, settings: Mapping[str, Any], created: float, number: int = 1, index: int = 0) -> str:
    """Return the path of an image below the folder of the gallery, without an ending.

    Args:
        pattern: one that `ensure_pattern` accepts.
        settings: fields of `GenerateConfig`, ``model`` and ``job``.
        created: when the image was made, in seconds.
        number: of the image in the gallery.
        index: its place in its job, from 0.
    """
    when = datetime.datetime.fromtimestamp(created)

    def value(match: re.Match[str]) -> str:
        return _value(match[1], match[2], settings, when, number, index)

    parts = [visible_name(_TOKEN.sub(value, part)) for part in pattern.split("/")]
    return "/".join(parts)


def _value(
    token: str, form: str | None, settings: Mapping[str, Any], when: datetime.datetime, number: int, index: int
) -> str:
    """Return the text of one token, without separators of folders."""
    prompt = _TAG.sub(" ", str(settings.get("prompt") or ""))
    texts = {
        "prompt": "_".join(prompt.split()), "prompt_spaces": " ".join(prompt.split()),
        "prompt_words": "-".join(re.findall(r"\w+", prompt)[:_WORDS]),
        "prompt_hash": hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()[:8],
        "date": f"{when:%Y-%m-%d}", "time": f"{when:%H%M%S}", "datetime": f"{when:%Y%m%d%H%M%S}",
        "number": f"{number:05d}", "batch_number": str(index + 1),
    }  # fmt: skip
    if form:
        text = when.strftime(form)
    elif token in texts:
        text = texts[token]
    else:
        setting = settings.get(_SETTINGS[token])
        text = "none" if setting is None else f"{setting:g}" if isinstance(setting, float) else str(setting)
    return _FORBIDDEN.sub("_", text)


def visible_name(text: str) -> str:
    """Return a text as the name of a file or folder: visible, accepted by every common system, `MAX_PART` bytes."""
    name = unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode())
    name = _FORBIDDEN.sub("_", name).lstrip(" .@-").encode()[:MAX_PART].decode("utf-8", "ignore").rstrip(" .-")
    if not name:
        return "image"
    return f"_{name}" if _RESERVED.fullmatch(name) else name
