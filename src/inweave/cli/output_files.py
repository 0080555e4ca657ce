"""Names of output files, checked before any work starts; no command replaces a file without --force.

    -o name.png             one image; several are name-1.png, name-2.png, ...
    -o name-{seed}.png      {seed}, {number}, {prompt} and {date} are filled in; {{ and }} are braces
    -o folder/              folder/PROMPT-SEED.png, never replacing a file; without -o, the working directory
    -o -                    PNG on standard output

Missing folders are created when the first file is written.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from inweave.errors import ConfigError
from inweave.files.paths import expand_home, is_folder, occupied, printable_path
from inweave.files.writing import try_to_write

Force = Annotated[bool, typer.Option("--force", help="Replace files that are already there.")]
FIELDS = ("seed", "number", "prompt", "date")
_FIELD = re.compile(r"(\{\{|\}\}|\{(\w*)\})")
_BRACES = re.compile(r"[{}]")
_AUTOMATIC = "{prompt}-{seed}.png"


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Raise a Ctrl-C that arrives inside the block at its end."""
    pending = False

    def remember(*_: object) -> None:
        nonlocal pending
        pending = True

    try:
        before = signal.signal(signal.SIGINT, remember)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pending:
            raise KeyboardInterrupt


def ensure_new(path: Path, force: bool) -> None:
    """Raise ConfigError if the output exists or cannot be written; PEFT's folder may exist without an adapter."""
    if is_folder(path):
        inside = [name for name in ("adapter_model.safetensors", "adapter_config.json") if occupied(path / name)]
        if inside and not force:
            raise ConfigError(f"{printable_path(path / inside[0])}: already exists; replace it with --force")
        try_to_write(path / "adapter_model.safetensors", error=ConfigError)
        return
    if occupied(path) and not force:
        raise ConfigError(f"{printable_path(path)}: already exists; replace it with --force, or choose another name")
    try_to_write(path, error=ConfigError)


@dataclass(frozen=True, slots=True)
class ImageNames:
    """The names of the images of one request, chosen before the first is generated.

    ``copies``: a name in use gets a number instead of an error.
    """

    template: str
    prompt: str
    force: bool = False
    copies: bool = False

    @classmethod
    def parse(cls, out: str | None, prompt: str, count: int, force: bool) -> ImageNames:
        """Parse --out."""
        if out is None:
            return cls(_AUTOMATIC, prompt, copies=True)
        path = expand_home(out)
        if out.endswith(("/", os.sep)) or is_folder(path):
            return cls(f"{_BRACES.sub(lambda match: match[0] * 2, str(path))}/{_AUTOMATIC}", prompt, copies=True)
        template = str(path)
        fields = [name for mark, name in _FIELD.findall(template) if mark[1:-1] == name]
        if unknown := [name for name in fields if name not in FIELDS]:
            known = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise ConfigError(f"--out {printable_path(out)}: {{{unknown[0]}}} is unknown; known are {known}")
        if count > 1 and not {*fields} & {"seed", "number"}:
            template = f"{template.removesuffix(path.suffix)}-{{number}}{path.suffix}"
        return cls(template, prompt, force)

    def paths(self, seed: int, count: int) -> list[Path]:
        """Return the names of all images; raise ConfigError unless each can be written."""
        paths = [self.path(seed + number, number) for number in range(count)]
        for path in paths:
            if not self.copies and is_folder(path):
                raise ConfigError(f"{printable_path(path)}: cannot be written: it is a directory")
            if self.copies:
                try_to_write(path, error=ConfigError)
            else:
                ensure_new(path, self.force)
        return paths

    def path(self, seed: int, number: int) -> Path:
        """Return the name of one image, even if it is in use."""
        today = time.strftime("%Y-%m-%d")
        values = {"seed": str(seed), "number": str(number + 1), "prompt": slug(self.prompt), "date": today}
        return Path(
            _FIELD.sub(lambda match: match[1][0] if match[1] in ("{{", "}}") else values[match[2]], self.template)
        )

    def free(self, path: Path) -> Path:
        """Return the name to write to: with a number added if it is in use now and must not be replaced."""
        chosen, copy = path, 2
        while not self.force and occupied(chosen):
            chosen, copy = path.with_name(f"{path.stem}-{copy}{path.suffix}"), copy + 1
        return chosen


def slug(prompt: str) -> str:
    """Return the words of a prompt, which has no LoRA tags, as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:48].strip("-") or "image"
