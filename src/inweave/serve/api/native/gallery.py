"""The gallery over HTTP: images of finished jobs that stay. Every call sees the images of the caller's account alone.

GET    /v1/gallery                      newest first: ?q=words &lora= &model= &album= &job= &starred=true &trashed=true,
                                        paged: pass `next` of an answer as `cursor`; `total` is in the first answer
POST   /v1/gallery                      the bytes of a PNG, JPEG or WebP: ?name=folder/file.png &modified=seconds;
                                        201, or 200 with the image that has the same bytes
GET    /v1/gallery/facets               models and LoRAs with the number of their images, and totals
POST   /v1/gallery/refresh              notice at once what other programs did to the folder
POST   /v1/gallery/star                 {images: [id], starred}
POST   /v1/gallery/delete               {images}: into the trash; /v1/gallery/restore {images}: back out of it
POST   /v1/gallery/purge                {images}: delete those of the trash for good; without `images`: all of it
GET    /v1/gallery/albums               POST {name}; PATCH {name}, DELETE /v1/gallery/albums/{id}
POST   /v1/gallery/albums/{id}/images   {images, present}: put images into an album, or take them out
GET    /v1/gallery/{id}                 one image; its /file, its /thumbnail, its /settings as /v1/pictures/settings
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel, Field

from inweave.errors import ConfigError
from inweave.serve.api.context import service_of
from inweave.serve.api.file_responses import library_file
from inweave.serve.api.json_body import JsonRoute
from inweave.serve.api.native.images import settings_document
from inweave.serve.api.openapi import answer_of, binary_body
from inweave.serve.service.gallery import MAX_IMAGES, GalleryQuery

router = APIRouter(prefix="/v1/gallery", route_class=JsonRoute)
ImageId = Annotated[str, Field(max_length=100)]
AlbumName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"\S")]
Text = Annotated[str, Query(max_length=500)]
#: addresses hold the time of change, so that a cached copy is never stale
CACHED = {"Cache-Control": "private, max-age=31536000, immutable"}


class Images(BaseModel):
    """Images by their ids."""

    images: Annotated[list[ImageId], Field(min_length=1, max_length=MAX_IMAGES)]


class Stars(Images):
    """Images, and whether they get a star or lose it."""

    starred: bool = True


class Purge(BaseModel):
    """Images of the trash; without them all of it."""

    images: Annotated[list[ImageId], Field(min_length=1, max_length=MAX_IMAGES)] | None = None


class NewAlbum(BaseModel):
    """The name of an album."""

    name: AlbumName


class AlbumChange(Images):
    """Images, and whether they come into an album or leave it."""

    present: bool = True


@router.get("")
async def list_images(
    request: Request, q: Text = "", lora: Text = "", model: Text = "", album: Text = "", job: Text = "",
    starred: bool = False, trashed: bool = False, cursor: Text = "", limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> dict[str, Any]:  # fmt: skip
    query = GalleryQuery(q, lora, model, starred, album, job, trashed, cursor, limit)
    return await service_of(request).gallery.images(query)


@router.post("", status_code=201, openapi_extra=binary_body())
async def import_image(
    request: Request, name: Text = "", modified: Annotated[float | None, Query(ge=0, le=1e11)] = None
) -> JSONResponse:
    """Store an image file unchanged."""
    content = await request.body()
    if not content:
        raise ConfigError("the body is empty: send the bytes of an image")
    document, new = await service_of(request).gallery.import_image(name, content, modified)
    return JSONResponse(document, 201 if new else 200, headers={"Location": f"/v1/gallery/{document['id']}"})


@router.get("/facets")
async def facets(request: Request) -> dict[str, Any]:
    return await service_of(request).gallery.facets()


@router.post("/refresh")
async def refresh(request: Request) -> dict[str, int]:
    return await service_of(request).gallery.refresh()


@router.post("/star")
async def star(request: Request, change: Stars) -> dict[str, Any]:
    return {"images": await service_of(request).gallery.star(change.images, change.starred)}


@router.post("/delete")
async def delete(request: Request, change: Images) -> dict[str, Any]:
    return {"deleted": await service_of(request).gallery.delete(change.images)}


@router.post("/restore")
async def restore(request: Request, change: Images) -> dict[str, Any]:
    return {"images": await service_of(request).gallery.restore(change.images)}


@router.post("/purge")
async def purge(request: Request, change: Purge) -> dict[str, Any]:
    return {"purged": await service_of(request).gallery.purge(change.images)}


@router.get("/albums")
async def albums(request: Request) -> dict[str, Any]:
    return {"albums": await service_of(request).gallery.albums()}


@router.post("/albums", status_code=201)
async def create_album(request: Request, new: NewAlbum) -> dict[str, Any]:
    return {"id": await service_of(request).gallery.create_album(new.name.strip()), "name": new.name.strip()}


@router.patch("/albums/{album}")
async def rename_album(request: Request, album: ImageId, new: NewAlbum) -> dict[str, Any]:
    await service_of(request).gallery.rename_album(album, new.name.strip())
    return {"id": album, "name": new.name.strip()}


@router.delete("/albums/{album}")
async def delete_album(request: Request, album: ImageId) -> dict[str, Any]:
    await service_of(request).gallery.delete_album(album)
    return {"deleted": album}


@router.post("/albums/{album}/images")
async def put_into_album(request: Request, album: ImageId, change: AlbumChange) -> dict[str, Any]:
    return {"images": await service_of(request).gallery.put_into_album(album, change.images, change.present)}


@router.get("/{image}")
async def get_image(request: Request, image: ImageId) -> dict[str, Any]:
    return await service_of(request).gallery.image(image)


@router.get("/{image}/file", response_class=Response, responses=answer_of("image/png"))
@router.head("/{image}/file", include_in_schema=False)
async def image_file(request: Request, image: ImageId, v: Text = "", download: bool = False) -> FileResponse:
    """Return the image file; ``v``: any text, with which browsers may cache it; ``download``: to be saved."""
    folder, path, media = await service_of(request).gallery.file(image)
    kind = "attachment" if download else "inline"
    return library_file(
        str(folder), path, f"the file of image {image}", media_type=media, headers=CACHED if v else None,
        filename=path.rpartition("/")[2], content_disposition_type=kind,
    )  # fmt: skip


@router.get("/{image}/thumbnail", response_class=Response, responses=answer_of("image/webp"))
async def thumbnail(request: Request, image: ImageId, v: Text = "") -> FileResponse:
    """Return a small copy of the image as WebP, or the image itself if it is small."""
    path = await service_of(request).gallery.thumbnail(image)
    if path is None:
        return await image_file(request, image, v)
    return FileResponse(path, media_type="image/webp", headers=CACHED if v else None)


@router.get("/{image}/settings")
async def image_settings(request: Request, image: ImageId) -> dict[str, Any]:
    service = service_of(request)
    return await settings_document(service, await service.gallery.settings(image))
