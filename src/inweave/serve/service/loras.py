"""The library of LoRAs: look-up, uploads, checks against models, conversions.

Files are only ever opened in confined processes; this one reads the index.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError, ConflictError, FormatError, InweaveError, MissingError, Problem, TargetError
from inweave.formats.dialects import written_dialects
from inweave.generate.config import LoraChoice
from inweave.library import Library, LibraryEntry
from inweave.serve.jobs.errors import NotReadyError, StorageError
from inweave.serve.jobs.training_runs import add_preview, add_to_library, move_to_free_name, preview_path
from inweave.serve.sandbox.client import SandboxClient
from inweave.serve.sandbox.conversions import ConversionStore
from inweave.serve.sandbox.library_scan import scan_library
from inweave.serve.service.models import Models
from inweave.serve.storage.lora_samples import LoraSamples
from inweave.targets.bases import known_index

MAX_VERDICTS = 10_000


class MismatchError(TargetError):
    """A LoRA does not fit the model; ``report`` is the verdict of `inweave check`."""

    def __init__(self, message: str, report: dict[str, Any]) -> None:
        super().__init__(message)
        self.report = report


class Loras:
    """The LoRAs of a worker.

    Args:
        data: where the worker keeps its index, and files that it converted.
        own: the folder of LoRAs that were uploaded or trained here.
        incoming: the folder of uploads that are not complete, on the same disk.
    """

    def __init__(
        self, data: Path, own: Path, incoming: Path, library: Library, models: Models, sandbox: SandboxClient
    ) -> None:
        self._library, self._models, self._sandbox = library, models, sandbox
        self._own, self._incoming, self._database = own, incoming, data / "library.sqlite3"
        self._conversions = ConversionStore(data / "converted", sandbox)
        self.samples = LoraSamples(data / "lora-samples")
        self._verdicts: dict[tuple[str, int, float, str], dict[str, Any]] = {}
        self._names = threading.Lock()
        #: called in a thread when a file was added or removed here
        self.on_change: Callable[[], None] = lambda: None
        self.indexed = True  # False from the start of a worker until it has looked at all folders

    # reading

    async def find(self, reference: str) -> LibraryEntry:
        """Return the entry of a name, path, id or hash.

        Raises:
            MissingError: there is none.
            NotReadyError: there is none so far, or only the package's own, which files in other folders override.
        """
        try:
            entry = await asyncio.to_thread(self._library.find, reference)
        except MissingError:
            if self.indexed:
                raise
        else:
            if self.indexed or entry.root != str(self._library.folders[-1]):
                return entry
        raise NotReadyError(f"LoRA {reference[:200]}: the folders of the library are being read; ask again in a moment")

    async def find_all(self, choices: Iterable[LoraChoice]) -> dict[str, LibraryEntry]:
        """Return the entry of each reference; everything that is unknown is one error."""
        entries: dict[str, LibraryEntry] = {}
        problems: list[InweaveError] = []
        for choice in choices:
            try:
                entries[choice.label] = await self.find(choice.label)
            except NotReadyError:
                raise
            except InweaveError as error:
                problems.append(error)
        if len(problems) == 1:
            raise problems[0]
        if problems:
            raise MissingError("; ".join(str(problem) for problem in problems))
        return entries

    async def entries(self, query: str = "", **options: Any) -> list[LibraryEntry]:
        """Return the entries that match a search; ``options``: base, limit, offset."""
        return await asyncio.to_thread(self._library.entries, query, **options)

    def count_now(self) -> int:
        """Return the number of LoRAs in the library; it reads the disk, so not on the event loop."""
        return self._library.count()

    async def count(self) -> int:
        """Return the number of LoRAs in the library."""
        return await asyncio.to_thread(self.count_now)

    async def documents(self, *entries: LibraryEntry, details: bool = False) -> list[dict[str, Any]]:
        """Return entries in the form that clients get; ``removable``: whether this worker may delete it."""
        return await asyncio.to_thread(lambda: [self._document(entry, details) for entry in entries])

    def _document(self, entry: LibraryEntry, details: bool) -> dict[str, Any]:
        own = {
            "duplicates": self._library.twins(entry), "removable": self._removable(entry),
            "sample": self.samples.facts(entry),
        }  # fmt: skip
        return {**entry.as_dict(details=details), **own}

    def _removable(self, entry: LibraryEntry) -> bool:
        return entry.root == str(self._own.resolve())

    def identities(self, entries: Mapping[str, LibraryEntry]) -> dict[str, dict[str, Any]]:
        """Return by what other workers of the queue recognize the files of these references."""
        return {label: self._library.identity(entry) for label, entry in entries.items()}

    def file(self, label: str, entry: str, identity: Mapping[str, Any] | None = None) -> str:
        """Return the path of an entry, by its id; of another worker's library, by the identity of its file."""
        try:
            return str(self._library.get(entry).file)
        except MissingError:
            if identity is not None:
                known = self._library.recognize(**identity)
                if known is None:
                    self._library.scan()  # it may have been added a moment ago
                    known = self._library.recognize(**identity)
                if known is not None:
                    return str(known.file)
            raise MissingError(
                f"LoRA {label}: its file was replaced or removed since the job was submitted; submit it again"
            ) from None

    # changing

    async def add(self, name: str, content: AsyncIterator[bytes]) -> LibraryEntry:
        """Receive a file, have another process read it, and add it under a name that is free."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        received = self._incoming / f"{secrets.token_hex(16)}.safetensors"
        try:
            with received.open("xb") as file:
                async for chunk in content:
                    await asyncio.to_thread(file.write, chunk)
            await self._sandbox.adapter(str(received), f"LoRA {name}")
            return await asyncio.to_thread(self._take_in, received, name)
        except OSError as error:
            raise StorageError(f"the file could not be stored: {error.strerror}") from None
        finally:
            received.unlink(missing_ok=True)

    def _take_in(self, received: Path, name: str) -> LibraryEntry:
        with self._names:
            return self._added(move_to_free_name(received, self._own, name, self._library.has_name))

    def publish(self, adapter: Path, stem: str) -> LibraryEntry:
        """Put an adapter that was trained here, and a sample of its run, into the library under a name that is free."""
        with self._names:
            path = add_to_library(adapter, self._own, stem, self._library.has_name)
            add_preview(adapter, path)
            return self._added(path)

    def _added(self, path: Path) -> LibraryEntry:
        self._library.scan()
        self.on_change()
        return self._library.find(str(path.resolve()))

    async def remove(self, reference: str) -> str:
        """Delete a file that was uploaded or trained here; return its id."""
        entry = await self.find(reference)
        if not self._removable(entry):
            raise ConflictError(f"LoRA {entry.name} was not added through this worker; remove it from its folder")
        await asyncio.to_thread(self._unlink, entry)
        await asyncio.to_thread(self._library.scan)
        await asyncio.to_thread(self.on_change)
        return entry.id

    def _unlink(self, entry: LibraryEntry) -> None:
        self.samples.remove(entry)
        preview_path(entry.file).unlink(missing_ok=True)
        entry.file.unlink()

    async def scan(self, *, examine: bool = False) -> None:
        """Bring the index of the library up to date; ``examine`` also reads whole files."""
        try:
            await scan_library(self._library, self._database, examine=examine)
        finally:
            self.indexed = True

    # checks and conversions

    async def check(
        self, reference: str, *, model: str | None, base: str | None, values: str, placements: bool
    ) -> dict[str, Any]:
        """Return whether a LoRA fits a model of this worker, or any base that inweave knows by name."""
        entry = await self.find(reference)
        known = base is not None
        name = _known_base(base) if base is not None else self._models.name(model)
        verdict = await self._sandbox.lora(
            str(entry.file), name if known else self._models.weights(name), f"LoRA {entry.name}", values,
            known=known, placements=placements,
        )  # fmt: skip
        (document,) = await self.documents(entry)
        return {"lora": document, ("base" if known else "model"): name, "verdict": verdict}

    async def ensure_fit(self, entries: Iterable[LibraryEntry], model: str, on_mismatch: str) -> list[str]:
        """Return a warning for each LoRA that fits in part; raise MismatchError where none of it fits, or on demand."""
        warnings: list[str] = []
        for entry in entries:
            if entry.facts.error:
                raise FormatError(f"LoRA {entry.name}: {entry.facts.error}")
            verdict = await self._verdict(entry, model)
            if verdict["ok"]:
                continue
            message = f"LoRA {entry.name} does not fit {model}: " + (
                verdict["error"] or f"{verdict['placed']} of {verdict['tensors']} tensors have a place"
            )
            if on_mismatch == "error" or not verdict["placed"]:
                raise MismatchError(message, verdict)
            warnings.append(message)
        return warnings

    async def _verdict(self, entry: LibraryEntry, model: str) -> dict[str, Any]:
        """Return whether a LoRA fits a model, proved in another process; cached while the file stays the same."""
        key = (entry.id, entry.size, entry.modified, model)
        if key not in self._verdicts:
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.clear()
            weights = self._models.weights(model)
            self._verdicts[key] = await self._sandbox.lora(str(entry.file), weights, f"LoRA {entry.name}")
        return self._verdicts[key]

    async def fits_by_header(self, entry: LibraryEntry, model: str) -> bool:
        """Return whether a LoRA was detected to be made for a model's base: cheap, for lists."""
        return entry.facts.base is not None and entry.facts.base == await self._models.base(model)

    async def convert(self, reference: str, *, to: str, base: str | None, drop: bool) -> dict[str, Any]:
        """Write a LoRA in another dialect, for download."""
        if to not in (dialects := written_dialects()):
            raise ConfigError(Problem("to", f"no dialect is called {to!r}; there are {', '.join(dialects)}"))
        known = _known_base(base) if base is not None else None
        return await self._conversions.create(await self.find(reference), to=to, base=known, drop=drop)

    def converted(self, conversion: str) -> tuple[Path, str]:
        """Return the path of a converted file, and the name to save it under."""
        return self._conversions.file(conversion)

    # life

    def clear(self) -> None:
        """Remove what an earlier process left."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._conversions.clear()

    def expire(self) -> None:
        """Remove conversions that are old."""
        self._conversions.expire()


def _known_base(name: str) -> str:
    """Return the name of a base that inweave knows; never a path of this machine."""
    return known_index(name).base or name
