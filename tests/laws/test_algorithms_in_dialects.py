"""Every algorithm in every dialect: what is written has the same change when read again, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from inweave.adapter import (
    ALGORITHMS,
    Adapter,
    Boft,
    BoftIn,
    Entry,
    ExpertLora,
    Factors,
    Full,
    Glora,
    Ia3,
    Loha,
    Lokr,
    Lora,
    Magnitude,
    Oft,
    OftIn,
    Ref,
    Residual,
    TokenRows,
    Vera,
)
from inweave.exchange.convert import rewrite
from inweave.formats.dialects import WRITTEN
from inweave.formats.read import read
from inweave.ops.delta.reference import change
from inweave.targets.bases import known_index
from inweave.targets.index import ModelIndex, index_from_names
from inweave.targets.resolve import resolve
from tests.support import random, scalar_tensor, tensor

N = 12
LINEAR, CONV, TABLE, NORM = "layers.0.proj", "layers.0.conv", "embed_tokens", "layers.0.norm"
SHAPES = {f"{LINEAR}.weight": (N, N), f"{LINEAR}.bias": (N,), f"{CONV}.weight": (N, N, 3, 3), f"{CONV}.bias": (N,),
          f"{TABLE}.weight": (20, N), f"{NORM}.weight": (N,), f"{NORM}.bias": (N,)}  # fmt: skip

#: the model behind each dialect, and where its modules are: any torch model, or a listed one of moderate size
SMALL = {"peft", "candle"}
LISTED = {
    "sd1.5": {
        LINEAR: "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q",
        CONV: "down_blocks.0.resnets.0.conv1",
        NORM: "down_blocks.0.resnets.0.norm1",
    },
    "z-image-turbo": {LINEAR: "layers.0.attention.to_out.0", NORM: "layers.0.attention_norm1"},
    "flux1-dev": {LINEAR: "transformer_blocks.0.attn.to_out.0", NORM: "transformer_blocks.0.attn.norm_q"},
}
CASES = [*((dialect, "") for dialect in sorted(SMALL)),
         *((dialect, "sd1.5") for dialect in WRITTEN if dialect not in (*SMALL, "bfl")),
         ("diffusers", "z-image-turbo"), ("bfl", "flux1-dev")]  # fmt: skip


def alphas(value: float = 2.0) -> list[dict[str, Any]]:
    stored = scalar_tensor(value)
    return [{}, {"alpha": value, "stored_alpha": stored}, {"alpha": 3.0, "rslora": True}, {"alpha": 3.0},
            {"stored_scale": scalar_tensor(0.25)}]  # fmt: skip


def low_rank(out: int, into: int, kernel: tuple[int, ...] = ()) -> Iterator[Factors]:
    """Every additive algorithm for a linear layer, or for a convolution with ``kernel``."""
    ones, k = (1,) * len(kernel), 9 if kernel else 1
    r = 2
    up, down = random(1, out, r, *ones), random(2, r, into, *kernel)
    a, b, c, d = random(3, out, r), random(4, r, into * k), random(5, out, r), random(6, r, into * k)
    w1, w2 = random(7, 2, 2), random(8, out // 2, into // 2, *kernel)
    w2_a, w2_b = random(9, out // 2, r), random(10, r, into // 2 * k)
    indices = tensor([[0, 1], [1, 2]], "I64")
    sparse = Residual(indices, random(11, 2), tensor([out, into * k], "I64"))
    norms = [Magnitude(random(12, out, 1, *ones), "out"), Magnitude(random(13, 1, into, *ones), "in")]
    made: list[Factors] = [Lora(up=up, down=down), Loha(w1_a=a, w1_b=b, w2_a=c, w2_b=d), Lokr(w1=w1, w2=w2)]
    made += [
        Lokr(w1=w1, w2_a=w2_a, w2_b=w2_b),
        Lokr(w1_a=random(3, 2, 1), w1_b=random(4, 1, 2), w2=w2),
        Lokr(w1_a=random(3, 2, r), w1_b=random(4, r, 2), w2_a=w2_a, w2_b=w2_b),
        Lokr(w1=w1, w2=w2, nominal_rank=4),
    ]
    if kernel:
        mid, flat = random(14, r, r, *kernel), (random(15, out, r, *ones), random(16, r, into, *ones))
        pairs: dict[str, Any] = {"w1_a": random(1, r, out), "w1_b": random(2, r, into), "w2_a": random(3, r, out)}
        made += [
            Lora(up=flat[0], down=flat[1], mid=mid),
            Loha(**pairs, w2_b=random(5, r, into), t1=mid, t2=random(6, r, r, *kernel)),
            Lokr(w1=w1, w2_a=random(9, r, out // 2), w2_b=random(10, r, into // 2), t2=mid),
        ]
    for factors in made:
        for fields in alphas():
            yield replace(factors, **fields)
        yield from (replace(factors, magnitude=norm, alpha=4.0) for norm in norms)
        yield replace(factors, residual=sparse, alpha=1.0)
    glora = Glora(a1=random(1, into, r), a2=random(2, r, into), b1=random(3, out, r), b2=random(4, r, into * k))
    if not kernel:
        yield from (replace(glora, **fields) for fields in alphas())
        yield replace(Lora(up=up, down=down), transposed=True, alpha=4.0)
        yield replace(Lora(up=up, down=random(2, r, 2 * into)), widen=(out, 2 * into))
        yield Vera(lambda_b=random(1, out), lambda_d=random(2, r), down=random(3, r, into), up=random(4, out, r))


def rotations(size: int, out: int) -> Iterator[Factors]:
    b = 4
    blocks, stages = random(1, out // b, b, b), random(2, 1, out // b, b, b)
    rescale = random(3, out, 1)
    for fields in ({}, {"alpha": 2**-10, "stored_alpha": scalar_tensor(2**-10)}, {"alpha": 2**-9}):
        yield from (Oft(blocks=blocks, **fields), Oft(blocks=blocks, rescale=rescale, **fields))
        yield from (Boft(blocks=stages, **fields), Boft(blocks=stages, rescale=rescale, **fields))
        yield Oft(blocks=blocks, solved=True, **fields)
        triangles = random(4, size // b, 6)
        for terms in (None, 2, 3, 4, 5, 6, 8):
            yield OftIn(blocks=triangles, neumann_terms=terms, **fields)
        yield OftIn(blocks=triangles, neumann_terms=5, spread=tensor([1.0]), **fields)
        yield OftIn(blocks=random(5, 1, 6), share=True, neumann_terms=5, **fields)
    yield BoftIn(blocks=random(6, 1, size // b, b, b), out_scale=random(7, out, 1))


def vectors(out: int, into: int) -> Iterator[Factors]:
    yield Ia3(vector=random(1, out, 1), on_input=False, convention="offset", stored_on_input=tensor(0.0))
    yield Ia3(vector=random(1, into), on_input=True, convention="offset", stored_on_input=tensor(1.0))
    yield Ia3(vector=random(1, into), on_input=True, convention="offset")
    yield Ia3(vector=random(1, out, 1), on_input=False, convention="factor")
    yield Ia3(vector=random(1, 1, into), on_input=True, convention="factor")


def wholes(*shape: int) -> Iterator[Factors]:
    value = random(1, *shape)
    yield from (Full(value=value), Full(value=value, mode="set"), Full(value=value, mode="set", inside=True))
    if len(shape) > 1:
        yield Full(value=value, alpha=1.0, stored_alpha=scalar_tensor(1.0))
        yield Full(value=value, magnitude=Magnitude(random(2, shape[0], 1), "out"))


def samples(module: str, param: str, shape: tuple[int, ...]) -> Iterator[Factors]:
    if module == TABLE:
        yield Lora(up=random(1, N, 2), down=random(2, 2, 20), embedding=True, transposed=True, alpha=1.0)
        yield TokenRows(value=random(1, 2, N), indices=(3, 7))
        return
    if len(shape) > 1:
        out, into, *kernel = shape
        yield from low_rank(out, into, tuple(kernel))
        if not kernel:
            yield from rotations(into, out)
            yield from vectors(out, into)
        yield from wholes(*shape)
        return
    yield from wholes(*shape)
    if param == "bias":
        yield from (Full(value=random(1, *shape), bias_rank=2, **fields) for fields in alphas()[:4])


def index_of(base: str) -> ModelIndex:
    return known_index(base) if base else index_from_names(SHAPES, source="x")


@pytest.mark.parametrize(("dialect", "base"), CASES)
@pytest.mark.parametrize("target", SHAPES)
def test_a_written_change_is_read_again_as_it_was(dialect: str, base: str, target: str) -> None:
    index = index_of(base)
    component = index.denoiser or next(iter(index))
    module, _, param = target.rpartition(".")
    name = LISTED[base].get(module) if base else module
    if name is None or f"{name}.{param}" not in component.parts:
        pytest.skip("this model has no such module")
    shape = component.parts[f"{name}.{param}"]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kinds, failures = set(), list[str]()
    for number, factors in enumerate(samples(module, param, shape)):
        entries = [entry_of(component.name, name, param, factors, number)]
        if dialect == "bfl":  # whole values alone are read as a checkpoint
            entries.append(entry_of(component.name, "context_embedder", "weight", EMBEDDER, -1))
        written = rewrite(adapter_of(entries, settings_of(factors)), dialect, index)
        if written.lost:
            assert all(row.reason for row in written.lost), factors
            assert len(entries) > 1 or not written.tensors, factors
            continue
        kinds.add(factors.kind)
        if reason := difference(entries[0], weight, read(written.tensors, written.metadata, written.config), index):
            failures.append(f"{factors}: {reason}")
    assert not failures, "\n".join(failures)
    assert kinds or param == "bias" or module in (NORM, TABLE, CONV)


EMBEDDER = Lora(up=random(1, 3072, 1), down=random(2, 1, 4096))


def settings_of(factors: Factors) -> dict[str, str]:
    """The metadata of a file whose factors have these settings."""
    if isinstance(factors, Lokr) and factors.nominal_rank:
        return {"ss_network_dim": str(factors.nominal_rank)}
    return {"ss_network_args": '{"rs_lora": true}'} if isinstance(factors, Glora) and factors.rslora else {}


def entry_of(component: str, name: str, param: str, factors: Factors, number: int) -> Entry:
    keys = tuple(f"k{number}.{role}" for role in factors.tensors())
    return Entry(Ref(component, name), param, factors, keys, "x")


def adapter_of(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> Adapter:
    tensors = {key: value for e in entries for key, value in zip(e.keys, e.factors.tensors().values(), strict=True)}
    return Adapter(tuple(entries), tensors=tensors, metadata=metadata or {})


def difference(entry: Entry, weight: torch.Tensor, again: Adapter, index: ModelIndex) -> str:
    """How an entry, read again, differs from what was written; empty if it does not."""
    if again.problems:
        return str(again.problems)
    plan = resolve(again, index, strict=False)
    rows = [each for each in plan.placements if each.tensor == f"{entry.ref.name}.{entry.param}"]
    if len(rows) != 1 or not plan.report.clean:
        return str(plan.report.findings())
    factors, came = entry.factors, rows[0].factors
    if factors.constraint and (factors.alpha or 0) != (came.alpha or 0):
        return f"the constraint {factors.alpha} is {came.alpha}"
    one, two = change(factors, weight), change(came, weight)
    close = torch.allclose(one, two, rtol=1e-5, atol=1e-6 * float(one.abs().max()))
    return "" if close else f"another change, {two.flatten()[:2]} for {one.flatten()[:2]}"


def test_every_algorithm_is_tried() -> None:
    names = {target: target.rpartition(".") for target in SHAPES}
    tried = {
        type(each) for target, (module, _, param) in names.items() for each in samples(module, param, SHAPES[target])
    }
    own = {each for each in ALGORITHMS.values() if each.__module__.startswith("inweave.")}
    assert tried == {each for each in own if not each.of_parameter}


@pytest.mark.parametrize(("dialect", "base"), CASES)
def test_a_lora_on_a_bare_parameter_is_written_whole_or_refused_by_name(dialect: str, base: str) -> None:
    """PEFT alone has a form for it; tests of such layers read that form with PEFT."""
    index = index_of(base)
    component = index.denoiser or next(iter(index))
    factors = ExpertLora(down=random(1, 6, 20), up=random(2, 24, 6), experts=3)
    entry = entry_of(component.name, "experts", "down_proj", factors, 0)
    written = rewrite(adapter_of([entry]), dialect, index)
    assert bool(written.tensors) != bool(written.lost), "nothing is lost silently"
    assert all(row.reason for row in written.lost)
