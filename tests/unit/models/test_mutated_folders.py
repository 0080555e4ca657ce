"""Every setting of every configuration, replaced by every kind of JSON value, is an `InweaveError` at once."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import InweaveError
from inweave.generate.pipeline import pipeline
from inweave.models.model import on_meta
from inweave.models.open import open_model
from tests.peers import tiny_models as tiny
from tests.support import sized, stopwatch

FAMILIES = ("sd1.5", "sdxl", "sd3-medium", "flux1-dev", "z-image-turbo", "qwen-image")
MISSING = object()
VALUES: list[Any] = [
    MISSING, None, True, False, 0, 1, -1, 3, 10**7, 10**12, 10**400, 1.5, -1.0, 1e300, float("nan"), float("inf"), "",
    "x", "a" * 5000, "\ud800", [], [1], [None], ["x"], [0, 0, 0, 0], [[1]], [10**7] * 4, [1] * 5000, {}, {"a": 1},
]  # fmt: skip
SECONDS = 2.0  # of CPU, on a busy machine; a hang takes minutes


def mutations(folder: Path) -> list[tuple[Path, str, Any]]:
    files = [*sorted(folder.rglob("*config.json")), folder / "model_index.json"]
    return [(file, key, value) for file in files for key in json.loads(file.read_text()) for value in VALUES]


def mutated(file: Path, key: str, value: Any) -> Iterator[None]:
    text = file.read_text()
    document = json.loads(text) | {key: value}
    file.write_text(json.dumps({name: each for name, each in document.items() if each is not MISSING}))
    yield
    file.write_text(text)


def attempt(folder: Path, file: Path, *, run: bool) -> bool:
    """Whether the model can be built; with ``run``, whether it makes an image."""
    try:
        with (
            stopwatch(time.process_time) as cost,
            tiny.quick_tokenizers() if "tokenizer" not in file.parent.name else nullcontext(),
        ):
            if run:
                pipeline(folder)("a b", steps=2, seed=1, width=64, height=64)
            else:
                blueprint = open_model(folder)
                for part in blueprint.parts.values():
                    if part.folder == file.parent.name:
                        on_meta(part)
                if file.parent.name in blueprint.tokenizers:
                    blueprint.tokenizers[file.parent.name]()
    except InweaveError as error:
        assert 0 < len(str(error)) < 20_000
        return False
    finally:
        assert cost.seconds < SECONDS + 3 * run
    return True


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_setting_is_used_or_refused(family: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder(family), tmp_path / family))
    changes = mutations(folder)
    picked = random.Random(f"{family}-7").sample(changes, min(sized(40, len(changes)), len(changes)))
    built: list[tuple[Path, str, Any]] = []
    for file, key, value in picked:
        change = mutated(file, key, value)
        next(change)
        try:
            if attempt(folder, file, run=False):
                built.append((file, key, value))
        finally:
            next(change, None)
    for file, key, value in built[: sized(2, len(built))]:
        change = mutated(file, key, value)
        next(change)
        try:
            attempt(folder, file, run=True)
        finally:
            next(change, None)
