"""Events in the words of rbee's SD worker.

    event: progress   {"type": "progress", "step", "total", "percent"}
    event: preview    the same with "image" (base64 PNG) and "format"
    event: complete   {"type": "complete", "image", "format": "png"}, and the seed
    event: error      {"type": "error", "message"}

Steps count from 1; the stream ends after `complete` or `error`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sse_starlette import ServerSentEvent

from inweave.serve.jobs import StoredEvent


def rbee_event(event: StoredEvent, files: Path) -> Iterator[ServerSentEvent]:
    """What an event means to rbee's clients; most mean nothing to them."""
    data: dict[str, Any] | None = None
    if event.type in ("progress", "preview"):
        names = (
            ("step", "total", "percent", "image", "format") if event.type == "preview" else ("step", "total", "percent")
        )
        data = {name: event.data[name] for name in names}
        kind = event.type
    elif event.type == "done":
        images = event.data.get("images", [])
        pictures = [base64.b64encode((files / image["file"]).read_bytes()).decode() for image in images]
        data, kind = {"image": pictures[0] if pictures else "", "format": "png"}, "complete"
        if images:
            data["seed"] = images[0]["seed"]
        if len(pictures) > 1:
            data["images"] = pictures
    elif event.type == "failed":
        data, kind = {"message": event.data["message"]}, "error"
    elif event.type == "cancelled":
        data, kind = {"message": "cancelled"}, "error"
    if data is not None:
        yield ServerSentEvent(json.dumps({"type": kind, **data}), event=kind, id=str(event.number))
