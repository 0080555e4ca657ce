"""Traps of place: which tensor, which of its rows, and whether it is transposed or swapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import inweave
from inweave.adapter import Lora, Tensor
from inweave.errors import TargetError
from inweave.formats.read import read
from inweave.targets.links import Naming
from tests.golden.weave import (
    NAMINGS,
    Base,
    close,
    halves,
    known,
    lands,
    lora,
    numbers,
    places,
    product,
    shape_of,
    small,
    torch_base,
)
from tests.support import random, tensor, write

UNET, TE = "model.diffusion_model.", "text_model.encoder.layers."


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(("base", "kernel"), [("sd1.5", ()), ("sd1.5", (1, 1)), ("sd2.1", ()), ("sd2.1", (1, 1))])
def test_proj_in_as_matrix_or_convolution_either_way(base: str, kernel: tuple[int, ...], naming: Naming) -> None:
    pair = lora("lora_unet_down_blocks_0_attentions_0_proj_in", 320, 320, kernel=kernel, alpha=2.0)
    ((name, change),) = known(base, naming).changes(pair).items()
    assert name.endswith("proj_in.weight")
    assert change.dim() == (4 if base == "sd1.5" else 2)
    close(change.flatten(1), 2 / 3 * product(pair))


@pytest.mark.parametrize(("leaf", "start"), [("q", 0), ("k", 1024), ("v", 2048)])
def test_openclip_keeps_q_k_v_in_one_tensor(leaf: str, start: int) -> None:
    module = f"lora_te_text_model_encoder_layers_5_self_attn_{leaf}_proj"
    pair, bias = lora(module, 1024, 1024, alpha=2.0), random(1, 1024)
    changes = known("sd2.1", "original").changes(pair | {f"{module}.diff_b": bias})
    block = "cond_stage_model.model.transformer.resblocks.5.attn."
    assert set(changes) == {f"{block}in_proj_weight", f"{block}in_proj_bias"}
    expected = torch.zeros(3072, 1024, dtype=torch.float64)
    expected[start : start + 1024] = 2 / 3 * product(pair)
    close(changes[f"{block}in_proj_weight"], expected)
    close(changes[f"{block}in_proj_bias"][start : start + 1024], numbers(bias))
    assert changes[f"{block}in_proj_bias"].count_nonzero() <= 1024


def test_openclip_names_its_output_and_mlp_layers_differently() -> None:
    for leaf, original in (
        ("self_attn.out_proj", "attn.out_proj"),
        ("mlp.fc1", "mlp.c_fc"),
        ("mlp.fc2", "mlp.c_proj"),
    ):
        flat = f"lora_te2_text_model_encoder_layers_31_{leaf.replace('.', '_')}"
        home = f"te2:conditioner.embedders.1.model.transformer.resblocks.31.{original}"
        lands("sdxl", flat, f"te2:{TE}31.{leaf}", home)


@pytest.mark.parametrize("neighbors", ["nothing", "sgm names", "diffusers names"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_text_projection_is_stored_transposed(naming: Naming, neighbors: str) -> None:
    """Trainers name it as transformers does, however they name the UNet in the same file."""
    pair = lora("lora_te2_text_projection", 1280, 1280, alpha=2.0)
    block = {"sgm names": "input_blocks_4_1", "diffusers names": "down_blocks_1_attentions_0"}.get(neighbors)
    others = lora(f"lora_unet_{block}_proj_in", 640, 640) if block else {}
    changes = known("sdxl", naming).changes(pair | others)
    name = "text_projection.weight" if naming == "diffusers" else "conditioner.embedders.1.model.text_projection"
    expected = 2 / 3 * product(pair)
    close(changes[name], expected if naming == "diffusers" else expected.T)


def test_the_24th_layer_of_sd2_is_in_single_files_only() -> None:
    here = lora("lora_te_text_model_encoder_layers_22_mlp_fc1", 4096, 1024)
    last = lora("lora_te_text_model_encoder_layers_23_mlp_fc1", 4096, 1024)
    result = set(places("sd2.1", "original", here | last))
    assert result == {f"te1:cond_stage_model.model.transformer.resblocks.{n}.mlp.c_fc" for n in (22, 23)}
    plan = known("sd2.1").plan(here | last, strict=False)
    assert [p.tensor for p in plan.placements] == [f"{TE}22.mlp.fc1.weight"]
    assert [set(finding.keys) for finding in plan.report.unplaced] == [set(last)]
    with pytest.raises(TargetError, match="layers_23"):
        known("sd2.1").plan(here | last)
    verdict = inweave.check(read(here | last), "sd2.1")
    assert verdict.ok
    assert verdict.namings == {"diffusers": False, "original": True}
    assert any("diffusers files" in warning for warning in verdict.report.warnings)


@pytest.mark.parametrize(
    ("base", "block", "home"),
    [
        ("sd1.5", 0, "output_blocks.2.1.conv"),
        ("sd1.5", 1, "output_blocks.5.2.conv"),
        ("sd1.5", 2, "output_blocks.8.2.conv"),
        ("sd2.1", 0, "output_blocks.2.1.conv"),
        ("sdxl", 0, "output_blocks.2.2.conv"),
        ("sdxl", 1, "output_blocks.5.2.conv"),
    ],
)
def test_the_upsampler_is_index_two_where_there_is_attention(base: str, block: int, home: str) -> None:
    part = f"up_blocks.{block}.upsamplers.0.conv"
    for key_naming in (part, home):
        lands(base, f"lora_unet_{key_naming.replace('.', '_')}", f"unet:{part}", f"unet:{UNET}{home}")


@pytest.mark.parametrize(
    ("diffusers", "sgm"),
    [
        (
            "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k",
            "input_blocks.4.1.transformer_blocks.1.attn2.to_k",
        ),
        (
            "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.0.proj",
            "input_blocks.8.1.transformer_blocks.9.ff.net.0.proj",
        ),
        ("mid_block.attentions.0.proj_in", "middle_block.1.proj_in"),
        ("mid_block.resnets.1.conv2", "middle_block.2.out_layers.3"),
        (
            "up_blocks.0.attentions.2.transformer_blocks.0.attn1.to_out.0",
            "output_blocks.2.1.transformer_blocks.0.attn1.to_out.0",
        ),
        ("up_blocks.1.resnets.0.conv_shortcut", "output_blocks.3.0.skip_connection"),
        ("down_blocks.0.downsamplers.0.conv", "input_blocks.3.0.op"),
        ("down_blocks.1.resnets.0.time_emb_proj", "input_blocks.4.0.emb_layers.1"),
    ],
)
def test_sdxl_blocks_under_both_names(diffusers: str, sgm: str) -> None:
    for key_naming in (diffusers, sgm):
        lands("sdxl", f"lora_unet_{key_naming.replace('.', '_')}", f"unet:{diffusers}", f"unet:{UNET}{sgm}")


@pytest.mark.parametrize(
    ("diffusers", "sgm"),
    [
        ("conv_in", "input_blocks.0.0"),
        ("conv_out", "out.2"),
        ("add_embedding.linear_1", "label_emb.0.0"),
        ("add_embedding.linear_2", "label_emb.0.2"),
        ("time_embedding.linear_1", "time_embed.0"),
        ("time_embedding.linear_2", "time_embed.2"),
    ],
)
def test_first_last_and_embedding_layers_of_sdxl_under_both_names(diffusers: str, sgm: str) -> None:
    for key_naming in (diffusers, sgm):
        lands("sdxl", f"lora_unet_{key_naming.replace('.', '_')}", f"unet:{diffusers}", f"unet:{UNET}{sgm}")


PARTS = {"attn.to_q": (0, 8), "attn.to_k": (8, 8), "attn.to_v": (16, 8), "proj_mlp": (24, 32)}


@pytest.mark.parametrize("count", [1, 3, 4])
def test_linear1_is_q_k_v_and_mlp_and_groups_may_be_partial(count: int) -> None:
    """Only q; q, k and v without the MLP; all four: each part is a place of its own on a slice."""
    base, name = small("flux1-dev", "original"), "single_blocks.0.linear1.weight"
    expected = torch.zeros(56, 8, dtype=torch.float64)
    tensors: dict[str, Tensor] = {}
    for part, (start, length) in list(PARTS.items())[:count]:
        pair = lora(f"transformer.single_transformer_blocks.0.{part}", length, 8, 2 + start % 3, spelling="peft")
        expected[start : start + length] = product(pair)
        tensors |= pair
    close(base.changes(tensors)[name], expected)
    assert sorted(p.target or (0, 0) for p in base.plan(tensors).placements) == list(PARTS.values())[:count]


def test_a_fused_linear1_is_dealt_out_to_its_parts() -> None:
    pair = lora("lora_unet_single_blocks_0_linear1", 56, 8, alpha=2.0)
    changes = small("flux1-dev").changes(pair)
    assert len(changes) == 4
    for part, (start, length) in PARTS.items():
        close(changes[f"single_transformer_blocks.0.{part}.weight"], 2 / 3 * product(pair)[start : start + length])


SWAPS = [
    ("flux1-dev", "norm_out.linear", "final_layer.adaLN_modulation.1", True),
    ("sd3-medium", "norm_out.linear", "final_layer.adaLN_modulation.1", True),
    (
        "sd3-medium",
        "transformer_blocks.23.norm1_context.linear",
        "joint_blocks.23.context_block.adaLN_modulation.1",
        True,
    ),
    (
        "sd3-medium",
        "transformer_blocks.0.norm1_context.linear",
        "joint_blocks.0.context_block.adaLN_modulation.1",
        False,
    ),
    ("sd3-medium", "transformer_blocks.23.norm1.linear", "joint_blocks.23.x_block.adaLN_modulation.1", False),
    ("flux1-dev", "transformer_blocks.0.norm1.linear", "double_blocks.0.img_mod.lin", False),
]


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("key_naming", NAMINGS)
@pytest.mark.parametrize(("model", "diffusers", "original", "swaps"), SWAPS)
def test_swap_turns_output_rows_only(
    model: str, diffusers: str, original: str, swaps: bool, key_naming: str, naming: Naming
) -> None:
    """The rows of the factors, the bias and an output-axis magnitude, and only between the two namings."""
    base, name = small(model, naming), diffusers if naming == "diffusers" else original
    module = f"diffusion_model.{diffusers if key_naming == 'diffusers' else original}"
    out, into = base[f"{name}.weight"].shape
    pair, bias, magnitude = lora(module, out, into, alpha=2.0), random(1, out), random(2, out, 1)
    turn = halves if swaps and key_naming != naming else (lambda rows: rows)
    delta = 2 / 3 * product(pair)
    changes = base.changes(pair | {f"{module}.diff_b": bias})
    close(changes[f"{name}.weight"], turn(delta))
    close(changes[f"{name}.bias"], turn(numbers(bias)))
    after = base.merged(pair | {f"{module}.dora_scale": magnitude})[f"{name}.weight"]
    changed = base[f"{name}.weight"] + turn(delta)
    close(after, changed / changed.norm(dim=1, keepdim=True) * turn(numbers(magnitude)))


def test_converting_swaps_up_and_leaves_down_alone(tmp_path: Path) -> None:
    module = "lora_unet_final_layer_adaLN_modulation_1"
    pair = lora(module, 6144, 3072, alpha=2.0)
    inweave.convert(
        write(tmp_path / "in.safetensors", pair), tmp_path / "out.safetensors", to="diffusers", base="flux1-dev"
    )
    (entry,) = inweave.load(tmp_path / "out.safetensors").entries
    assert entry.ref.name == "norm_out.linear"
    assert isinstance(entry.factors, Lora)
    assert entry.factors.down.same(pair[f"{module}.lora_down.weight"])
    close(numbers(entry.factors.up), halves(numbers(pair[f"{module}.lora_up.weight"])))


CLIP, T5 = f"{TE}3.mlp.fc1", "encoder.block.3.layer.0.SelfAttention.q"


@pytest.mark.parametrize(
    ("base", "prefix", "home"),
    [
        ("sd1.5", "lora_te_", f"te1:{CLIP}"),
        ("sd1.5", "lora_te1_", f"te1:{CLIP}"),
        ("sd1.5", "lora_te_wrapped_transformer_", f"te1:{CLIP}"),
        ("sd2.1", "lora_te_", f"te1:{CLIP}"),
        ("sdxl", "lora_te1_", f"te1:{CLIP}"),
        ("sdxl", "lora_te2_", f"te2:{CLIP}"),
        ("sdxl", "text_encoder.", f"te1:{CLIP}"),
        ("sdxl", "text_encoder_2.", f"te2:{CLIP}"),
        ("sdxl-refiner", "lora_te_", f"te1:{CLIP}"),
        ("sd3-medium", "lora_te1_", f"te1:{CLIP}"),
        ("sd3-medium", "lora_te2_", f"te2:{CLIP}"),
        ("sd3-medium", "lora_te3_", f"te3:{T5}"),
        ("sd3-medium", "text_encoder_3.", f"te3:{T5}"),
        ("flux1-dev", "lora_te1_", f"te1:{CLIP}"),
        ("flux1-dev", "lora_te2_", f"te2:{T5}"),
        ("flux1-dev", "lora_te3_", f"te2:{T5}"),
        ("flux1-dev", "text_encoder_2.", f"te2:{T5}"),
        ("flux1-dev", "t5.", f"te2:{T5}"),
        ("flux1-dev", "text_encoders.t5xxl.transformer.", f"te2:{T5}"),
        ("flux1-dev", "text_encoders.clip_l.transformer.", f"te1:{CLIP}"),
    ],
)
def test_text_encoders_by_content_not_by_number(base: str, prefix: str, home: str) -> None:
    name = home.partition(":")[2]
    module = prefix + (name if prefix.endswith(".") else name.replace(".", "_"))
    out, into = shape_of(base, home)
    assert set(places(base, "diffusers", lora(module, out, into, empty=True))) == {home}


@pytest.mark.parametrize("into", [768, 1280])
def test_an_unnumbered_encoder_of_sdxl_is_identified_by_its_width(into: int) -> None:
    result = places("sdxl", "diffusers", lora(f"lora_te_{CLIP.replace('.', '_')}", 4 * into, into, empty=True))
    assert set(result) == {f"te{1 if into == 768 else 2}:{CLIP}"}


@pytest.mark.parametrize("leaf", ["wi_0", "wi_1", "wo"])
def test_underscores_inside_t5_names(leaf: str) -> None:
    name = f"encoder.block.7.layer.1.DenseReluDense.{leaf}"
    home = f"te3:text_encoders.t5xxl.transformer.{name}"
    lands("sd3.5-large", f"lora_te3_{name.replace('.', '_')}", f"te3:{name}", home)


def test_underscores_inside_wan_names() -> None:
    for native, part in (("k_img", "add_k_proj"), ("v_img", "add_v_proj")):
        home = f"unet:{UNET}blocks.2.cross_attn.{native}"
        lands("wan2.1-i2v-14b", f"lora_unet_blocks_2_cross_attn_{native}", f"unet:blocks.2.attn2.{part}", home)
    norm = {"lora_unet_blocks_2_cross_attn_norm_k_img.w_norm": random(1, 5120)}
    assert set(places("wan2.1-i2v-14b", "diffusers", norm)) == {"unet:blocks.2.attn2.norm_added_k"}
    assert set(places("wan2.1-i2v-14b", "original", norm)) == {f"unet:{UNET}blocks.2.cross_attn.norm_k_img"}


@pytest.mark.parametrize(
    ("module", "name", "rows", "part"),
    [
        ("double_blocks.0.img_attn.qkv.0", "double_blocks.0.img_attn.qkv", (0, 8), "transformer_blocks.0.attn.to_q"),
        (
            "double_blocks.0.txt_attn.qkv.2",
            "double_blocks.0.txt_attn.qkv",
            (16, 8),
            "transformer_blocks.0.attn.add_v_proj",
        ),
        ("single_blocks.0.linear1.0", "single_blocks.0.linear1", (0, 8), "single_transformer_blocks.0.attn.to_q"),
        ("single_blocks.0.linear1.3", "single_blocks.0.linear1", (24, 32), "single_transformer_blocks.0.proj_mlp"),
        ("double_blocks.0.img_mlp.0", "double_blocks.0.img_mlp.0", (0, 32), "transformer_blocks.0.ff.net.0.proj"),
        ("double_blocks.0.txt_mlp.2", "double_blocks.0.txt_mlp.2", (0, 8), "transformer_blocks.0.ff_context.net.2"),
    ],
)
def test_a_last_number_is_a_row_part_or_a_layer(module: str, name: str, rows: tuple[int, int], part: str) -> None:
    fused, split = small("flux1-dev", "original"), small("flux1-dev")
    into = fused[f"{name}.weight"].shape[1]
    pair = lora(f"transformer.{module}", rows[1], into, alpha=2.0)
    expected = torch.zeros_like(fused[f"{name}.weight"])
    expected[rows[0] : sum(rows)] = 2 / 3 * product(pair)
    close(fused.changes(pair)[f"{name}.weight"], expected)
    close(split.changes(pair)[f"{part}.weight"], 2 / 3 * product(pair))


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("naming", NAMINGS)
def test_control_adapters_widen_the_input_and_set_norms(naming: Naming, strength: float) -> None:
    base = small("flux1-dev", naming)
    first = {"diffusers": "x_embedder", "original": "img_in"}[naming]
    norm = {
        "diffusers": "transformer_blocks.0.attn.norm_q.weight",
        "original": "double_blocks.0.img_attn.norm.query_norm.scale",
    }[naming]
    pair, bias, scale = lora("img_in", 8, 12, 6, spelling="peft"), random(1, 8), random(2, 4)
    tensors = pair | {"img_in.lora_B.bias": bias, "double_blocks.0.img_attn.norm.query_norm.scale": scale}
    plan = base.plan(tensors)
    assert any("widened" in warning for warning in plan.report.warnings)
    assert {p.tensor: p.widen for p in plan.placements}[f"{first}.weight"] == (8, 12)
    merged = base.merged(tensors, strength)
    padded = torch.cat([base[f"{first}.weight"], torch.zeros(8, 6, dtype=torch.float64)], 1)
    close(merged[f"{first}.weight"], padded + strength * product(pair))
    close(merged[f"{first}.bias"], base[f"{first}.bias"] + strength * numbers(bias))
    close(merged[norm], numbers(scale))


def test_a_single_number_called_scale_is_the_scale_itself() -> None:
    base, module = small("flux1-dev", "original"), "lora_unet_double_blocks_0_img_attn_proj"
    pair = lora(module, 8, 8, alpha=2.0)
    change = base.changes(pair | {f"{module}.scale": tensor(0.25)})["double_blocks.0.img_attn.proj.weight"]
    close(change, 0.25 * product(pair))


def test_only_the_input_layer_is_widened() -> None:
    base = small("flux1-dev", "original")
    plan = base.plan(lora("double_blocks.0.img_attn.proj", 8, 12, spelling="peft"), strict=False)
    assert not plan.placements
    (finding,) = plan.report.mismatched
    assert (finding.expected, finding.got) == ((8, 8), (8, 12))


def assert_duplicate(base: Base, used_pair: dict[str, Tensor], twice: dict[str, Tensor]) -> None:
    """Assert that one of the two is used completely and the other is reported, in either order of keys."""
    one_pair = base.changes(used_pair)
    for tensors in (used_pair | twice, twice | used_pair):
        plan = base.plan(tensors, strict=False)
        assert {key for finding in plan.report.duplicates for key in finding.keys} == set(twice)
        assert {key for p in plan.placements for key in p.keys} == set(used_pair)
        assert plan.report.placed == len(used_pair)
        changes = base.changes(tensors, strict=False)
        assert set(changes) == set(one_pair)
        assert all(torch.equal(changes[name], one_pair[name]) for name in one_pair)
        with pytest.raises(TargetError, match="duplicates"):
            base.plan(tensors)


@pytest.mark.parametrize("naming", NAMINGS)
def test_fused_and_split_in_one_z_image_file(naming: Naming) -> None:
    """Files like "Anime-Z": the split set stays, the fused one is the duplicate."""
    block = "diffusion_model.layers.0.attention"
    fused = lora(f"{block}.qkv", 24, 8, spelling="dotted") | lora(f"{block}.out", 8, 8, spelling="dotted")
    split = {k: t for leaf in "qkv" for k, t in lora(f"{block}.to.{leaf}", 8, 8, spelling="dotted").items()}
    split |= lora(f"{block}.to_out.0", 8, 8, spelling="dotted")
    assert_duplicate(small("z-image-turbo", naming), split, fused)


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            ("unet.down_blocks.1.attentions.0.proj_in", "peft"),
            ("lora_unet_down_blocks_1_attentions_0_proj_in", "kohya"),
        ),
        (("lora_unet_input_blocks_4_1_proj_in", "kohya"), ("lora_unet_down_blocks_1_attentions_0_proj_in", "kohya")),
        (("unet.down_blocks.1.attentions.0.proj_in", "peft"), ("unet.down_blocks.1.attentions.0.proj_in", "dotted")),
    ],
)
def test_one_layer_in_two_dialects(one: tuple[str, str], other: tuple[str, str], naming: Naming) -> None:
    """peft and kohya, sgm and diffusers names, two suffixes for one module: used once, never added twice."""
    base = known("sdxl", naming)
    pairs = [lora(module, 640, 640, spelling=spelling, seed=n) for n, (module, spelling) in enumerate((one, other))]
    plan = base.plan(pairs[0] | pairs[1], strict=False)
    used = {key for placement in plan.placements for key in placement.keys}
    used_pair, twice = pairs if used == set(pairs[0]) else pairs[::-1]
    assert used == set(used_pair)
    assert {key for finding in plan.report.duplicates for key in finding.keys} == set(twice)
    (change,) = base.changes(pairs[0] | pairs[1], strict=False).values()
    close(change, product(used_pair))
    with pytest.raises(TargetError, match="duplicates"):
        base.plan(pairs[0] | pairs[1])


def test_wan_exchanges_norm2_and_norm3() -> None:
    block = "diffusion_model.blocks.2"
    native = {f"{block}.norm3.diff": random(1, 5120), f"{block}.norm3.diff_b": random(2, 5120)}
    for naming, name in zip(NAMINGS, ("blocks.2.norm2", f"{UNET}blocks.2.norm3"), strict=True):
        changes = known("wan2.1-t2v-14b", naming).changes(native)
        close(changes[f"{name}.weight"], numbers(native[f"{block}.norm3.diff"]))
        close(changes[f"{name}.bias"], numbers(native[f"{block}.norm3.diff_b"]))
    renamed = {key.replace("norm3", "norm2"): result for key, result in native.items()}
    assert {p.tensor for p in known("wan2.1-t2v-14b", "original").plan(renamed).placements} == {
        f"{UNET}blocks.2.norm3.weight", f"{UNET}blocks.2.norm3.bias",
    }  # fmt: skip


@pytest.mark.parametrize("key_naming", NAMINGS)
@pytest.mark.parametrize("naming", NAMINGS)
def test_where_both_norms_exist_the_other_names_decide(naming: Naming, key_naming: str) -> None:
    leaves = {"diffusers": ("attn1.to_q", "attn1.to_k"), "original": ("self_attn.q", "self_attn.k")}
    shapes = {f"blocks.0.{leaf}.weight": (8, 8) for leaf in leaves[naming]}
    base = torch_base(shapes | {f"blocks.0.{norm}.weight": (8,) for norm in ("norm2", "norm3")})
    norms = {f"diffusion_model.blocks.0.norm{n}.diff": random(n, 8) for n in (2, 3)}
    changes = base.changes(lora(f"diffusion_model.blocks.0.{leaves[key_naming][0]}", 8, 8) | norms)
    for n in (2, 3):
        there = n if naming == key_naming else 5 - n
        close(changes[f"blocks.0.norm{there}.weight"], numbers(norms[f"diffusion_model.blocks.0.norm{n}.diff"]))


def test_lumina_fuses_unequal_parts() -> None:
    fused = lora("lora_unet_layers_3_attention_qkv", 3840, 2304, empty=True)
    result = places("lumina2", "diffusers", fused)
    rows = {name.rpartition("_")[2]: placement.source for name, placement in result.items()}
    assert rows == {"q": (0, 2304), "k": (2304, 768), "v": (3072, 768)}
    for leaf, place in rows.items():
        split = lora(f"transformer.layers.3.attn.to_{leaf}", place[1], 2304, spelling="peft", empty=True)
        ((name, placement),) = places("lumina2", "original", split).items()
        assert (name, placement.target) == (f"unet:{UNET}layers.3.attention.qkv", place)
    pair = lora("lora_unet_layers_0_attention_qkv", 20, 12, alpha=2.0)
    changes = small("lumina2").changes(pair)
    stacked = torch.cat([changes[f"layers.0.attn.to_{leaf}.weight"] for leaf in "qkv"])
    close(stacked, 2 / 3 * product(pair))
    assert [len(changes[f"layers.0.attn.to_{leaf}.weight"]) for leaf in "qkv"] == [12, 4, 4]


@pytest.mark.parametrize("naming", NAMINGS)
def test_differences_of_norms_and_heads_are_applied(naming: Naming) -> None:
    base = small("wan2.1-i2v-14b", naming)
    homes = {
        "head.head.diff": ("proj_out.weight", "head.head.weight"),
        "head.head.diff_b": ("proj_out.bias", "head.head.bias"),
        "patch_embedding.diff": ("patch_embedding.weight", "patch_embedding.weight"),
        "blocks.0.norm3.diff": ("blocks.0.norm2.weight", "blocks.0.norm3.weight"),
        "blocks.0.norm3.diff_b": ("blocks.0.norm2.bias", "blocks.0.norm3.bias"),
        "blocks.0.self_attn.norm_q.diff": ("blocks.0.attn1.norm_q.weight", "blocks.0.self_attn.norm_q.weight"),
        "blocks.0.modulation.diff": ("blocks.0.scale_shift_table", "blocks.0.modulation"),
        "img_emb.proj.0.diff": ("condition_embedder.image_embedder.norm1.weight", "img_emb.proj.0.weight"),
        "blocks.0.ffn.0.diff_b": ("blocks.0.ffn.net.0.proj.bias", "blocks.0.ffn.0.bias"),
    }
    names = {key: pair[NAMINGS.index(naming)] for key, pair in homes.items()}
    tensors = {f"diffusion_model.{key}": random(n, *base[name].shape) for n, (key, name) in enumerate(names.items())}
    changes = base.changes(tensors, 0.5)
    assert set(changes) == set(names.values())
    for key, name in names.items():
        close(changes[name], 0.5 * numbers(tensors[f"diffusion_model.{key}"]))


@pytest.mark.parametrize("naming", NAMINGS)
def test_norm_changes_with_and_without_a_bias(naming: Naming) -> None:
    block = "lora_unet_down_blocks_0_resnets_0"
    tensors = {
        f"{block}_norm1.w_norm": random(1, 320),
        f"{block}_norm1.b_norm": random(2, 320),
        f"{block}_norm2.w_norm": random(3, 320),
    }
    changes = known("sd1.5", naming).changes(tensors)
    assert len(changes) == 3
    assert sorted(float(change.sum()) for change in changes.values()) == pytest.approx(
        sorted(float(numbers(t).sum()) for t in tensors.values())
    )


def test_a_bias_the_base_lacks_is_created_and_reported() -> None:
    base = small("z-image-turbo", "original")
    tensors = {"diffusion_model.layers.0.attention.qkv.diff_b": random(1, 24)}
    assert any("created" in warning for warning in base.plan(tensors).report.warnings)
    merged = base.merged(tensors)
    close(merged["layers.0.attention.qkv.bias"], numbers(tensors["diffusion_model.layers.0.attention.qkv.diff_b"]))
    parts = small("z-image-turbo").merged(tensors)
    whole = torch.cat([parts[f"layers.0.attention.to_{leaf}.bias"] for leaf in "qkv"])
    close(whole, merged["layers.0.attention.qkv.bias"])


@pytest.mark.parametrize("root", ["", "text_model."])
def test_clip_names_with_and_without_text_model(root: str) -> None:
    """transformers 5 drops the root in memory; files on disk keep it."""
    name = "encoder.layers.3.mlp.fc1"
    for base, component in (("sd1.5", "te1"), ("sdxl", "te2")):
        out, into = shape_of(base, f"{component}:text_model.{name}")
        for module in (f"text_encoder{'_2' if component == 'te2' else ''}.{root}{name}",
                       f"lora_{component}_{root}{name}".replace(".", "_")):  # fmt: skip
            result = places(base, "diffusers", lora(module, out, into, empty=True))
            assert set(result) == {f"{component}:text_model.{name}"}


@pytest.mark.parametrize(
    "module", ["text_encoder.text_model.encoder.layers.0.mlp.fc1", "lora_te_text_model_encoder_layers_0_mlp_fc1"]
)
def test_a_base_in_memory_without_text_model(module: str) -> None:
    layers = {
        f"encoder.layers.{n}.mlp.fc{k}.weight": shape for n in range(2) for k, shape in ((1, (6, 4)), (2, (4, 6)))
    }
    base = torch_base(layers | {"embeddings.token_embedding.weight": (9, 4), "final_layer_norm.weight": (4,)})
    pair = lora(module, 6, 4, alpha=2.0)
    close(base.changes(pair)["encoder.layers.0.mlp.fc1.weight"], 2 / 3 * product(pair))


def test_a_rank_larger_than_the_layer() -> None:
    assert set(places("flux1-dev", "original", lora("lora_unet_img_in", 3072, 64, 128, empty=True))) == {
        f"unet:{UNET}img_in"
    }
    base = torch_base({"net.proj.weight": (6, 5)})
    pair = lora("lora_unet_net_proj", 6, 5, 16, alpha=4.0)
    close(base.changes(pair)["net.proj.weight"], 4 / 16 * product(pair))
