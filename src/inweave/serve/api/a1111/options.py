"""The settings that A1111 has one set of for all clients: the checkpoint and CLIP's layer; others are noted as without effect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inweave.serve.api.a1111.fields import clip_skip_option, ignored_options
from inweave.serve.service import Service

MAX_NOTED = 50


@dataclass(frozen=True, slots=True)
class SdOptions:
    """What requests use unless they override it; ``without_effect`` holds a line for each setting that is not followed."""

    model: str
    clip_skip: int | None = None
    without_effect: tuple[str, ...] = ()

    def override(self, changes: Mapping[str, Any], service: Service) -> SdOptions:
        """These settings with some changed; unknown checkpoints and values out of range are errors."""
        model = changes.get("sd_model_checkpoint")
        clip_skip = clip_skip_option(changes)
        return replace(
            self,
            model=checkpoint_name(service, model) if isinstance(model, str) and model else self.model,
            clip_skip=self.clip_skip if clip_skip is None else clip_skip,
        )

    def set(self, changes: Mapping[str, Any], service: Service) -> SdOptions:
        """The same, for good: settings that are not followed are noted until they are null, so that later answers name them."""
        earlier = [line for line in self.without_effect if line.partition(" ")[0] not in changes]
        lines = tuple(dict.fromkeys((*earlier, *ignored_options(changes))))
        return replace(self.override(changes, service), without_effect=lines[-MAX_NOTED:])


def checkpoint_name(service: Service, text: str) -> str:
    """A model by its name, or by its title as A1111 writes it: "name.safetensors [1a2b3c4d]"."""
    if text in service.models:
        return text
    plain = re.sub(r"\s*\[[0-9a-fA-F]+\]$", "", text).removesuffix(".safetensors").removesuffix(".ckpt")
    return service.model(plain if plain in service.models else text)
