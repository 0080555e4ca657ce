"""Images that are only enlarged.

POST /sdapi/v1/extra-single-image   {image, upscaler_1, upscaling_resize | upscaling_resize_w, upscaling_resize_h}
POST /sdapi/v1/extra-batch-images   {imageList: [{data, name}], ...}

resize_mode 0 multiplies both sides by `upscaling_resize`; 1 enlarges until the image covers the width and the height,
and crops what is left over unless `upscaling_crop` is false. The upscaler "None" changes nothing, as in A1111.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from inweave.errors import ConfigError, Problem, RequestError
from inweave.serve.api.a1111.fields import label_of, number, switch, whole_number
from inweave.serve.api.a1111.progress import sdapi_client
from inweave.serve.api.a1111.requests import ExtrasBatch, ExtrasSingle, object_body
from inweave.serve.api.context import service_of
from inweave.serve.api.openapi import MAY_BE_BUSY, json_body_of
from inweave.serve.api.waiting import wait_or_cancel
from inweave.serve.jobs.image_request import ImageRequest, png_size

router = APIRouter(prefix="/sdapi/v1")
MAX_IMAGES = 100
_EXAMPLE = {"image": "iVBORw0KGgo...", "upscaler_1": "Lanczos", "upscaling_resize": 2}
_BATCH = {"imageList": [{"data": "iVBORw0KGgo...", "name": "a.png"}], "upscaler_1": "Lanczos"}


@router.post("/extra-single-image", responses=MAY_BE_BUSY, openapi_extra=json_body_of(ExtrasSingle, _EXAMPLE))
async def extra_single_image(request: Request) -> dict[str, Any]:
    body = _without_nulls(await object_body(request))
    return {"html_info": "", "image": await _enlarged(request, body, body.get("image"), "image")}


@router.post("/extra-batch-images", responses=MAY_BE_BUSY, openapi_extra=json_body_of(ExtrasBatch, _BATCH))
async def extra_batch_images(request: Request) -> dict[str, Any]:
    body = _without_nulls(await object_body(request))
    files = body.get("imageList")
    if not isinstance(files, list) or not 1 <= len(files) <= MAX_IMAGES:
        raise ConfigError(Problem("imageList", f"expected 1 to {MAX_IMAGES} objects with data and name"))
    images = [
        await _enlarged(request, body, each.get("data") if isinstance(each, Mapping) else None, f"imageList.{number}")
        for number, each in enumerate(files)
    ]
    return {"html_info": "", "images": images}


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


async def _enlarged(request: Request, body: Mapping[str, Any], image: object, label: str) -> str:
    """Return an image in base64, enlarged."""
    service = service_of(request)
    if not isinstance(image, str) or not image:
        raise ConfigError(Problem(label, "expected an image in base64"))
    content = await service.images.read(image, label)
    upscale = _upscale(body, png_size(content))
    if upscale is None:
        return base64.b64encode(content).decode()
    fields = {
        "operation": "image_transform", "prompt": "", "strength": 0.0, "image": base64.b64encode(content).decode(),
        "upscale": upscale, "gallery": False, "seed": 0,
    }  # fmt: skip
    names = {"upscale.upscaler": "upscaler_1", "upscale.scale": "upscaling_resize", "upscale": "upscaling_resize"}
    try:
        job = await service.submit_image(ImageRequest.parse(fields), client=sdapi_client(request))
    except ConfigError as error:
        raise error.renamed(names) from None
    ended = await wait_or_cancel(request, service, job)
    images = await service.jobs.images(ended) if ended.state == "done" else []
    if not images:
        raise RequestError("the image was not enlarged: the job was cancelled")
    return base64.b64encode(images[0]).decode()


def _upscale(body: Mapping[str, Any], size: tuple[int, int]) -> dict[str, Any] | None:
    """Return how an image is enlarged; None: not at all."""
    for name in ("gfpgan_visibility", "codeformer_visibility", "extras_upscaler_2_visibility"):
        if number(body, name):
            raise ConfigError(Problem(name, "faces are not restored, and images not blended, here; set it to 0"))
    upscaler = label_of(body, "upscaler_1")
    if upscaler in ("", "None"):
        return None
    if not whole_number(body, "resize_mode", 1):
        scale = number(body, "upscaling_resize")
        scale = 2.0 if scale is None else scale
        return None if scale == 1 else {"upscaler": upscaler, "scale": scale, "strength": 0}
    sides = [512 if (side := whole_number(body, f"upscaling_resize_{name}")) is None else side for name in "wh"]
    target = dict(zip(("width", "height"), sides, strict=True))
    if not switch(body, "upscaling_crop", True):  # the side that needs more decides
        name = "width" if sides[0] / size[0] >= sides[1] / size[1] else "height"
        target = {name: target[name]}
    return {"upscaler": upscaler, "strength": 0, **target}
