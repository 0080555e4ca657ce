"""Models, and every LoRA as "<model>+<lora>" with its parent.

GET /v1/models
GET /v1/models/{model}
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from inweave.generate.config import parse_loras
from inweave.serve.api.context import service_of

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    created = int(service.started)
    names = service.models.names
    rows = [{"id": name, "object": "model", "created": created, "owned_by": "inweave"} for name in names]
    for entry in await service.loras.entries(limit=1000):
        for name in names:
            if not entry.health and await service.loras.fits_by_header(entry, name):
                rows.append({**rows[0], "id": f"{name}+{entry.name}", "parent": name})
    return {"object": "list", "data": rows}


@router.get("/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """Return one model, or one with LoRAs: "<model>+<lora>"."""
    service = service_of(request)
    base, plus, stack = model.partition("+")
    name = service.models.name(base)
    await service.loras.find_all(parse_loras(stack.split("+")) if plus else ())
    row = {"id": f"{name}{plus}{stack}", "object": "model", "created": int(service.started), "owned_by": "inweave"}
    return row | ({"parent": name} if plus else {})
