"""Fused weights in one launch: every row of a tensor equals the stack's, whatever rows the adapters touch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inweave.adapter import Tensor
from inweave.formats.read import read
from inweave.ops.merge import merge_products
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.plan import Plan
from inweave.targets.resolve import resolve
from inweave.weights.factors import LoadedAdapter, targets_of
from inweave.weights.merge import merged
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource
from inweave.weights.stack import Item
from tests.support import random, summation_error

QKV = "double_blocks.0.img_attn.qkv.weight"
SHAPES = {"img_in.weight": (8, 4), "txt_in.weight": (8, 6), QKV: (24, 8), "final_layer.linear.weight": (4, 8),
          "double_blocks.0.img_attn.proj.weight": (8, 8), "single_blocks.0.linear1.weight": (56, 8)}  # fmt: skip
RANKS = 9  # of a whole stack, at most
INDEX = ModelIndex({"unet": component_from_names("unet", SHAPES)})


def plan_of(seed: int, *leaves: str) -> Plan:
    """LoRA pairs of different ranks on q, k, v, or on all of them as one."""
    lora: dict[str, Tensor] = {}
    for number, leaf in enumerate(leaves):
        module = f"transformer.transformer_blocks.0.attn.to_{leaf}"
        if leaf == "qkv":
            module = "diffusion_model.double_blocks.0.img_attn.qkv"
        rank, out = 2 + number, 24 if leaf == "qkv" else 8
        lora |= {
            f"{module}.lora_A.weight": random(seed + number, rank, 8),
            f"{module}.lora_B.weight": random(seed + 50 + number, out, rank),
        }
    return resolve(read(lora), INDEX)


def placed(*plans: Plan) -> tuple[list[Item], dict[int, LoadedAdapter]]:
    owners = {id(p): LoadedAdapter(id(plan), plan, 0) for plan in plans for p in plan.placements}
    items = [Item(p, 0.5 - 0.3 * i) for i, plan in enumerate(plans) for p in plan.placements if p.tensor == QKV]
    return items, owners


STACKS = [
    ([("q", "v")], [8, 8, 8]),
    ([("q", "k", "v")], [8, 8, 8]),
    ([("k",)], [8, 8, 8]),
    ([("qkv",)], [24]),
    ([("q", "v"), ("v",)], [8, 8, 8]),
    ([("qkv",), ("k",)], [8, 8, 8]),  # overlapping
]


@pytest.mark.parametrize(("stack", "runs"), STACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_that_of_the_stack(stack: list[tuple[str, ...]], runs: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    original = torch.randn(SHAPES[QKV]).to(dtype)
    live = torch.full_like(original, 9.0)  # as another stack left it
    items, owners = placed(*(plan_of(10 * number, *leaves) for number, leaves in enumerate(stack)))
    targets = targets_of(original, live, items, owners)
    assert [len(target.out) for target, _ in targets] == runs
    for target, used in targets:
        assert [product.scale for product in target.products] == [i.strength * i.placement.factors.scale for i in used]
    merge_products([target for target, _ in targets])
    want = merged(original, items, lambda name: original)
    torch.testing.assert_close(live, want, rtol=torch.finfo(dtype).eps, atol=summation_error(RANKS, 5.0))
    untouched = [row for row in range(24) if not any(row in item.placement.rows() for item in items)]
    assert torch.equal(live[untouched], original[untouched])


def test_one_stack_after_the_other_leaves_nothing_of_the_first() -> None:
    original = torch.randn(SHAPES[QKV])
    live = original.clone()
    for leaves in (("q", "v"), ("k",), ("v",)):
        items, owners = placed(plan_of(3, *leaves))
        merge_products([target for target, _ in targets_of(original, live, items, owners)])
        torch.testing.assert_close(
            live, merged(original, items, lambda name: original), rtol=0, atol=summation_error(RANKS, 5.0)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_weight_read_plain_is_merged_in_place(dtype: torch.dtype) -> None:
    """What building on a GPU does: read, then weave; the source's own tensor is not touched."""
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    copy = tensors[QKV].clone()
    source = MergedSource(DictSource(tensors), [(plan_of(1, "q", "v"), 0.7), (plan_of(5, "qkv"), -0.4)])
    assert source.deferrable(QKV, dtype)
    later = {QKV: source.plain(QKV, device="cpu")}
    source.weave(later)
    torch.testing.assert_close(
        later[QKV], source.get(QKV), rtol=torch.finfo(dtype).eps, atol=summation_error(RANKS, 5.0)
    )
    assert torch.equal(tensors[QKV], copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_base_of_our_own_is_written_to(dtype: torch.dtype) -> None:
    original = torch.randn(SHAPES[QKV]).to(dtype)
    copy = original.clone()
    items, _ = placed(plan_of(1, "qkv"))
    wide = [Item(replace(items[0].placement, widen=SHAPES[QKV]), 0.5)]  # its present shape
    for plan in (items, wide):
        result = merged(original, plan, lambda name: copy)
        assert torch.equal(original, copy)
        mine = original.clone()
        assert merged(mine, plan, lambda name: copy, owned=True).data_ptr() == mine.data_ptr()
        assert torch.equal(mine, result)
