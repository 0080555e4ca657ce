"""Settings of training that a request of the worker may not have: those that name files of its machine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from inweave.errors import ConfigError
from inweave.serve.service.training import checked_settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"control": ["/home"]}, "control: decided by the worker"),
        ({"sample_prompts": ["a cat --ci /home/me/photo.png"]}, "--ci names a file of this machine"),
        ({"sample_prompts": "--CI photo.png --w 64"}, "--ci names a file of this machine"),
        ({"sample_prompts": ["prompts.txt"]}, "not a file"),
        ({"sample_prompts": 3}, "not a file"),
    ],
)
def test_files_of_the_machine_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checked_settings(settings)


def test_other_settings_stay() -> None:
    settings: dict[str, Any] = {"steps": 3, "sample_prompts": ["a cat --w 64", "two --circles"]}
    assert checked_settings(settings) == settings
