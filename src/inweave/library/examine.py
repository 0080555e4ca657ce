"""What a LoRA file is: from its header and sidecars (fast), and from its whole contents (as fast as the disk).

Most files of a collection share their layout, the names and shapes of their tensors, with many others. What follows
from the layout alone, above all the base, is computed once per layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

from inweave.adapter import Adapter
from inweave.errors import InweaveError
from inweave.exchange.check import scan_values
from inweave.exchange.hashes import hash_file
from inweave.exchange.inspect import trigger_words
from inweave.exchange.load import load
from inweave.library.entry import Contents, Facts
from inweave.library.sidecars import MAX_TEXT, Sidecars, bounded, read_sidecars
from inweave.targets.detect import Detection, detect

MAX_PROBLEMS = 20
MAX_METADATA = 200
MAX_NAME = 500


class Examiner:
    """Reads files; remembers what their layouts mean."""

    def __init__(self) -> None:
        self._detections: dict[str, Detection] = {}

    def facts(self, path: Path, names: Collection[str]) -> Facts:
        """From the header of ``path`` and its sidecars, which are among the ``names`` of its folder."""
        sidecars = read_sidecars(path.parent, path.stem, names)
        try:
            adapter = load(path)
        except InweaveError as error:
            return _facts_of_unreadable(str(error).replace(f"{path}", path.name), sidecars)
        detection = self._detect(adapter)
        metadata = adapter.metadata
        return Facts(
            alias=metadata.get("ss_output_name", "")[:MAX_NAME] or None,
            title=metadata.get("modelspec.title", "")[:MAX_NAME] or None,
            tensors=len(adapter.tensors),
            algorithms=tuple(adapter.algorithms),
            ranks=tuple(sorted({e.factors.rank for e in adapter if e.factors.rank is not None})),
            dtypes=tuple(sorted({tensor.dtype for tensor in adapter.tensors.values()})),
            dialects=tuple(adapter.dialects),
            modules=len({e.ref for e in adapter}),
            base=detection.base,
            confidence=detection.confidence,
            evidence=tuple(detection.evidence),
            triggers=(*sidecars.triggers, *_triggers(metadata)),
            description=sidecars.description or metadata.get("modelspec.description", "")[:MAX_TEXT] or None,
            notes=sidecars.notes,
            preferred_strength=sidecars.preferred_strength,
            negative_text=sidecars.negative_text,
            preview=sidecars.preview,
            sidecars=sidecars.names,
            metadata={name: value[:2000] for name, value in sorted(metadata.items())[:MAX_METADATA]},
            warnings=(*sidecars.problems, *adapter.warnings)[:MAX_PROBLEMS],
            problems=tuple(f"{', '.join(p.keys[:2])}: {p.reason}" for p in adapter.problems)[:MAX_PROBLEMS],
        )

    def _detect(self, adapter: Adapter) -> Detection:
        layout = hashlib.sha256()
        for name, tensor in sorted(adapter.tensors.items()):
            layout.update(f"{name}\0{tensor.shape}\n".encode("utf-8", "surrogatepass"))
        for name in sorted(adapter.metadata):  # detection reads what trainers wrote about the base
            if name.startswith(("ss_base", "ss_v2", "ss_sd_model_name", "modelspec.", "base", "software")):
                layout.update(f"{name}={adapter.metadata[name]}\n".encode("utf-8", "surrogatepass"))
        key = layout.hexdigest()
        if key not in self._detections:
            self._detections[key] = detect(adapter)
        return self._detections[key]

    def contents(self, path: Path) -> Contents | None:
        """From every byte of the file; None where it cannot be read."""
        try:
            hashes = hash_file(path)
            nonfinite, zeros = scan_values(load(path), "full")
        except (InweaveError, OSError):
            return None
        return Contents(
            hashes.sha256, hashes.autov1, hashes.autov2, hashes.autov3,
            tuple(str(row["key"]) for row in nonfinite)[:MAX_PROBLEMS], tuple(zeros)[:MAX_PROBLEMS],
        )  # fmt: skip


def _triggers(metadata: Mapping[str, str]) -> list[dict[str, object]]:
    """The trigger words in a file's metadata, as many and as long as lists can show."""
    return [{**source, "words": bounded(source["words"])} for source in trigger_words(metadata)]


def _facts_of_unreadable(reason: str, sidecars: Sidecars) -> Facts:
    return Facts(
        error=reason, preview=sidecars.preview, sidecars=sidecars.names, description=sidecars.description,
        warnings=sidecars.problems,
    )  # fmt: skip
