"""LoHa and LoKr in files: written in LyCORIS' dialect, read back by every path, split, refused."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import inweave
from inweave.adapter import Adapter, Loha, Lokr, Tensor
from inweave.errors import TargetError
from inweave.formats.read import read
from inweave.layers import attach, collect, lora_layers, merge, model_index, unmerge
from inweave.layers.algorithms import obstacle, to_branch
from inweave.layers.branch import Geometry
from inweave.ops.delta import change
from inweave.targets.index import ModelIndex
from inweave.targets.resolve import resolve
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource
from tests.support import random, tensor
from tests.unit.layers.test_collect import hollow_model
from tests.unit.layers.zoo import (
    KINDS,
    NETWORKS,
    OPERATORS,
    bits,
    fill,
    injected,
    layer_of,
    networked,
    reference,
)

CPU = torch.device("cpu")


def saved(model: nn.Module, path: Path) -> Adapter:
    """Through a file in kohya's dialect, as if the model were a custom denoiser."""
    index = model_index(model)
    (component,) = index.components.values()
    denoiser = ModelIndex({"unet": replace(component, name="unet")})
    inweave.save(collect(model), path / "adapter.safetensors", dialect="kohya", base=denoiser)
    return inweave.load(path / "adapter.safetensors")


def one_network() -> nn.ModuleDict:
    """Every kind with a name of its own; Conv1D cannot be expressed in kohya's dialect."""
    kinds = [kind for kind in OPERATORS if not kind.startswith("conv1D")]
    return nn.ModuleDict({kind.replace("-", "_"): KINDS[kind].module()["layer"] for kind in kinds})


@pytest.mark.parametrize("network", NETWORKS)
def test_to_a_file_and_back_by_every_road(network: str, tmp_path: Path) -> None:
    base = one_network()
    options = {"rank": 3, "alpha": 5.0, "targets": list(base)} | NETWORKS[network]
    model = injected(copy.deepcopy(base), **options)  # type: ignore[arg-type]
    fill(model)
    adapter = saved(model, tmp_path)
    stem = "hada_w1_a" if network.startswith("loha") else "lokr_w1"
    for name in base:
        own = {key.partition(".")[2] for key in adapter.tensors if key.startswith(f"lora_unet_{name}.")}
        assert "alpha" in own and any(suffix.startswith(stem) for suffix in own)
    assert {type(entry.factors) for entry in adapter} == {Loha if network.startswith("loha") else Lokr}
    for entry in adapter:
        ours = lora_layers(model)[next(name for name in base if name == entry.ref.name)].branch("default")
        assert {role: bits(value) for role, value in ours.roles().items()} == {
            role: bytes(value.data) for role, value in entry.factors.tensors().items()
        }
        assert math.isclose(entry.factors.scale, ours.scale, rel_tol=1e-7)
    plan = resolve(adapter, model_index(base))
    assert plan.report.clean
    weights = {name: value.detach().clone() for name, value in base.state_dict().items()}
    source = MergedSource(DictSource(weights), [(plan, 1.0)])
    twin = attach(copy.deepcopy(base), adapter)
    live = copy.deepcopy(base)
    inweave.Weaver({"unet": live}).apply([(adapter, 1.0)])
    merge(model)
    merge(twin)
    for name in base:
        merged, want = f"{name}.weight", lora_layers(model)[name].weight
        exact = not NETWORKS[network].get("rslora")  # its alpha is folded into one of float32 when written
        for road in (source.get(merged), lora_layers(twin)[name].weight, live[name].weight):
            torch.testing.assert_close(road, want, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.mark.parametrize("network", ["loha", "lokr", "lokr-both"])
def test_training_starts_from_a_file(network: str, tmp_path: Path) -> None:
    kind, x = "conv2d", KINDS["conv2d"].input()
    model = networked(kind, network)
    twin = attach(KINDS[kind].module(), saved(model, tmp_path), trainable=True)
    assert torch.equal(twin["layer"](x), model["layer"](x))
    for each in (model, twin):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            each["layer"](x).square().mean().backward()
            optimizer.step()
    assert torch.equal(twin["layer"](x), model["layer"](x))


def loaded(tensors: dict[str, Tensor], kind: str) -> nn.Module:
    model = attach(KINDS[kind].module(), read({f"lora_unet_layer.{key}": value for key, value in tensors.items()}))
    x = KINDS[kind].input()
    torch.testing.assert_close(model["layer"](x).double(), reference(model, x), rtol=1e-4, atol=1e-4)
    before = model["layer"](x)
    merge(model)
    torch.testing.assert_close(model["layer"](x), before, rtol=1e-4, atol=1e-4)
    unmerge(model)
    return model


def test_tucker_cores_from_files() -> None:
    """A 3 x 3 convolution of 3 inputs and 5 outputs."""
    halves: dict[str, Tensor] = {}
    for i in (1, 2):
        halves |= {
            f"hada_t{i}": random(i, 2, 2, 3, 3),
            f"hada_w{i}_a": random(i + 2, 2, 5),
            f"hada_w{i}_b": random(i + 4, 2, 3),
        }
    back = layer_of(loaded(halves, "conv2d")).factors("default")
    assert isinstance(back, Loha) and back.t1 is not None and back.t1.same(halves["hada_t1"])
    core = {
        "lokr_w1": random(0, 1, 1),
        "lokr_t2": random(1, 2, 2, 3, 3),
        "lokr_w2_a": random(2, 2, 5),
        "lokr_w2_b": random(3, 2, 3),
    }
    loaded(core | {"alpha": tensor(3.0)}, "conv2d")  # fmt: skip


def test_loha_stored_as_convolutions() -> None:
    """Some trainers give all four factors the axes of a convolution."""
    loaded(
        {f"hada_w{i}_a": random(i, 5, 2, 1, 1) for i in (1, 2)}
        | {f"hada_w{i}_b": random(i + 2, 2, 3, 3, 3) for i in (1, 2)},
        "conv2d",
    )


def test_a_dimension_named_elsewhere_keeps_its_scale() -> None:
    """Two full factors, and a trainer that divided alpha by its dimension all the same."""
    factors = Lokr(w1=random(0, 1, 1), w2=random(1, 5, 7), alpha=2.0, nominal_rank=8)
    branch = to_branch(factors, Geometry(5, (7,)), dtype=None, device=CPU)
    assert branch.scale == factors.scale == 0.25
    assert branch.to_factors(transposed=False).scale == 0.25


def fused(**suffixed: Tensor) -> tuple[Adapter, nn.Module]:
    """A file for q, k and v of a Flux block in one, on a model that has three layers."""
    adapter = read({f"lora_unet_double_blocks_3_img_attn_qkv.{name}": value for name, value in suffixed.items()})
    return adapter, attach(hollow_model("diffusers"), adapter)


@pytest.mark.parametrize("network", ["loha", "lokr"])
def test_a_fused_file_is_cut_for_a_model_with_separate_layers(network: str) -> None:
    if network == "loha":
        factors = {f"hada_w{i}_{j}": random(i, *(9216, 2) if j == "a" else (2, 3072)) for i in (1, 2) for j in "ab"}
    else:
        factors = {"lokr_w1": random(0, 96, 48), "lokr_w2_a": random(1, 96, 2), "lokr_w2_b": random(2, 2, 64)}
    adapter, model = fused(**factors, alpha=tensor(3.0))
    whole = change(adapter.entries[0].factors, None)
    assert whole.abs().max() > 0
    for part, expected in zip(("to_q", "to_k", "to_v"), whole.chunk(3), strict=True):
        branch = lora_layers(model)[f"transformer_blocks.3.attn.{part}"].branch("default")
        with torch.no_grad():
            torch.testing.assert_close(branch.scale * branch.product(), expected, rtol=1e-5, atol=1e-6)


def test_a_lokr_that_cannot_be_cut_there_is_refused() -> None:
    """The 3072 rows of a part are not a multiple of w2's nine."""
    with pytest.raises(TargetError, match=r"to_q.*lokr cannot be cut to rows"):
        fused(lokr_w1=random(0, 1024, 48), lokr_w2=random(1, 9, 64))


REFUSED = {
    "rank": (
        Loha(w1_a=random(0, 5, 2), w1_b=random(1, 3, 7), w2_a=random(2, 5, 2), w2_b=random(3, 2, 7)),
        "do not fit together",
    ),
    "half": (Loha(w1_a=random(0, 5, 2), w1_b=random(1, 2, 7), w2_a=random(2, 1, 2), w2_b=random(3, 2, 7)), r"\(1, 7\)"),
    "size": (Lokr(w1=random(0, 2, 1), w2=random(1, 5, 7)), r"changes \[10, 7\], the layer has \[5, 7\]"),
    "missing": (Lokr(w1=random(0, 1, 1), w2_a=random(1, 5, 2)), "missing"),
    "vector": (Lokr(w1=random(0, 5), w2=random(1, 1, 7)), "do not fit together"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_factors_that_make_no_product_for_the_layer(case: str) -> None:
    factors, message = REFUSED[case]
    assert re.search(message, obstacle(factors, Geometry(5, (7,))) or "")
