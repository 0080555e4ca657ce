"""What prompts and requests may name besides models and LoRAs: wildcards, styles, upscalers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from inweave.errors import InweaveError, MissingError
from inweave.generate.enlarge import LATENT_MODES, PIXEL_MODES, upscaler_label
from inweave.generate.styles import Style
from inweave.generate.templates import PromptSources
from inweave.generate.upscaler_files import UpscalerFinder
from inweave.serve.settings import ServeSettings


class Prompts:
    """Styles that clients may change, and the folders of wildcards and upscalers."""

    def __init__(self, settings: ServeSettings) -> None:
        self.sources = PromptSources(settings.wildcards, settings.styles_file())
        self._upscalers = UpscalerFinder(settings.upscalers)
        self._changing = asyncio.Lock()

    async def styles(self) -> list[Style]:
        """Return every style, in the order of the file."""
        return list((await asyncio.to_thread(self.sources.styles.all)).values())

    async def put_style(self, style: Style) -> None:
        """Add a style, or replace the one of its name."""
        async with self._changing:
            await asyncio.to_thread(self.sources.styles.put, style)

    async def remove_style(self, name: str) -> None:
        """Remove a style; raise MissingError if there is none of that name."""
        async with self._changing:
            if not await asyncio.to_thread(self.sources.styles.remove, name):
                raise MissingError(f"style {name[:100]}: there is none of that name")

    async def wildcards(self) -> list[str]:
        """Return the names of all wildcards."""
        return await asyncio.to_thread(self.sources.wildcards.names)

    async def upscalers(self) -> list[dict[str, str | bool]]:
        """Return every upscaler: its name, how other programs call it, and whether it enlarges latents."""
        try:
            names = await asyncio.to_thread(lambda: self._upscalers.names)
        except InweaveError:  # a folder that is gone; a request that names a file of it says so
            names = [*PIXEL_MODES, *LATENT_MODES]
        return [{"name": name, "label": upscaler_label(name), "latent": name in LATENT_MODES} for name in names]

    def upscalers_of(self, names: Iterable[str]) -> list[str]:
        """Return those of these upscalers that have a file; raise ConfigError for one that does not exist."""
        return [name for name in sorted(names) if self._upscalers.file(name, by_name=True) is not None]

    def upscaler_file(self, name: str) -> Path:
        """Return the file of an upscaler; raise ConfigError if it is gone."""
        path = self._upscalers.file(name, by_name=True)
        assert path is not None, "only those with a file are looked up"
        return path
