"""The base models that a label can mean: hub ids, CivitAI labels, trainers' architecture strings, short names.

    bases_named("black-forest-labs/FLUX.2-klein-4B")  ->  ("flux2-klein-4b",)
    bases_named("wan2.1")                             ->  ("wan2.1-t2v-14b", "wan2.1-t2v-1.3b", "wan2.1-i2v-14b")

The first of these that knows the label answers: the bases' own names, `aliases.json`, both again with spaces
and underscores written as hyphens, and the part of a hub id after its slash. A label of several bases returns
all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import resources

from inweave.targets.catalog import BY_NAME, KNOWN, load_outside_bases

Names = Mapping[str, tuple[str, ...]]

_OWN: Names = {label: (known.name,) for known in reversed(KNOWN) for label in (known.name, *known.aliases)}


def bases_named(label: str) -> tuple[str, ...]:
    """Return the known bases ``label`` can mean, most common first; a remark in parentheses and a final /lora
    are ignored.
    """
    plain = re.sub(r"\s*\(.*\)\s*$|/lora\s*$", "", label.strip().lower()).strip()
    names = next((names[spelling] for spelling, names in _spellings(plain) if spelling in names), ())
    return names or ((plain,) if load_outside_bases() and plain in BY_NAME else ())


def _spellings(plain: str) -> Iterator[tuple[str, Names]]:
    yield plain, _OWN
    yield plain, _published()[0]
    for spelling in (_hyphenated(plain), _hyphenated(plain.rpartition("/")[2])):
        yield spelling, _OWN
        yield spelling, _published()[1]


@lru_cache(maxsize=1)
def _published() -> tuple[Names, Names]:
    """Return the labels of `aliases.json` verbatim, and hyphenated with the hub ids also without their owner."""
    data = json.loads(resources.files("inweave.targets").joinpath("aliases.json").read_text("utf-8"))
    exact: dict[str, tuple[str, ...]] = {}
    for base, kinds in data["bases"].items():
        for label in (label.lower() for labels in kinds.values() for label in labels):
            exact[label] = tuple(dict.fromkeys((*exact.get(label, ()), base)))
    exact |= {label: tuple(bases) for label, bases in data["ambiguous"].items()}
    loose: dict[str, tuple[str, ...]] = {}
    for label, bases in exact.items():
        for spelling in {_hyphenated(label), _hyphenated(label.rpartition("/")[2])}:
            loose[spelling] = tuple(dict.fromkeys((*loose.get(spelling, ()), *bases)))
    return exact, loose


def _hyphenated(label: str) -> str:
    return re.sub(r"[\s_]+", "-", label)
