"""Upscalers by name and their files; torch is imported when a network is opened, which the web process never does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from inweave.checked import did_you_mean
from inweave.errors import ConfigError, Problem
from inweave.files.paths import is_file, is_folder, printable_path
from inweave.files.stamps import Stamp, path_stamp
from inweave.generate.enlarge import LATENT_MODES, PIXEL_MODES

if TYPE_CHECKING:
    import torch

    from inweave.models.upscalers import Upscaler

_SUFFIXES = (".safetensors", ".pth", ".pt")


class UpscalerFinder:
    """Upscalers by name: those without a file, and the files of folders; a path of an option or an argument too.

    ``files``: the files by name, instead of folders; then no other file is opened.
    """

    def __init__(self, folders: Iterable[str | Path] = (), files: Mapping[str, Path] | None = None) -> None:
        self.folders, self._files = tuple(map(Path, folders)), None if files is None else dict(files)
        self._networks: dict[tuple[Path, Stamp, str], Upscaler] = {}

    def add(self, files: Mapping[str, Path]) -> None:
        """Add files to those that were given."""
        self._files = {**(self._files or {}), **files}

    def files(self) -> dict[str, Path]:
        """Return the files of upscalers by name."""
        if self._files is not None:
            return self._files
        files: dict[str, Path] = {}
        for folder in self.folders:
            if not is_folder(folder):
                raise ConfigError(f"{printable_path(folder)}: no such folder of upscalers")
            for path in sorted(folder.iterdir()):
                if path.suffix.lower() in _SUFFIXES and is_file(path):
                    files.setdefault(path.stem, path)
        return files

    @property
    def names(self) -> list[str]:
        """The names of all upscalers."""
        return [*PIXEL_MODES, *LATENT_MODES, *self.files()]

    def file(self, name: str, *, by_name: bool = False) -> Path | None:
        """Return the file of an upscaler, None for one without; raise ConfigError if there is none of that name.

        ``by_name``: it is not a path, since a client sent it.
        """
        if name in PIXEL_MODES or name in LATENT_MODES:
            return None
        files = self.files()
        if (path := files.get(name) or files.get(Path(name).stem)) is not None:
            return path
        if not by_name and self._files is None and Path(name).suffix.lower() in _SUFFIXES and is_file(name):
            return Path(name)
        near, known = did_you_mean(name, self.names), ", ".join(self.names[:30])
        raise ConfigError(Problem("upscale.upscaler", f"{name[:100]}: no such upscaler{near}; there are {known}"))

    def open(self, name: str, device: torch.device) -> Upscaler | None:
        """Return the network of an upscaler, None for one without; that of the last one is kept."""
        if (path := self.file(name)) is None:
            return None
        from inweave.models.upscalers import open_upscaler

        key = path, path_stamp(path), str(device)
        if key not in self._networks:
            self._networks = {key: open_upscaler(path, device)}
        return self._networks[key]
