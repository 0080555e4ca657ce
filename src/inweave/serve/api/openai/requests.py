"""Requests of OpenAI's images API, and the image requests that they become.

The fields from `negative_prompt` on are ours. They are checked where they are used, so that messages are the same in
every API; fields of OpenAI's without an effect are named in the answer.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile

from inweave.errors import ConfigError, Problem
from inweave.serve.api.json_body import parse_json
from inweave.serve.jobs.image_request import ImageRequest, Operation

#: fields of OpenAI's that have no effect here -> the values with which none is expected; the answer names the others
_IGNORED: dict[str, tuple[str, ...] | None] = {
    "quality": ("auto", "standard"), "style": (), "background": ("auto", "opaque"), "moderation": None, "user": None,
    "input_fidelity": ("low",),
}  # fmt: skip
_BRACKET = re.compile(r"loras\[\d*\]\[(name|path|hash|weight|scale|strength|te|unet)\]")


class ImagesGeneration(BaseModel):
    """A request for new images."""

    prompt: str
    model: str | None = Field(default=None, description="a model, or <model>+<lora>:<strength>+...")
    n: int | None = None
    size: str | None = Field(default=None, pattern=r"^(auto|\d{1,5}x\d{1,5})$")
    quality: str | None = None
    style: str | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = None
    user: str | None = None
    input_fidelity: str | None = None
    stream: bool | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100)
    response_format: Literal["b64_json", "url"] | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3)
    negative_prompt: str | None = None
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_scale: float | None = None
    sampler: str | None = None
    strength: float | None = None
    width: int | None = None
    height: int | None = None
    feather: int | None = None
    clip_skip: int | None = None
    loras: list[str | dict[str, Any]] | None = None


class ImagesEdit(ImagesGeneration):
    """A request for changed images; transparent parts of the mask are repainted.

    An edit model sees all images as references; with a mask, the first one is repainted and the others are references.
    """

    image: bytes
    mask: bytes | None = None


#: fields that a form sends as text
_NUMBERS = {name for name, field in ImagesEdit.model_fields.items() if {int, float} & {*get_args(field.annotation)}}


async def form_fields(form: FormData) -> dict[str, Any]:
    """Return the fields of a multipart body: images in base64, numbers as numbers, LoRAs in any of three forms."""
    fields: dict[str, Any] = {}
    pairs: list[tuple[str, str]] = []
    images: list[UploadFile] = []
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name in ("image", "image[]"):
                images.append(value)
            elif name == "mask":
                fields["mask_image"] = base64.b64encode(await value.read()).decode()
            else:
                raise ConfigError(Problem(name[:100], "there is no such file field; send image and mask"))
        elif match := _BRACKET.fullmatch(name):
            pairs.append((match[1], value))
        elif name == "loras":
            fields["loras"] = _json_part(value)
        elif name in _NUMBERS:
            fields[name] = _number(name, value)
        elif name == "stream":
            fields[name] = {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower(), value)
        else:
            fields[name] = value
    if len(images) > 1:
        fields["images"] = [base64.b64encode(await image.read()).decode() for image in images]
    elif images:
        fields["image"] = base64.b64encode(await images[0].read()).decode()
    if pairs:
        fields["loras"] = _paired(pairs)
    return fields


def _json_part(text: str) -> Any:
    try:
        return parse_json(text)
    except ConfigError:
        return [part.strip() for part in text.split(",") if part.strip()]


def _number(name: str, text: str) -> float | int:
    try:
        return int(text) if re.fullmatch(r"[+-]?\d{1,25}", text.strip()) else float(text)
    except (ValueError, OverflowError):
        raise ConfigError(Problem(name, f"expected a number, got {text[:40]!r}")) from None


def _paired(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Read `loras[][name]`, `loras[][weight]`: the first name goes with the first weight, and so on."""
    columns: dict[str, list[Any]] = {}
    for name, value in pairs:
        name = {"weight": "strength", "scale": "strength"}.get(name, name)
        parsed = value if name in ("name", "path", "hash") else _number(f"loras.{name}", value)
        columns.setdefault(name, []).append(parsed)
    if len({len(column) for column in columns.values()}) != 1:
        raise ConfigError(Problem("loras", "every LoRA needs the same fields in this form; or send one field of JSON"))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def ignored_fields(body: Mapping[str, Any], stream: bool) -> list[str]:
    """Return a line per field that has no effect; raise ConfigError for a transparent background."""
    if wrong := [name for name in _IGNORED if not isinstance(body.get(name), str | None)]:
        raise ConfigError([Problem(name, "expected text") for name in wrong])
    if body.get("background") not in (None, "auto", "opaque"):
        raise ConfigError(Problem("background", "only opaque (or auto) can be made here"))
    lines = []
    for name, expected in _IGNORED.items():
        if expected is not None and body.get(name) is not None and body[name] not in expected:
            lines.append(f"{name} has no effect here")
    if body.get("partial_images") and not stream:
        lines.append("partial_images has no effect without stream")
    return lines


def dimensions(size: object) -> tuple[int, int] | None:
    """Return (width, height) of a size, or None for "auto"."""
    if size in ("auto", "", None):
        return None
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", size) if isinstance(size, str) else None
    if match is None:
        raise ConfigError(Problem("size", "expected WIDTHxHEIGHT, such as 512x512, or auto"))
    return int(match[1]), int(match[2])


def field_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Return OpenAI's names for fields of an image request."""
    return {"count": "n", "mask_image": "mask", "references": "image"} | (
        {"width": "size", "height": "size"} if "size" in body else {}
    )


def partial_images(body: Mapping[str, Any]) -> int | None:
    """Return how many partial images a stream may have; None if the request does not say."""
    partial = body.get("partial_images")
    if partial is not None and (type(partial) is not int or not 0 <= partial <= 3):
        raise ConfigError(Problem("partial_images", "expected a number from 0 to 3"))
    return partial


def image_request(body: Mapping[str, Any], operation: Operation, default_steps: int) -> ImageRequest:
    """Return the image request of a body; ``default_steps``: those of the model."""
    fields = {name: value for name, value in body.items() if name not in _IGNORED and value is not None}
    fields.pop("partial_images", None)
    if partial := partial_images(body):
        steps = fields.get("steps")
        fields["preview_every"] = max(
            1, (steps if isinstance(steps, int) and steps > 0 else default_steps) // (partial + 1)
        )
    if "n" in fields:
        fields["count"] = fields.pop("n")
    if (size := dimensions(fields.pop("size", "auto"))) is not None:
        fields["width"], fields["height"] = size
    model, plus, stack = str(fields.pop("model", "") or "").partition("+")
    if model:
        fields["model"] = model
    if plus:
        listed = fields.get("loras") or []
        fields["loras"] = [*(listed if isinstance(listed, list) else [listed]), *stack.split("+")]
    return ImageRequest.parse({**fields, "operation": operation})
