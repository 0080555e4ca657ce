"""Requests and events in the form of rbee's SD worker.

    operation  image_generation | image_transform | image_inpaint, with hive_id; defaults of the contract:
               steps 20, guidance_scale 7.5, width and height 512, strength 0.8; inpainting repaints all of the mask

    event: progress   {"type": "progress", "step", "total", "percent"}
    event: preview    the same with "image" (base64 PNG) and "format"
    event: complete   {"type": "complete", "image", "format": "png"}, and the seed
    event: error      {"type": "error", "message"}

Steps count from 1; steps 1, 6, 11, ... and the last one are previews. The stream ends after `complete` or `error`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sse_starlette import ServerSentEvent

from inweave.serve.jobs.job import StoredEvent

RBEE = "rbee"  # marks the jobs of its clients
_DEFAULTS: dict[str, dict[str, Any]] = {
    "image_generation": {"width": 512, "height": 512},
    "image_transform": {"strength": 0.8},
    "image_inpaint": {"strength": 1.0},
}


def contract_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request of rbee's, with the contract's values for fields that were left out."""
    fields = {"steps": 20, "guidance_scale": 7.5, "preview_every": 5, "preview_first": True}
    fields |= _DEFAULTS.get(str(body.get("operation")), {})
    if "guidance" in body:
        del fields["guidance_scale"]
    return fields | {str(name): value for name, value in body.items() if value is not None or name not in fields}


def device_label(device: str | None) -> str:
    """Return the name of a device in WorkerInfo: GPU-0, CPU-0."""
    kind, _, number = (device or "auto").partition(":")
    return {"cuda": f"GPU-{number or 0}", "cpu": "CPU-0", "mps": "GPU-0"}.get(kind, kind)


def rbee_event(event: StoredEvent, read: Callable[[str], bytes]) -> Iterator[ServerSentEvent]:
    """Yield an event in rbee's form; most have none. ``read`` returns a file of the job."""
    data: dict[str, Any] | None = None
    if event.type in ("progress", "preview"):
        names = (
            ("step", "total", "percent", "image", "format") if event.type == "preview" else ("step", "total", "percent")
        )
        data = {name: event.data[name] for name in names}
        kind = event.type
    elif event.type == "done":
        images = event.data.get("images", [])
        contents = [base64.b64encode(read(image["file"])).decode() for image in images]
        data, kind = {"image": contents[0] if contents else "", "format": "png"}, "complete"
        if images:
            data["seed"] = images[0]["seed"]
        if len(contents) > 1:
            data["images"] = contents
    elif event.type == "failed":
        data, kind = {"message": event.data["message"]}, "error"
    elif event.type == "cancelled":
        data, kind = {"message": "cancelled"}, "error"
    if data is not None:
        yield ServerSentEvent(json.dumps({"type": kind, **data}), event=kind, id=str(event.number))
