"""Styles and wildcards, which prompts may name.

GET    /v1/styles             every style: name, prompt, negative_prompt
PUT    /v1/styles             add one, or replace the one of its name
DELETE /v1/styles?name=       remove one
GET    /v1/wildcards          the names of all wildcards
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from inweave.generate.styles import MAX_NAME, MAX_PROMPT, Style
from inweave.serve.api.context import service_of
from inweave.serve.api.json_body import JsonRoute

router = APIRouter(prefix="/v1", route_class=JsonRoute)


class StyleBody(BaseModel):
    """A named text for prompts; `{prompt}` in it is the prompt that it is wrapped around."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)] = ""
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] = ""


@router.get("/styles")
async def styles(request: Request) -> dict[str, list[dict[str, Any]]]:
    return {"styles": [asdict(style) for style in await service_of(request).prompts.styles()]}


@router.put("/styles")
async def put_style(request: Request, body: StyleBody) -> dict[str, Any]:
    style = Style(body.name.strip(), body.prompt, body.negative_prompt)
    await service_of(request).prompts.put_style(style)
    return asdict(style)


@router.delete("/styles")
async def remove_style(request: Request, name: Annotated[str, Query(max_length=1000)]) -> dict[str, Any]:
    await service_of(request).prompts.remove_style(name)
    return {"name": name, "status": "removed"}


@router.get("/wildcards")
async def wildcards(request: Request) -> dict[str, list[str]]:
    return {"wildcards": await service_of(request).prompts.wildcards()}
