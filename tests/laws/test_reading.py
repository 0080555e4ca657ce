"""Laws of reading and writing: nothing is lost on a round trip, and the order of keys means nothing."""

from __future__ import annotations

import math
import random as stdlib_random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inweave.adapter import Tensor
from inweave.exchange.convert import rewrite
from inweave.formats.dialects import WRITTEN
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.index import Component, module_of
from inweave.targets.resolve import resolve
from tests.support import random, sized, tensor

BASES = (
    "sd1.5",
    "sdxl",
    "sd3.5-medium",
    "flux1-dev",
    "chroma1-hd",
    "z-image-turbo",
    "wan2.1-t2v-1.3b",
    "qwen-image",
    "flux2-dev",
    "hunyuanvideo-1.5",
    "krea2",
    "mochi-1-preview",
    "ovis-image-7b",
    "pixart-sigma-1024",
    "stable-cascade-prior-1b",
)
RELAXED = settings(deadline=None, max_examples=sized(8, 60), suppress_health_check=list(HealthCheck))


@st.composite
def adapters(draw: st.DrawFn, *, plain: bool = False) -> tuple[str, dict[str, Tensor]]:
    """(base, kohya- or diffusers-named tensors) of a few random modules of a random base."""
    base = draw(st.sampled_from(BASES))
    dotted = draw(st.booleans())
    index = known_index(base)
    unet = index.components["unet"]
    modules = sorted(m for m in _names(unet, base, dotted) if _usable(unet, m, dotted))
    chosen = draw(st.lists(st.sampled_from(modules), min_size=1, max_size=4, unique=True))
    with_alpha = draw(st.booleans())
    dtype = draw(st.sampled_from(["F32", "F16", "BF16"]))
    seed = draw(st.integers(0, 1000))
    tensors_by_key: dict[str, Tensor] = {}
    for number, module in enumerate(chosen):
        shape = _shape(unet, module, dotted)
        rank = draw(st.integers(1, 4))
        kind = "lora" if plain or dotted else draw(st.sampled_from(["lora", "loha", "lokr", "dora", "diff"]))
        name = (
            f"{'unet' if unet.table.name == 'unet' else 'transformer'}.{module}"
            if dotted
            else f"lora_unet_{module.replace('.', '_')}"
        )
        tensors = _factors(kind, shape, rank, seed + 10 * number, dtype, dotted)
        if with_alpha and not dotted and kind != "diff":
            tensors["alpha"] = tensor(
                float(draw(st.sampled_from([1, 2, 4, 0.5]))) if kind != "lora" else 2.0 * rank, dtype
            )
        tensors_by_key |= {f"{name}.{suffix}": value for suffix, value in tensors.items()}
    return base, tensors_by_key


def _names(unet: Component, base: str, dotted: bool) -> set[str]:
    """The modules as this dialect itself names them: no aliases."""
    return {module_of(link.part if dotted or base == "sd1.5" else link.original)[0] for link in unet.links}


def _usable(unet: Component, module: str, dotted: bool) -> bool:
    shape = _shape(unet, module, dotted)
    return len(shape) in (2, 4) and math.prod(shape[2:] or (1,)) <= 9 and shape[0] <= 10_000


def _shape(unet: Component, module: str, dotted: bool) -> tuple[int, ...]:
    table = unet.by_diffusers if dotted else (unet.by_original if module in unet.by_original else unet.by_diffusers)
    uses = table.get(module, {}).get("weight")
    if not uses:
        return ()
    shapes = [unet.parts[use.part] for use in uses]
    return (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()


def _factors(kind: str, shape: tuple[int, ...], rank: int, seed: int, dtype: str, dotted: bool) -> dict[str, Tensor]:
    out, rest, tail = shape[0], shape[1:], (1,) * (len(shape) - 2)
    down, up = random(seed, rank, *rest, dtype=dtype), random(seed + 1, out, rank, *tail, dtype=dtype)
    if dotted:
        return {"lora_A.weight": down, "lora_B.weight": up}
    flat = math.prod(rest)
    if kind == "loha":
        return {
            "hada_w1_a": random(seed, out, rank, dtype=dtype), "hada_w1_b": random(seed + 1, rank, flat, dtype=dtype),
            "hada_w2_a": random(seed + 2, out, rank, dtype=dtype),
            "hada_w2_b": random(seed + 3, rank, flat, dtype=dtype),
        }  # fmt: skip
    if kind == "lokr":
        return {"lokr_w1": random(seed, 2, 2, dtype=dtype), "lokr_w2_a": random(seed + 1, out // 2, rank, dtype=dtype),
                "lokr_w2_b": random(seed + 2, rank, flat // 2, dtype=dtype)}  # fmt: skip
    if kind == "diff":
        return {"diff": random(seed, *shape, dtype=dtype)}
    tensors_by_key = {"lora_down.weight": down, "lora_up.weight": up}
    if kind == "dora":
        tensors_by_key["dora_scale"] = random(seed + 5, out, 1, *tail, dtype=dtype)
    return tensors_by_key


@pytest.mark.sample(4)
@pytest.mark.parametrize("dialect", WRITTEN)
@RELAXED
@given(sample=adapters())
def test_there_and_back_is_the_identity(dialect: str, sample: tuple[str, dict[str, Tensor]]) -> None:
    """Whatever a dialect can express comes back from it bit for bit, alphas and metadata included."""
    base, tensors = sample
    index = known_index(base)
    metadata = {"ss_output_name": "law", "modelspec.title": "inweave"}
    adapter = read(tensors, metadata)
    assert not adapter.problems
    home = "diffusers" if any("lora_A" in key for key in tensors) else "kohya"
    there = rewrite(adapter, dialect, index)
    if there.lost:
        assert all(row.reason and row.keys for row in there.lost)
        return
    back = rewrite(read(there.tensors, there.metadata, there.config), home, index)
    assert not back.lost
    assert back.tensors.keys() == tensors.keys()
    for key, value in tensors.items():
        assert value.same(back.tensors[key]), key
    assert metadata.items() <= there.metadata.items()
    assert metadata.items() <= back.metadata.items()


@RELAXED
@given(sample=adapters(), seed=st.integers(0, 1000))
def test_resolve_does_not_depend_on_the_order_of_keys(sample: tuple[str, dict[str, Tensor]], seed: int) -> None:
    base, tensors = sample
    shuffled = list(tensors.items())
    stdlib_random.Random(seed).shuffle(shuffled)
    for naming in ("diffusers", "original"):
        index = known_index(base, naming)
        one, two = (resolve(read(tensors_by_key), index) for tensors_by_key in (tensors, dict(shuffled)))
        assert _places(one) == _places(two)
        assert one.report.placed == two.report.placed == len(tensors)


def _places(plan) -> set[tuple[object, ...]]:  # type: ignore[no-untyped-def]
    return {
        (p.component, p.tensor, p.target, p.source, p.swap, p.transpose, frozenset(p.keys)) for p in plan.placements
    }


@settings(RELAXED, max_examples=sized(5, 60))  # whole weights of large models
@given(sample=adapters(plain=True))
def test_both_namings_receive_the_same_change(sample: tuple[str, dict[str, Tensor]]) -> None:
    """A diffusers folder and a single-file checkpoint receive the same change, row for row."""
    pytest.importorskip("torch")
    import torch

    from inweave.ops.delta import change

    base, tensors = sample
    adapter = read(tensors)
    by_part: list[dict[str, torch.Tensor]] = []
    for naming in ("diffusers", "original"):
        index = known_index(base, naming)
        unet = index.components["unet"]
        whole: dict[str, torch.Tensor] = {}
        for placement in resolve(adapter, index).placements:
            start, length = placement.source or (0, None)
            rows = change(placement.factors, None)
            rows = rows[start : None if length is None else start + length]
            if placement.swap:
                rows = torch.cat(rows.chunk(2)[::-1])
            target = whole.setdefault(placement.tensor, torch.zeros(placement.shape))
            first = placement.rows()[0]
            target[first : first + rows.shape[0]] += rows.reshape(rows.shape[0], *placement.shape[1:])
        parts = {}
        for part, home in unet.homes.items():
            if home.tensor in whole:
                value = whole[home.tensor]
                value = value if home.length is None else value[home.start : home.start + home.length]
                value = torch.cat(value.chunk(2)[::-1]) if home.swap else value
                if value.any():
                    parts[part] = value
        by_part.append(parts)
    assert by_part[0].keys() == by_part[1].keys()
    for part, value in by_part[0].items():
        assert torch.equal(value, by_part[1][part]), part


@RELAXED
@given(values=st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True), other=st.integers(0, 12))
def test_compact_listings_expand_to_what_was_packed(values: list[int], other: int) -> None:
    from inweave.targets.compact import expand, pack

    names = {f"blocks.{v}.layer.{w}.weight": (v % 3, other) for v in values for w in range(other + 1)}
    assert expand(pack(names)) == names
