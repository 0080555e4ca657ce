"""The built-in model reads emoji characters by their names, and says which words it does not know."""

from __future__ import annotations

import json

import pytest

from inweave.models import embedded
from inweave.models.embedded_words import read_pieces, spell_emoji, unknown_words


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("🍎", "red apple"),
        ("🐱 and 🍕", "cat face and pizza"),
        ("a 🚀 on a blue background", "a rocket on a blue background"),
        ("❤️", "red heart"),
        ("👍🏽", "thumbs up sign"),
        ("a red apple, café", "a red apple, café"),
        ("", ""),
    ],
)
def test_emoji_characters_are_their_names(text: str, spelled: str) -> None:
    assert spell_emoji(text) == spelled


def test_words_that_it_does_not_know_are_named_once() -> None:
    assert unknown_words("a cyberpunk apple, cyberpunk Kubernetes") == ["cyberpunk", "kubernetes"]
    (pieces, (warning,)) = read_pieces([("a cyberpunk 🍎", 1.0), ("BREAK", 1.0), ("octopus", 1.2)])
    assert pieces == (("a cyberpunk red apple", 1.0), ("BREAK", 1.0), ("octopus", 1.2))
    assert "'cyberpunk'" in warning and "octopus" not in warning


def test_what_it_was_trained_on_is_known() -> None:
    captions = json.loads((embedded.folder() / "reference.json").read_text("utf-8"))["captions"]
    prompts = [
        *captions,
        "a blue cat face",
        "four butterflies on a purple background",
        "two rockets next to a small house",
    ]
    assert {prompt: words for prompt in prompts if (words := unknown_words(prompt))} == {}
