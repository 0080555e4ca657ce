"""The worker itself.

GET /v1/capabilities          models, samplers, limits
GET /health, /ready, /metrics
"""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from inweave.formats.dialects import written_dialects
from inweave.generate.axes import AXES
from inweave.models.samplers import offered_samplers, offered_schedules
from inweave.serve.api.context import service_of
from inweave.serve.api.errors import RETRY_AFTER
from inweave.serve.api.native.metrics import metrics_text
from inweave.serve.api.openapi import answer_of
from inweave.serve.service.datasets import MAX_DATASETS, MAX_IMAGES
from inweave.targets.bases import KNOWN
from inweave.version import __version__

router = APIRouter()
_FEATURES = (
    "lora", "lora_by_hash", "preview", "cancel", "events_resume", "idempotency_key", "priority", "uploads", "upscale",
    "outpaint", "styles", "wildcards", "sheets",
)  # fmt: skip


@router.get("/v1/capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    service = service_of(request)
    models, limits = service.models, service.settings
    features = [*_FEATURES, *(["gallery"] if service.gallery.enabled else [])]
    features += ["captions"] if service.datasets.captions else []
    images = ("image_generation", "image_transform", "image_inpaint")
    return {
        "version": __version__, "operations": [*images, *(["train"] if limits.allow_train else [])],
        "models": [
            {"name": name, "default": name == models.name(None), **await models.facts(name)} for name in models.names
        ],
        "upscalers": await service.prompts.upscalers(), "axes": list(AXES),
        "samplers": list(offered_samplers()), "schedules": list(offered_schedules()),
        "bases": [known.name for known in KNOWN], "dialects": written_dialects(), "features": features,
        "limits": {
            "queue": limits.queue_limit, "body_bytes": limits.body_bytes, "lora_bytes": limits.lora_bytes,
            "image_pixels": limits.image_pixels, "images_per_job": limits.max_images, "job_seconds": limits.job_seconds,
            "keep_hours": limits.keep_hours, "uploads": limits.upload_count,
            "upload_bytes": int(limits.upload_gb * 1024**3), "datasets": MAX_DATASETS,
            "pictures_per_dataset": MAX_IMAGES, "dataset_bytes": int(limits.dataset_gb * 1024**3),
        },
    }  # fmt: skip


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health() -> dict[str, Any]:
    return {"status": "healthy", "timestamp": _now()}


@router.get("/ready")
@router.get("/v1/ready")
@router.head("/ready", include_in_schema=False)
@router.head("/v1/ready", include_in_schema=False)
async def ready(request: Request) -> JSONResponse:
    able, reason = service_of(request).readiness
    body = {"ready": able, "timestamp": _now()} | ({} if able else {"reason": reason})
    return JSONResponse(body, 200 if able else 503, headers={} if able else {"Retry-After": str(RETRY_AFTER)})


@router.get("/metrics", response_class=Response, responses=answer_of("text/plain"))
async def metrics(request: Request) -> Response:
    text = await asyncio.to_thread(metrics_text, service_of(request))
    return Response(text, media_type="text/plain; version=0.0.4")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
