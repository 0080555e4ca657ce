"""The settings of an image, written into it and read back.

    PNG text `inweave`      JSON: the complete configuration, the model, and every LoRA with hashes, strengths and the
                            modules it matched; `inweave generate --from` repeats it exactly
    PNG text `parameters`   the same for other front ends (`inweave.generate.infotext`)

JPEG and WebP carry both in EXIF (`inweave.generate.saving`).

Read are these, the `parameters` of other front ends (in a JPEG or WebP: the EXIF comment), and what ComfyUI and
InvokeAI write (`inweave.generate.comfy`, `inweave.generate.invoke`). An image is untrusted input: it can name LoRAs
inside the LoRA folders, but no path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from inweave.errors import RequestError
from inweave.files.documents import parse_json
from inweave.files.images import open_image
from inweave.files.paths import printable_path
from inweave.generate.comfy import from_comfy, has_sampler
from inweave.generate.comfy_workflow import graph_of
from inweave.generate.config import GenerateConfig
from inweave.generate.infotext import from_infotext, infotext, not_reproduced, parse_infotext
from inweave.generate.invoke import from_invoke
from inweave.generate.source import ImageSettings
from inweave.generate.wildcards import escaped
from inweave.models.families.references import MOST_REFERENCES

__all__ = ["from_infotext", "infotext", "png_text", "read_record", "read_settings", "settings_of"]

EXIF_IFD, USER_COMMENT, MAKER_NOTE = 0x8769, 0x9286, 0x927C
MAKER_PREFIX = b"inweave\0"  # before our JSON in the MakerNote of a JPEG or WebP
_CHOICE = ("name", "hash", "strength", "te", "unet", "alpha")  # of a LoRA; an image must not name a path


def png_text(record: Mapping[str, Any]) -> PngImagePlugin.PngInfo:
    """Return both texts, for `Image.save(pnginfo=...)`."""
    info = PngImagePlugin.PngInfo()
    info.add_itxt("parameters", infotext(record))
    info.add_itxt("inweave", json.dumps(record, ensure_ascii=False, sort_keys=True))
    return info


def read_record(path: str | Path) -> dict[str, Any]:
    """Return the settings in an image: inweave's, or those of another front end as far as inweave has them.

    ``config`` holds fields of `GenerateConfig`; ``warnings`` has a line for each thing that is not reproduced.
    """
    return read_settings(path).as_dict()


def read_settings(path: str | Path) -> ImageSettings:
    """Return the settings in an image as an object."""
    with open_image(path, error=RequestError) as image:
        return settings_of(image, printable_path(path))


def settings_of(image: Image.Image, label: str) -> ImageSettings:
    """Return the settings in an open image; ``label`` is its name in messages."""
    text = _texts(image, label)
    if "inweave" in text:
        return _from_inweave(label, _parsed(label, "inweave", text["inweave"]))
    if "parameters" in text:
        return parse_infotext(text["parameters"])
    if "invokeai_metadata" in text:
        return from_invoke(_parsed(label, "invokeai_metadata", text["invokeai_metadata"]))
    if "prompt" in text or "workflow" in text:
        return from_comfy(_graph(label, text))
    raise RequestError(f"{label}: no generation settings in this image (neither `inweave` nor `parameters`)")


def _graph(label: str, text: Mapping[str, str]) -> dict[str, Any]:
    """Return ComfyUI's graph: its `prompt`, or its `workflow` if that has no sampler or is damaged."""
    problem: RequestError | None = None
    for name in ("prompt", "workflow"):
        if name not in text:
            continue
        try:
            document = _parsed(label, name, text[name], finite=False)  # its nodes hold NaN for "changed"
        except RequestError as error:
            problem = problem or error
            continue
        graph = document if name == "prompt" else graph_of(document)
        if has_sampler(graph):
            return graph
    if problem is not None:
        raise problem
    raise RequestError(f"{label}: the graph of ComfyUI in this image has no sampler that is known")


def _texts(image: Image.Image, label: str) -> dict[str, str]:
    try:
        image.load()
        text = {str(key): value for key, value in image.info.items() if isinstance(value, str)}
        exif = image.getexif()
        tags_of_comfy = [value for value in exif.values() if isinstance(value, str)]  # Make and Model, in WebP
        tags = exif.get_ifd(EXIF_IFD)
        comment, note = _user_comment(tags), tags.get(MAKER_NOTE)
    except Exception as error:  # decoders raise any exception for a broken file
        raise RequestError(f"{label}: not an image that can be read: {error}") from None
    if comment and "parameters" not in text:
        text["parameters"] = comment
    for value in tags_of_comfy:
        name, colon, content = value.partition(":")
        if colon and name in ("prompt", "workflow"):
            text.setdefault(name, content.strip("\0"))
    if isinstance(note, bytes) and note.startswith(MAKER_PREFIX) and "inweave" not in text:
        text["inweave"] = note.removeprefix(MAKER_PREFIX).decode("utf-8", "replace")
    return text


def _user_comment(tags: Mapping[int, Any]) -> str:
    """Return the EXIF comment, in which JPEG and WebP carry the `parameters` of other front ends."""
    comment = tags.get(USER_COMMENT)
    if isinstance(comment, str):
        return comment
    if not isinstance(comment, bytes):
        return ""
    encoding, raw = comment[:8], comment[8:]
    if encoding.startswith(b"UNICODE"):
        return raw.decode("utf-16-le" if raw[1:2] == b"\0" else "utf-16-be", "replace")
    return raw.decode("utf-8", "replace").strip("\0")


def _parsed(label: str, name: str, text: str, *, finite: bool = True) -> dict[str, Any]:
    document = parse_json(text, f"{label}: its `{name}` text is damaged", error=RequestError, finite=finite)
    if not isinstance(document, dict):
        raise RequestError(f"{label}: its `{name}` text is damaged: a JSON object was expected")
    return document


def _from_inweave(label: str, record: Mapping[str, Any]) -> ImageSettings:
    """Read a record of inweave: the fields that this version knows, and no path."""
    config, model, loras = record.get("config"), record.get("model"), record.get("loras")
    if not isinstance(config, dict) or not isinstance(config.get("prompt"), str):
        raise RequestError(f"{label}: its `inweave` text is damaged: there is no config with a prompt")
    settings = ImageSettings(
        {}, model=model if isinstance(model, dict) else {}, loras=loras if isinstance(loras, list) else []
    )
    for name, value in config.items():
        if name in ("init", "mask", "references"):
            continue
        if name not in GenerateConfig.model_fields:
            settings.warnings.append(not_reproduced(name, value, "this version has no such setting"))
        else:
            settings.config[name] = value
    settings.model |= {"hash": settings.model.get("autov1")}
    inputs = record.get("inputs")
    known = ("init", "mask", *(f"reference {number}" for number in range(1, MOST_REFERENCES + 1)))
    settings.inputs = tuple(name for name in known if name in inputs) if isinstance(inputs, dict) else ()
    for lora in settings.loras:
        if isinstance(lora, dict) and isinstance(lora.get("name"), str) and isinstance(lora.get("sha256"), str):
            settings.hashes.setdefault(lora["name"], lora["sha256"])
    if not settings.config.get("template"):  # a recorded prompt is one without choices
        for name in ("prompt", "negative_prompt"):
            if isinstance(settings.config.get(name), str):
                settings.config[name] = escaped(settings.config[name])
    if "loras" in config:
        settings.config["loras"] = _choices(settings, config["loras"])
    _read_origin(settings, record)
    return settings


def _choices(settings: ImageSettings, entries: object) -> list[dict[str, Any]]:
    """Return the LoRAs of a configuration by name; the second of two with one name by its hash."""
    choices: list[dict[str, Any]] = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not ("name" in entry or "hash" in entry) or entry.get("path") is not None:
            settings.warnings.append(not_reproduced("loras", entry, "an image cannot name files; use --lora"))
            continue
        choice = {name: value for name, value in entry.items() if name in _CHOICE}
        hashes = [
            lora["sha256"]
            for lora in settings.loras
            if isinstance(lora, dict)
            and all(lora.get(key) == entry.get(key) for key in ("name", "te", "unet"))
            and isinstance(lora.get("sha256"), str)
        ]
        if hashes and hashes[0] != settings.hashes.get(entry.get("name", "")):
            choice = {name: value for name, value in choice.items() if name != "name"} | {"hash": hashes[0]}
        choices.append(choice)
    return choices


def _read_origin(settings: ImageSettings, record: Mapping[str, Any]) -> None:
    """Images that are more than one request: a sample of a training run, a cell or a sheet of a grid."""
    training, grid = record.get("training"), record.get("grid")
    if isinstance(training, dict):
        settings.warnings.append(
            f"LoRA {training.get('name')!s:.80} as it was at step {training.get('step')!s:.20} of its training is not "
            "reproduced: add the file of that step with --lora"
        )
    if isinstance(grid, dict):
        settings.axes = tuple(axis for axis in grid.get("axes") or () if isinstance(axis, str))[:2]
        axes = " ".join(f"--grid {axis!s:.80}" for axis in grid.get("axes", ())) if grid.get("axes") else "--compare"
        settings.warnings.append(f"a grid of {grid.get('cells')!s:.10} images is repeated as one image; add {axes}")
