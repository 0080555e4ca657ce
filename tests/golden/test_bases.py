"""Every known base in every naming: its names and shapes as published, its aliases, and files of its trainers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from inweave.adapter import Tensor
from inweave.errors import ConfigError
from inweave.exchange.check import check
from inweave.exchange.convert import convert, rewrite
from inweave.exchange.load import open_base
from inweave.formats.read import read
from inweave.targets.aliases import bases_named
from inweave.targets.bases import KNOWN, find, known_index, listing
from inweave.targets.compact import expand
from inweave.targets.detect import detect
from inweave.targets.index import Component, component_from_names
from inweave.targets.links import Link, Naming, Shape
from inweave.targets.resolve import resolve
from inweave.targets.tables import SPELLINGS, TABLES
from tests.support import DATA, hollow, lora_listing, lora_listings, random, sized, tensor, write, write_sparse

MAPS = sorted(path.stem for path in (DATA / "maps").glob("*.json"))
UNMAPPED = {"omnigen2", "cogvideox-5b", "kandinsky5-lite-t2i"}  # one naming only
_BRACKET = re.compile(r"\[([\d,-]+)\]")

Place = tuple[str, int | None, int | None, bool, bool]  # original, first row, rows, swap, flat


@cache
def key_map(name: str) -> dict[str, Any]:
    return json.loads((DATA / "maps" / f"{name}.json").read_text())


def places(name: str) -> dict[str, Place]:
    """Return diffusers tensor -> its place in the original naming; `[a-b]` is the same number on both sides."""
    rows_by_part: dict[str, Place] = {}
    for key, row in key_map(name)["map"].items():
        row = [row] if isinstance(row, str) else row
        rows: list[int | None] = [value for value in row[1:] if isinstance(value, int)] or [None, None]
        for number in _numbers(key):
            part, original = (_BRACKET.sub(number, text) for text in (key, row[0]))
            rows_by_part[part] = (original, rows[0], rows[1], "swap" in row, "reshape" in row)
    return rows_by_part


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
    sides: tuple[tuple[Mapping[str, Shape], Naming], ...] = ((component.shapes, "diffusers"), (published, "original"))
    for shapes, naming in sides:
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
        ("wan2.2-t2v-a14b", "wan2.1-t2v-14b"), ("Qwen-Image-Edit-2509", "qwen-image"),
        ("FLUX.1-Redux-dev", "flux1-dev"), ("FLUX.1 Kontext dev", "flux1-dev"),
        ("Wan2.2-I2V-A14B-Diffusers", "wan2.2-i2v-a14b"), ("Pony V7", "auraflow-0.3"),
        ("someone/ltx-2.3 (video)", "ltx-2.3"), ("hunyuan-video/LoRA", "hunyuanvideo"),
        ("zai-org/CogVideoX-2b", "cogvideox-2b"),
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
    pony = read(
        {
            key: hollow(shape, kind)
            for key, (kind, shape) in lora_listing("gen_simpletuner_auraflow_pony_v7")["tensors"].items()
        }
    )
    assert "the same tensors have Pony V7" in detect(pony).evidence


LISTINGS = [
    name
    for name in lora_listings()
    if lora_listing(name)["base"] in {key_map(each)["base"] for each in MAPS} | UNMAPPED
]


def sample_of(name: str) -> dict[str, Tensor]:
    """The first block of a listing, with numbers in it."""
    first = re.compile(r"(?:blocks|layers|refiner)[._](?!0[._])\d+[._]")
    keys = [key for key in lora_listing(name)["tensors"] if not first.search(key)]
    shapes = {key: lora_listing(name)["tensors"][key][1] for key in keys}
    return {
        key: random(n, *shape, dtype="F16") if shape else tensor(16.0) for n, (key, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("name", LISTINGS)
def test_a_file_crosses_namings_and_comes_back_bit_for_bit(name: str) -> None:
    index = known_index(lora_listing(name)["base"])
    adapter = read(sample_of(name), lora_listing(name).get("metadata"))
    start = rewrite(adapter, "kohya", index)
    assert not start.lost
    for dialect in ("diffusers", "comfy", "onetrainer", "peft"):
        there = rewrite(read(start.tensors, start.metadata), dialect, index)
        assert not there.lost
        assert resolve(read(there.tensors, there.metadata, there.config), index).report.clean
        back = rewrite(read(there.tensors, there.metadata, there.config), "kohya", index)
        assert back.tensors.keys() == start.tensors.keys()
        assert all(value.same(back.tensors[key]) for key, value in start.tensors.items())


@pytest.mark.parametrize("name", ["hunyuanvideo-1.5.comfy", "ovis-image-7b.comfy", "krea2.original"])
def test_files_without_any_prefix_check_and_convert_on_a_checkpoint_without_one(name: str, tmp_path: Path) -> None:
    published = expand(key_map(name)["tensors"])
    base = write_sparse(tmp_path / "base.safetensors", {key: ("BF16", shape) for key, shape in published.items()})
    modules = [
        key.removesuffix(".weight") for key, shape in published.items() if key.endswith(".weight") and len(shape) == 2
    ]
    tensors: dict[str, Tensor] = {}
    for module in modules[:12]:
        rows, columns = published[f"{module}.weight"]
        tensors |= {
            f"{module}.lora_A.default.weight": random(1, 2, columns),
            f"{module}.lora_B.default.weight": random(2, rows, 2),
        }
    file = write(tmp_path / "lora.safetensors", tensors)
    assert open_base(base).base == key_map(name)["base"]
    assert check(file, base).ok
    for dialect in ("kohya", "comfy", "diffusers"):
        conversion = convert(file, tmp_path / f"{dialect}.safetensors", to=dialect, base=base)
        assert not conversion.lost
        assert check(conversion.path, key_map(name)["base"]).ok


def test_a_flat_table_keeps_its_values_in_either_shape() -> None:
    """Krea 2 stores six rows of modulation in one axis; the change of one is the change of the other."""
    index, values = known_index("krea2"), random(0, 6, 6144)
    adapter = read({"diffusion_model.blocks.3.mod.lin.diff": values.reshaped((36864,))})
    written = rewrite(adapter, "onetrainer", index)
    assert not written.lost
    ((key, table),) = written.tensors.items()
    assert "transformer_blocks_3_scale_shift_table" in key.replace(".", "_")
    assert table.same(values)
    back = rewrite(read(written.tensors, written.metadata), "comfy", index)
    assert back.tensors["diffusion_model.blocks.3.mod.lin.diff"].same(values.reshaped((36864,)))


def test_the_documentation_lists_every_base() -> None:
    page = (DATA.parents[1] / "docs" / "formats.md").read_text()
    assert [
        known.name for known in KNOWN if f"`{known.name}`" not in page and not known.name.startswith("inweave/")
    ] == []


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_rows_that_change_places_do_so_in_every_product(kind: str) -> None:
    """Flux stores (shift, scale) where diffusers stores (scale, shift); a round trip is the identity."""
    torch = pytest.importorskip("torch")
    from inweave.ops.delta import change

    module = "lora_transformer_norm_out_linear"
    factors = (
        {"hada_w1_a": (6144, 2), "hada_w1_b": (2, 3072), "hada_w2_a": (6144, 2), "hada_w2_b": (2, 3072)}
        if kind == "loha"
        else {"lokr_w1": (4, 4), "lokr_w2": (1536, 768)}
    )
    tensors = {f"{module}.{suffix}": random(n, *shape) for n, (suffix, shape) in enumerate(factors.items())}
    index = known_index("flux1-dev")
    there = rewrite(read(tensors), "kohya", index)
    assert not there.lost
    one, two = (change(next(iter(read(t))).factors, None) for t in (tensors, there.tensors))
    assert torch.equal(one, torch.cat(two.chunk(2)[::-1]))
    back = rewrite(read(there.tensors, there.metadata), "onetrainer", index)
    assert all(tensors[key].same(back.tensors[key]) for key in tensors)
