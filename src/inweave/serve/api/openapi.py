"""The OpenAPI document, made of the models that routes declare.

FastAPI collects the models of parameters and answers. Routes that read their body themselves, because they are more
lenient or stricter than FastAPI, declare it with `json_body_of`, `binary_body` or `form_body_of`. Refusals that only
some routes have, `MAY_BE_BUSY` and those of bodies, have the content that the router documents for any refusal.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

ABOUT = "Images with LoRAs: a durable queue, events that can be rejoined; also the APIs of AUTOMATIC1111 and OpenAI."
_REF = "#/components/schemas/{model}"
#: responses of routes that put something into a queue
MAY_BE_BUSY: dict[int | str, dict[str, Any]] = {
    429: {"description": "the queue is full; Retry-After says when to ask again"}
}
#: status of a body that is refused while it arrives -> why
_BODIES = {408: "the body arrives too slowly", 413: "the body is larger than the worker accepts"}
_BINARY = {"type": "string", "contentMediaType": "application/octet-stream", "format": "binary"}
Documented = dict[str, Any]


def json_body_of(model: Any, example: dict[str, Any]) -> Documented:
    """Document a JSON body: a model, or a union of models."""
    return _body({"application/json": {"schema": _schema(model), "example": example}})


def form_body_of(model: type[BaseModel]) -> Documented:
    """Document the fields of a multipart form."""
    return _body({"multipart/form-data": {"schema": _schema(model)}})


def binary_body(*, form: bool = False) -> Documented:
    """Document a body of plain bytes; ``form``: they may also be the one file of a multipart form."""
    content: Documented = {"application/octet-stream": {"schema": _BINARY}}
    if form:
        file = {"type": "object", "required": ["file"], "properties": {"file": _BINARY}}
        content["multipart/form-data"] = {"schema": file}
    return _body(content)


def answer_of(media: str, status: int = 200) -> dict[int | str, Documented]:
    """Document an answer that is not JSON."""
    return {status: {"content": {media: {"schema": {"type": "string"} if media.startswith("text/") else _BINARY}}}}


def _body(content: Documented) -> Documented:
    return {"requestBody": {"required": True, "content": content}}


def _schema(model: Any) -> Documented:
    """Return a reference to a model, with the definitions that `openapi_document` moves to the components."""
    schema = TypeAdapter(model).json_schema(ref_template=_REF)
    definitions = schema.pop("$defs", {})
    if "title" in schema:  # a model itself, not a union of references
        definitions[schema["title"]] = schema
        schema = {"$ref": _REF.format(model=schema["title"])}
    return {**schema, "$defs": definitions}


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for operation in (each for operations in document["paths"].values() for each in operations.values()):
            for media, described in operation.get("requestBody", {}).get("content", {}).items():
                schema = dict(described["schema"])
                schemas |= schema.pop("$defs", {})
                operation["requestBody"]["content"][media] = {**described, "schema": schema}
            answers = operation["responses"]
            if "requestBody" in operation:
                answers |= {str(status): {"description": reason} for status, reason in _BODIES.items()}
            for status in answers.keys() & {"408", "413", "429"} if "4XX" in answers else ():
                answers[status] |= {"content": answers["4XX"]["content"]}
        app.openapi_schema = document
    return app.openapi_schema
