"""One file of the library, for lists, searches and clients."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from inweave.files.paths import printable

MAX_PROBLEMS = 20  # of one kind that are listed


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """Facts from the header of a file and from the files next to it."""

    alias: str | None = None  # the name that its trainer recorded
    title: str | None = None
    tensors: int = 0
    algorithms: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    modules: int = 0
    base: str | None = None
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    triggers: tuple[dict[str, Any], ...] = ()
    description: str | None = None
    notes: str | None = None
    preferred_strength: float | None = None
    negative_text: str | None = None
    preview: str | None = None  # the name of an image next to the file
    sidecars: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # tensors that cannot be used
    error: str | None = None  # why the file cannot be read at all

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Contents:
    """Results of reading the whole file: its hashes and its health."""

    sha256: str
    autov1: str | None
    autov2: str
    autov3: str | None
    nonfinite: tuple[str, ...] = ()  # tensors with NaN or infinity
    zeros: tuple[str, ...] = ()  # factors that hold only zeros, so their modules change nothing

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LibraryEntry:
    """One file: its id, its path and its facts. ``contents`` is None until the whole file was read."""

    id: str
    root: str
    path: str  # below its folder, with forward slashes
    size: int
    modified: float
    facts: LibraryFacts
    contents: Contents | None

    @property
    def name(self) -> str:
        """The name for prompts: the stem of the file, or the name of the PEFT folder."""
        return entry_name(self.path)

    @property
    def file(self) -> Path:
        """The path on this machine; never part of an answer to a client."""
        return Path(self.root) / self.path

    @property
    def health(self) -> list[str]:
        """Problems of the file with remedies, one per line; those of its values only once the whole file was read."""
        wrong = []
        if error := self.facts.error:
            wrong.append(error if ";" in error else f"{error}; download or copy it again")
        if problems := self.facts.problems:
            at_least = " at least" if len(problems) >= MAX_PROBLEMS else ""
            more = f" (and{at_least} {len(problems) - 1} more)" if len(problems) > 1 else ""
            wrong.append(f"{problems[0]}{more}; the rest of the file can be used: download it again, or train it again")
        if self.contents is not None:
            if names := self.contents.nonfinite:
                wrong.append(
                    f"{_count(names, 'tensor')} NaN or infinity, which spoils every image: {', '.join(names[:3])}; "
                    "download it again, or use an earlier epoch"
                )
            if names := self.contents.zeros:
                wrong.append(
                    f"{_count(names, 'factor')} only zeros, so "
                    f"{'it changes' if len(names) == 1 else 'they change'} nothing: {', '.join(names[:3])}; untrained: "
                    "use a later epoch, unless these modules were left out on purpose"
                )
        return wrong

    def as_dict(self, *, details: bool = True) -> dict[str, Any]:
        """Return the entry as JSON; paths are relative to the library."""
        facts = self.facts.as_dict()
        if not details:
            for name in ("metadata", "evidence", "sidecars", "warnings", "problems"):
                facts.pop(name)
        return {
            "id": self.id, "name": self.name, "display_name": printable(self.name), "path": self.path,
            "size": self.size, "modified": self.modified, **facts,
            "hashes": None if self.contents is None else {
                name: getattr(self.contents, name) for name in ("sha256", "autov1", "autov2", "autov3")
            },
            "health": self.health, "checked": self.contents is not None,
        }  # fmt: skip


def _count(names: tuple[str, ...], noun: str) -> str:
    if len(names) == 1:
        return f"1 {noun} holds"
    return f"{len(names)}{' or more' if len(names) >= MAX_PROBLEMS else ''} {noun}s hold"


def entry_name(path: str) -> str:
    """Return the name for prompts of the LoRA at a path: without the ending of a file."""
    return Path(path).name.removesuffix(".safetensors")
