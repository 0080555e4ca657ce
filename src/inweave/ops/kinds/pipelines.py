"""The networks of a model by component.

a module                         {"unet": module}; the Weaver has "model" for a language model of transformers
{"unet": .., "te1": ..}          unchanged
a diffusers pipeline, or its     unet or transformer -> "unet", text_encoder -> "te1", text_encoder_2 -> "te2",
`components`                     text_encoder_3 -> "te3"; others take no adapters
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from inweave.adapter.components import COMPONENTS, FOLDERS
from inweave.errors import ConfigError


def components_of(model: object) -> Mapping[str, nn.Module]:
    """Return component -> network of a module, a mapping of modules, or a diffusers pipeline."""
    if isinstance(model, nn.Module):
        return {"unet": model}
    parts = model if isinstance(model, Mapping) else getattr(model, "components", None)
    if not isinstance(parts, Mapping):
        raise ConfigError(
            "expected a torch module, a mapping of component to module, or a diffusers pipeline, "
            f"got {type(model).__name__}"
        )
    if parts is model and not any(name in FOLDERS and name not in COMPONENTS for name in parts):
        wrong = [f"{name!r}: {type(part).__name__}" for name, part in parts.items() if not isinstance(part, nn.Module)]
        if not wrong:
            return parts
        if not any(isinstance(parts.get(name), nn.Module) for name in FOLDERS):
            raise ConfigError(f"a mapping of networks holds torch modules by component, got {', '.join(wrong)[:300]}")
    networks: dict[str, nn.Module] = {}
    for folder, component in FOLDERS.items():
        part = parts.get(folder)
        if isinstance(part, nn.Module) and component not in networks:
            networks[component] = part
    if not networks:
        raise ConfigError(
            f"{type(model).__name__}: none of its components takes adapters; "
            f"expected one of {', '.join(FOLDERS)}, got {', '.join(map(str, parts))[:300] or 'none'}"
        )
    return networks
