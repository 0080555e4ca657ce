"""The settings that A1111 keeps for all clients together: the checkpoint and CLIP's layer; others have no effect.

GET, POST /sdapi/v1/options
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request

from inweave.serve.api.a1111.fields import clip_skip_option, ignored_options
from inweave.serve.api.a1111.requests import Options, object_body
from inweave.serve.api.context import service_of
from inweave.serve.api.openapi import json_body_of
from inweave.serve.service.models import Models

router = APIRouter(prefix="/sdapi/v1")
MAX_NOTED = 50


@dataclass(frozen=True, slots=True)
class SdOptions:
    """Defaults of requests; ``without_effect`` holds a line for each setting that is not followed."""

    model: str
    clip_skip: int | None = None
    without_effect: tuple[str, ...] = ()

    def override(self, changes: Mapping[str, Any], models: Models) -> SdOptions:
        """Return these settings with some changed; raise an error for unknown checkpoints and values out of range."""
        model = changes.get("sd_model_checkpoint")
        clip_skip = clip_skip_option(changes)
        return replace(
            self,
            model=checkpoint_name(models, model) if isinstance(model, str) and model else self.model,
            clip_skip=self.clip_skip if clip_skip is None else clip_skip,
        )

    def set(self, changes: Mapping[str, Any], models: Models) -> SdOptions:
        """Return the settings of later requests.

        Settings that are not followed are noted until they are null, so that later answers name them.
        """
        earlier = [line for line in self.without_effect if line.partition(" ")[0] not in changes]
        lines = tuple(dict.fromkeys((*earlier, *ignored_options(changes))))
        return replace(self.override(changes, models), without_effect=lines[-MAX_NOTED:])


def checkpoint_name(models: Models, text: str) -> str:
    """Return the name of a model, also for a title in A1111's form: "name.safetensors [1a2b3c4d]"."""
    if text in models.names:
        return text
    plain = re.sub(r"\s*\[[0-9a-fA-F]+\]$", "", text).removesuffix(".safetensors").removesuffix(".ckpt")
    return models.name(plain if plain in models.names else text)


@router.get("/options")
async def options(request: Request) -> dict[str, Any]:
    current: SdOptions = request.app.state.sd_options
    return {
        "sd_model_checkpoint": current.model, "sd_checkpoint_hash": "", "sd_vae": "Automatic",
        "samples_format": "png", "CLIP_stop_at_last_layers": current.clip_skip or 1, "live_previews_enable": True,
    }  # fmt: skip


@router.post("/options", openapi_extra=json_body_of(Options, {"sd_model_checkpoint": "inweave/emoji"}))
async def change_options(request: Request) -> None:
    """Change the checkpoint or CLIP's layer; other settings are named in the warnings of later answers."""
    body = await object_body(request)
    request.app.state.sd_options = request.app.state.sd_options.set(body, service_of(request).models)
