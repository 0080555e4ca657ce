"""Requests of the native API, and how they become submissions.

    {"operation": "image_generation", "prompt": ..., "loras": [{"name": "pixel", "strength": 0.8}], ...}

A request names models by the names of `/v1/models`, LoRAs by a name, a path inside the library or a hash, and brings
images in base64 or by the id of an upload. It never names a file of this machine.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field

from inweave.checked import CheckedModel
from inweave.errors import ConfigError, Problem, RequestError
from inweave.generate.config import GenerateConfig
from inweave.models.families.references import MOST_REFERENCES

Operation = Literal["image_generation", "image_transform", "image_inpaint"]
OnMismatch = Literal["error", "warn"]
#: fields of a request that are not settings of the image
_OWN = (
    "operation", "model", "priority", "on_mismatch", "preview_every", "preview_first", "gallery", "image", "mask_image",
    "references", "grid",
)  # fmt: skip
#: field names of rbee's clients, and fields that have no meaning for a single worker
_ALIASES = {"kind": "operation", "init_image": "image", "input_image": "image", "mask": "mask_image", "init": "image"}
_IGNORED = ("hive_id", "worker_id")
#: media types that a data: URL may state; the content decides
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/bmp", "application/octet-stream")


class ImageRequest(CheckedModel):
    """One image job as a client sends it; ``settings`` holds the fields of `GenerateConfig`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    operation: Operation = "image_generation"
    model: str | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    on_mismatch: OnMismatch = "error"
    preview_every: Annotated[int, Field(ge=0, le=150)] = Field(
        default=0, description="a preview image every n steps; 0: none"
    )
    preview_first: bool = Field(default=False, description="previews from the first step on, and of the last one")
    gallery: bool = Field(default=True, description="whether the images stay in the gallery when the job has expired")
    image: str | None = Field(default=None, description="the image to start from, in base64 or by the id of an upload")
    mask_image: str | None = Field(default=None, description="white where to repaint, likewise")
    references: tuple[str, ...] = Field(
        default=(), max_length=MOST_REFERENCES, description="images that an edit model sees, in order, likewise"
    )
    grid: Annotated[tuple[Annotated[str, Field(max_length=10_000)], ...], Field(max_length=2)] = Field(
        default=(),
        description="one or two axes, such as strength=0,0.5,1: the result is one sheet of an image for each value",
    )
    settings: GenerateConfig

    @classmethod
    def parse(cls, body: object) -> ImageRequest:
        """Return the request in a JSON body; raise ConfigError with everything that is wrong with it."""
        if not isinstance(body, Mapping):
            raise ConfigError("expected a JSON object with an operation and a prompt")
        problems: list[Problem] = []
        fields: dict[str, Any] = {}
        for name, value in body.items():
            ours = _ALIASES.get(str(name), str(name))
            if fields.get(ours) not in (None, value) and value is not None:
                problems.append(Problem(str(name), f"another name of {ours}, with another value; give one of them"))
            if name not in _IGNORED and (value is not None or ours not in fields):
                fields[ours] = value
        if (operation := fields.get("operation")) is not None and operation not in get_args(Operation):
            names = ", ".join(get_args(Operation))
            expected = f"should be one of {names} and train, got {str(operation)[:100]!r}"
            problems.append(Problem("operation", expected))
            del fields["operation"]
        own = {name: fields[name] for name in _OWN if fields.get(name) is not None}
        settings = {name: value for name, value in fields.items() if name not in _OWN and value is not None}
        parsed: GenerateConfig | None = None
        try:
            parsed = GenerateConfig(**settings)
        except ConfigError as error:
            problems += error.problems
        try:
            request = cls(**own, settings=parsed or GenerateConfig.model_construct(prompt="-"))
        except ConfigError as error:
            raise ConfigError([*error.problems, *problems]) from None
        problems = problems or request._contradictions()
        if problems:
            raise ConfigError(problems)
        return request

    def _contradictions(self) -> list[Problem]:
        required = {"image_generation": (False, False), "image_transform": (True, False), "image_inpaint": (True, True)}
        problems = []
        for name, value, needed in zip(
            ("image", "mask_image"), (self.image, self.mask_image), required[self.operation], strict=True
        ):
            if needed and value is None:
                problems.append(Problem(name, f"is required for {self.operation}"))
            if not needed and value is not None:
                problems.append(Problem(name, f"{self.operation} does not use it"))
        return problems


def decode_base64(text: str, label: str, limit: int) -> bytes:
    """Return the bytes of an image in base64, with or without a data: prefix; other URLs are refused, never fetched."""
    if re.match(r"(?!data:)[A-Za-z][A-Za-z0-9+.-]*:", text):
        raise RequestError(Problem(label, "URLs are not fetched; send the image itself in base64, or upload it"))
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RequestError(Problem(label, "the header of a data: URL must end in ;base64, followed by the image"))
        media = head.removeprefix("data:").partition(";")[0].strip().lower()
        if media not in _MEDIA_TYPES:
            reason = f"a data: URL of {media[:40] or 'no type'!r}; send image/png, jpeg, webp or bmp"
            raise RequestError(Problem(label, reason))
    if len(text) > 4 * limit // 3 + 4:
        raise RequestError(Problem(label, f"larger than {limit:,} bytes"))
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(Problem(label, "this is neither base64 nor the id of an upload")) from None


def png_size(content: bytes) -> tuple[int, int]:
    """Return (width, height) of a PNG that was checked."""
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


def fingerprint(body: object) -> str:
    """Return a hash of a request that does not depend on the order of its fields."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
