"""Every known base in every naming: its names and shapes as published, its aliases, and files of its trainers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from inweave.errors import ConfigError
from inweave.targets.aliases import bases_named
from inweave.targets.bases import KNOWN, find, known_index, listing
from inweave.targets.compact import expand
from inweave.targets.index import Component, component_from_names
from inweave.targets.links import Link, Shape
from inweave.targets.tables import SPELLINGS, TABLES
from tests.support import DATA, sized

MAPS = sorted(path.stem for path in (DATA / "maps").glob("*.json"))
_BRACKET = re.compile(r"\[([\d,-]+)\]")

Place = tuple[str, int | None, int | None, bool, bool]  # original, first row, rows, swap, flat


@cache
def key_map(name: str) -> dict[str, object]:
    return json.loads((DATA / "maps" / f"{name}.json").read_text())


def places(name: str) -> dict[str, Place]:
    """diffusers tensor -> where it lies in the original; `[a-b]` is the same number on both sides."""
    found: dict[str, Place] = {}
    for key, row in key_map(name)["map"].items():
        row = [row] if isinstance(row, str) else row
        rows = [value for value in row[1:] if isinstance(value, int)] or [None, None]
        for number in _numbers(key):
            part, original = (_BRACKET.sub(number, text) for text in (key, row[0]))
            found[part] = (original, rows[0], rows[1], "swap" in row, "reshape" in row)
    return found


def _numbers(key: str) -> Iterator[str]:
    match = _BRACKET.search(key)
    if match is None:
        yield ""
        return
    for run in match[1].split(","):
        first, _, last = run.partition("-")
        yield from map(str, range(int(first), int(last or first) + 1))


def spelled(name: str) -> Component:
    """The base of a map as a component whose original naming is that of the map."""
    base, naming = key_map(name)["base"], key_map(name)["naming"]
    component = known_index(base, "original").components["unet"]
    other = replace(component, table=TABLES[SPELLINGS[component.table.name][0]]) if naming == "comfy" else component
    return replace(other, prefix="", shapes=listing(base))


def place(link: Link) -> Place:
    return link.original, None if link.length is None else link.start, link.length, link.swap, link.flat


@pytest.mark.parametrize("name", MAPS)
def test_the_table_gives_the_published_names_rows_and_shapes_from_either_side(name: str) -> None:
    component = spelled(name)
    published: dict[str, Shape] = expand(key_map(name)["tensors"])
    divided = {
        original: (tensor, sum(published[before][0] for before in originals[:number]))
        for tensor, originals in key_map(name).get("concat", {}).items()
        for number, original in enumerate(originals)
    }
    assert component.tensors == published
    for shapes, naming in ((component.shapes, "diffusers"), (published, "original")):
        links = component.table.links(shapes, naming)
        assert {link.part: place(link) for link in links if not link.tensor} == places(name)
        assert {link.original: (link.tensor, link.offset) for link in links if link.tensor} == divided
    back = replace(component, shapes=published, listed="original", naming="diffusers")
    assert back.tensors == component.shapes


@pytest.mark.parametrize("name", MAPS[:: sized(3, 1)])
def test_a_checkpoint_in_this_naming_is_recognized(name: str) -> None:
    component = component_from_names("unet", expand(key_map(name)["tensors"]))
    assert (component.table.name, component.naming) == (spelled(name).table.name, "original")
    assert {link.diffusers for link in component.links} == set(listing(key_map(name)["base"]))


ALIASES = json.loads((DATA.parents[1] / "src/inweave/targets/aliases.json").read_text())


def test_every_alias_names_its_base_alone_or_among_others() -> None:
    own = {label: known.name for known in KNOWN for label in (known.name, *known.aliases)}
    for base, kinds in ALIASES["bases"].items():
        for label in (label for labels in kinds.values() for label in labels):
            expected = tuple(ALIASES["ambiguous"].get(label.lower(), (base,)))
            assert base in expected
            if label in own and own[label] != base:  # a base's own name means it, whatever one trainer calls so
                assert bases_named(label) == (own[label],)
            else:
                assert bases_named(label) == bases_named(label.upper()) == expected, label
            if "/" not in label:
                assert bases_named(f"{label}/lora") == bases_named(label)


@pytest.mark.parametrize("label", ALIASES["ambiguous"])
def test_a_label_of_several_bases_is_no_base_and_the_message_lists_them(label: str) -> None:
    assert find(label) is None
    with pytest.raises(ConfigError) as error:
        known_index(label)
    assert all(base in str(error.value) for base in ALIASES["ambiguous"][label])


@pytest.mark.parametrize(
    ("label", "base"),
    [
        ("wan2.2-t2v-a14b", "wan2.1-t2v-14b"), ("Qwen-Image-Edit-2509", "qwen-image"), ("FLUX.1-Redux-dev", "flux1-dev"),
        ("FLUX.1 Kontext dev", "flux1-dev"), ("Wan2.2-I2V-A14B-Diffusers", "wan2.2-i2v-a14b"), ("Pony V7", "auraflow-0.3"),
        ("someone/ltx-2.3 (video)", "ltx-2.3"), ("hunyuan-video/LoRA", "hunyuanvideo"), ("zai-org/CogVideoX-2b", "cogvideox-2b"),
    ],
)  # fmt: skip
def test_published_models_with_the_tensors_of_another_are_known_under_their_own_names(label: str, base: str) -> None:
    assert bases_named(label) == (base,)


def test_models_that_no_file_can_tell_apart_are_written_down_with_their_base() -> None:
    same = {name: known.name for known in KNOWN for name in known.same_tensors}
    assert {
        "FLUX.1 Krea dev": "flux1-dev",
        "Qwen-Image-Edit-2511": "qwen-image",
        "Pony V7": "auraflow-0.3",
    }.items() <= same.items()
    assert all(bases_named(alias) for known in KNOWN for alias in (known.name, *known.aliases))
