"""What tests of loading share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_tokenizers() -> Iterator[None]:
    from tests.peers import tiny_models as tiny

    with tiny.quick_tokenizers():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny SD 1.5 to break."""
    from tests.peers import tiny_models as tiny

    return Path(shutil.copytree(tiny.folder("sd1.5"), tmp_path / "model"))
