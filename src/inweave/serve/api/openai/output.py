"""Images in the format that a request asks for."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

from inweave.errors import ConfigError, Problem

_FORMATS = {"png": "PNG", "jpeg": "JPEG", "webp": "WEBP"}


@dataclass(frozen=True, slots=True)
class Output:
    """How images are sent: format, quality, in the answer or as an address."""

    format: str
    quality: int
    url: bool

    @classmethod
    def take(cls, body: dict[str, Any]) -> Output:
        """Remove the fields of the output from a request and return it; raise ConfigError if they are wrong."""
        kind = body.pop("output_format", None) or "png"
        quality = body.pop("output_compression", None)
        where = body.pop("response_format", None) or "b64_json"
        problems = []
        if not isinstance(kind, str) or kind not in _FORMATS:
            problems.append(Problem("output_format", f"expected one of {', '.join(_FORMATS)}"))
        if quality is not None and (type(quality) is not int or not 0 <= quality <= 100):
            problems.append(Problem("output_compression", "expected a number from 0 to 100"))
        if where not in ("url", "b64_json"):
            problems.append(Problem("response_format", "expected url or b64_json"))
        if quality is not None and kind == "png":
            problems.append(Problem("output_compression", "only for jpeg and webp"))
        if where == "url" and kind != "png":
            problems.append(Problem("response_format", "files are png; ask for b64_json to have another output_format"))
        if problems:
            raise ConfigError(problems)
        return cls(kind, 95 if quality is None else quality, where == "url")

    def encode(self, content: bytes) -> str:
        """Return a PNG in this format, in base64."""
        if self.format != "png":
            from PIL import Image

            target = io.BytesIO()
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                image.convert("RGB").save(target, format=_FORMATS[self.format], quality=self.quality)
            content = target.getvalue()
        return base64.b64encode(content).decode()
