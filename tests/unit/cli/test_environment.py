"""The settings that torch reads when CUDA starts: set by commands that train, unless the user configured them."""

from __future__ import annotations

import os

import pytest

from inweave.cli.environment import use_expandable_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("name", [None, *NAMES])
def test_segments_grow_unless_the_user_has_decided(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in NAMES:
        monkeypatch.setenv(known, "")  # so that it is put back
        monkeypatch.delenv(known)
    if name is not None:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    use_expandable_segments()
    values = {known: os.environ[known] for known in NAMES if known in os.environ}
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name is None else {name: "max_split_size_mb:64"}
    assert values == expected
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
