"""Every dialect of sections 3 and 7 of the format notes: one small test each, to the exact module it addresses."""

from __future__ import annotations

import json

import pytest
import torch

import inweave
from inweave.adapter import Tensor
from inweave.errors import FormatError, TargetError
from inweave.exchange.load import load
from inweave.formats.grammar import locate
from inweave.formats.read import read
from inweave.targets.bases import known_index
from tests.golden.weave import close, known, lands, lora, numbers, places, product, shape_of, small
from tests.support import DATA, hollow, lora_listing, random, tensor

SINGLE = "unet:model.diffusion_model."
ATTN = "transformer_blocks.0.attn1.to_q"
TEXT = "text_model.encoder.layers.5.self_attn.q_proj"
FLAT_TEXT = TEXT.replace(".", "_")
T5 = "encoder.block.9.layer.1.DenseReluDense.wi_0"
Q, K, V = (f"unet:transformer_blocks.3.attn.to_{leaf}" for leaf in "qkv")
OUT = "unet:transformer_blocks.3.attn.to_out.0"
QKV, PROJ = "double_blocks.3.img_attn.qkv", "double_blocks.3.img_attn.proj"
LINEAR1 = [f"unet:single_transformer_blocks.3.{leaf}" for leaf in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]


# kohya and its relatives: flat names


def test_kohya_sd1() -> None:
    lands("sd1.5", f"lora_unet_down_blocks_1_attentions_0_{ATTN.replace('.', '_')}",
          f"unet:down_blocks.1.attentions.0.{ATTN}", f"{SINGLE}input_blocks.4.1.{ATTN}", dialect="kohya")  # fmt: skip
    lands("sd1.5", f"lora_te_{FLAT_TEXT}", f"te1:{TEXT}", f"te1:cond_stage_model.transformer.{TEXT}", dialect="kohya")


def test_kohya_sd2() -> None:
    lands("sd2.1", "lora_unet_mid_block_attentions_0_proj_out", "unet:mid_block.attentions.0.proj_out",
          f"{SINGLE}middle_block.1.proj_out")  # fmt: skip
    home = "te1:cond_stage_model.model.transformer.resblocks.5.attn.in_proj_weight"
    lands("sd2.1", f"lora_te_{FLAT_TEXT}", f"te1:{TEXT}", home, (0, 1024))


@pytest.mark.parametrize("block", ["input_blocks.4.1", "down_blocks.1.attentions.0"])
def test_kohya_sdxl_under_sgm_and_diffusers_names(block: str) -> None:
    lands("sdxl", f"lora_unet_{block}.{ATTN}".replace(".", "_"), f"unet:down_blocks.1.attentions.0.{ATTN}",
          f"{SINGLE}input_blocks.4.1.{ATTN}", dialect="kohya")  # fmt: skip


def test_kohya_text_encoders() -> None:
    lands("sdxl", f"lora_te1_{FLAT_TEXT}", f"te1:{TEXT}", f"te1:conditioner.embedders.0.transformer.{TEXT}")
    fused = "te2:conditioner.embedders.1.model.transformer.resblocks.5.attn.in_proj_weight"
    lands("sdxl", f"lora_te2_{FLAT_TEXT}", f"te2:{TEXT}", fused, (0, 1280))
    lands("sd3-medium", f"lora_te3_{T5.replace('.', '_')}", f"te3:{T5}", f"te3:text_encoders.t5xxl.transformer.{T5}")
    lands("flux1-dev", f"lora_te1_{FLAT_TEXT}", f"te1:{TEXT}", f"te1:text_encoders.clip_l.transformer.{TEXT}")
    lands(
        "sd1.5", f"lora_te_wrapped_transformer_{FLAT_TEXT}", f"te1:{TEXT}", f"te1:cond_stage_model.transformer.{TEXT}"
    )


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        ("x_block.attn.qkv", ["attn.to_q", "attn.to_k", "attn.to_v"]),
        ("context_block.attn.qkv", ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]),
        ("x_block.attn2.qkv", ["attn2.to_q", "attn2.to_k", "attn2.to_v"]),
        ("x_block.attn.proj", ["attn.to_out.0"]),
        ("context_block.mlp.fc1", ["ff_context.net.0.proj"]),
        ("x_block.adaLN_modulation.1", ["norm1.linear"]),
    ],
)
def test_kohya_sd3(module: str, parts: list[str]) -> None:
    lands("sd3.5-medium", f"lora_unet_joint_blocks_3_{module.replace('.', '_')}",
          [f"unet:transformer_blocks.3.{part}" for part in parts], f"{SINGLE}joint_blocks.3.{module}")  # fmt: skip


def test_kohya_sd3_top_level() -> None:
    for flat, part, home in (
        ("x_embedder_proj", "pos_embed.proj", "x_embedder.proj"),
        ("context_embedder", "context_embedder", "context_embedder"),
        ("t_embedder_mlp_0", "time_text_embed.timestep_embedder.linear_1", "t_embedder.mlp.0"),
        ("y_embedder_mlp_2", "time_text_embed.text_embedder.linear_2", "y_embedder.mlp.2"),
        ("final_layer_linear", "proj_out", "final_layer.linear"),
    ):
        lands("sd3.5-large", f"lora_unet_{flat}", f"unet:{part}", SINGLE + home)


def test_kohya_flux_is_fused() -> None:
    lands("flux1-dev", "lora_unet_double_blocks_3_img_attn_qkv", [Q, K, V], SINGLE + QKV, dialect="kohya")
    lands("flux1-dev", "lora_unet_single_blocks_3_linear1", LINEAR1, f"{SINGLE}single_blocks.3.linear1")
    lands("flux1-dev", "lora_unet_single_blocks_3_linear2", "unet:single_transformer_blocks.3.proj_out",
          f"{SINGLE}single_blocks.3.linear2")  # fmt: skip
    lands("flux1-dev", "lora_unet_double_blocks_3_txt_mlp_0", "unet:transformer_blocks.3.ff_context.net.0.proj",
          f"{SINGLE}double_blocks.3.txt_mlp.0")  # fmt: skip
    lands("flux1-dev", "lora_unet_guidance_in_in_layer", "unet:time_text_embed.guidance_embedder.linear_1",
          f"{SINGLE}guidance_in.in_layer")  # fmt: skip


def test_flux_on_chroma_leaves_only_the_modulation() -> None:
    fits = lora("lora_unet_double_blocks_3_img_attn_qkv", 9216, 3072, empty=True)
    not_there = lora("lora_unet_double_blocks_3_img_mod_lin", 18432, 3072, empty=True)
    report = known("chroma1-hd").plan(fits | not_there, strict=False).report
    assert report.placed == 2
    assert [set(finding.keys) for finding in report.unplaced] == [set(not_there)]


def test_lycoris_prefix() -> None:
    lands("flux1-dev", "lycoris_transformer_blocks_3_attn_to_q", Q, SINGLE + QKV, (0, 3072), dialect="lycoris")
    lands(
        "sd3.5-large",
        "lycoris_transformer_blocks_3_attn_to_q",
        Q,
        f"{SINGLE}joint_blocks.3.x_block.attn.qkv",
        (0, 2432),
    )
    lands("sdxl", f"lycoris_down_blocks_1_attentions_0_{ATTN.replace('.', '_')}",
          f"unet:down_blocks.1.attentions.0.{ATTN}", dialect="lycoris")  # fmt: skip


def test_lycoris_suffixes_under_kohyas_prefix() -> None:
    flat = "lora_unet_down_blocks_1_attentions_0_proj_in"
    tensors = {f"{flat}.lokr_w1": random(1, 20, 20), f"{flat}.lokr_w2": random(2, 32, 32)}
    adapter = read(tensors)
    assert adapter.dialects == ("lycoris",)
    (change,) = known("sdxl").changes(adapter).values()
    close(change, torch.kron(*map(numbers, tensors.values())))


def test_musubi_wan() -> None:
    for flat, part in (
        ("self_attn_q", "attn1.to_q"),
        ("cross_attn_o", "attn2.to_out.0"),
        ("ffn_0", "ffn.net.0.proj"),
        ("ffn_2", "ffn.net.2"),
    ):
        native = flat.replace("attn_", "attn.").replace("ffn_", "ffn.")
        lands("wan2.1-t2v-14b", f"lora_unet_blocks_0_{flat}", f"unet:blocks.0.{part}", f"{SINGLE}blocks.0.{native}",
              dialect="kohya")  # fmt: skip


def test_two_underscores_after_the_prefix() -> None:
    lands(
        "wan2.1-t2v-14b", "lora_unet__blocks_0_self_attn_q", "unet:blocks.0.attn1.to_q", f"{SINGLE}blocks.0.self_attn.q"
    )
    lands("z-image-turbo", "lora_unet__layers_3_attention_to_q", "unet:layers.3.attention.to_q",
          f"{SINGLE}layers.3.attention.qkv", (0, 3840))  # fmt: skip


def test_onetrainer_old() -> None:
    lands(
        "flux1-dev", "lora_transformer_transformer_blocks_3_attn_to_q", Q, SINGLE + QKV, (0, 3072), dialect="onetrainer"
    )
    lands("flux1-dev", "lora_transformer_single_transformer_blocks_3_proj_mlp", LINEAR1[3],
          f"{SINGLE}single_blocks.3.linear1", (9216, 12288))  # fmt: skip
    lands("flux1-dev", f"lora_te2_{T5.replace('.', '_')}", f"te2:{T5}", f"te2:text_encoders.t5xxl.transformer.{T5}")
    lands(
        "sd3.5-large",
        "lora_transformer_transformer_blocks_3_attn_add_k_proj",
        "unet:transformer_blocks.3.attn.add_k_proj",
        f"{SINGLE}joint_blocks.3.context_block.attn.qkv",
        (2432, 2432),
    )


def test_onetrainer_new() -> None:
    lands("flux1-dev", f"transformer.{QKV}.0", Q, SINGLE + QKV, (0, 3072), dialect="onetrainer")
    lands(
        "flux1-dev",
        "transformer.single_blocks.3.linear1.3",
        LINEAR1[3],
        f"{SINGLE}single_blocks.3.linear1",
        (9216, 12288),
    )
    lands("flux1-dev", "transformer.double_blocks.3.img_mlp.0", "unet:transformer_blocks.3.ff.net.0.proj",
          f"{SINGLE}double_blocks.3.img_mlp.0")  # fmt: skip
    lands("flux1-dev", f"clip_l.{TEXT}", f"te1:{TEXT}")
    lands("flux1-dev", f"t5.{T5}", f"te2:{T5}")
    lands("sdxl", f"unet.input_blocks.4.1.{ATTN}", f"unet:down_blocks.1.attentions.0.{ATTN}")
    lands("sdxl", f"clip_g.{TEXT}", f"te2:{TEXT}")


# diffusers through the years


@pytest.mark.parametrize("prefix", ["", "unet."])
@pytest.mark.parametrize("leaf", ["to_q", "to_k", "to_v", "to_out"])
def test_attention_processors(prefix: str, leaf: str) -> None:
    home = f"unet:down_blocks.1.attentions.0.transformer_blocks.0.attn2.{'to_out.0' if leaf == 'to_out' else leaf}"
    module = f"{prefix}down_blocks.1.attentions.0.transformer_blocks.0.attn2.processor.{leaf}_lora"
    lands("sd1.5", module, home, spelling="leaf", dialect="diffusers-attn-procs")


@pytest.mark.parametrize(
    ("leaf", "home"), [("to_q", "q_proj"), ("to_k", "k_proj"), ("to_v", "v_proj"), ("to_out", "out_proj")]
)
def test_attention_processors_of_the_text_encoder(leaf: str, home: str) -> None:
    layer = "text_model.encoder.layers.5.self_attn"
    lands(
        "sd1.5",
        f"text_encoder.{layer}.{leaf}_lora",
        f"te1:{layer}.{home}",
        spelling="leaf",
        dialect="diffusers-attn-procs",
    )


def test_lora_linear_layers() -> None:
    home = f"unet:down_blocks.1.attentions.0.{ATTN}"
    lands("sd1.5", f"unet.{home[5:]}", home, spelling="dotted", dialect="diffusers")
    lands("sd1.5", f"unet.{home[5:]}".replace("to_q", "to_out.0"), home.replace("to_q", "to_out.0"), spelling="dotted")
    lands("sd1.5", f"text_encoder.{TEXT}", f"te1:{TEXT}", spelling="linear", dialect="diffusers")
    lands("sdxl", f"text_encoder_2.{TEXT}", f"te2:{TEXT}", spelling="linear")
    lands("flux1-dev", "transformer.transformer_blocks.3.attn.to_q", Q, spelling="dotted", dialect="diffusers")


def test_diffusers_peft() -> None:
    home = f"unet:down_blocks.1.attentions.0.{ATTN}"
    lands(
        "sdxl", f"unet.{home[5:]}", home, f"{SINGLE}input_blocks.4.1.{ATTN}", spelling="peft", dialect="diffusers-peft"
    )
    lands("sdxl", home[5:], home, spelling="peft", dialect="diffusers-peft")
    lands("flux1-dev", f"transformer.{Q[5:]}", Q, SINGLE + QKV, (0, 3072), spelling="peft", dialect="diffusers-peft")
    lands("sdxl", f"text_encoder_2.{TEXT}", f"te2:{TEXT}", spelling="peft", dialect="diffusers-peft")


def test_diffusers_to_kohya_exports_flatten_only_half() -> None:
    """Their DoRA keys keep the last dots: everything before the suffix is flattened again."""
    block = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1"
    tensors: dict[str, Tensor] = {}
    for n, (flat, half) in enumerate((("_to_k", ".to_k"), ("_to_out_0", "_to_out.0"))):
        tensors |= lora(block + flat, 640, 640, alpha=2.0)
        tensors[f"{block}{half}.lora_magnitude_vector"] = random(n, 640)
    adapter = read(tensors)
    assert not adapter.problems
    assert adapter.algorithms == ("dora",)
    stem = "unet:down_blocks.1.attentions.0.transformer_blocks.0.attn1"
    assert set(places("sdxl", "diffusers", adapter)) == {f"{stem}.to_k", f"{stem}.to_out.0"}


def test_doubled_prefix() -> None:
    """timohavdk_new.safetensors: `lora_unet_unet_` and a flattened suffix."""
    flat = f"lora_unet_unet_down_blocks_1_attentions_0_{ATTN.replace('.', '_')}"
    pair = {key.replace(".lora_", "_lora_"): value for key, value in lora(flat, 640, 640, empty=True).items()}
    assert set(places("sd2.1", "diffusers", pair)) == {f"unet:down_blocks.1.attentions.0.{ATTN}"}


def test_a_prefix_cut_too_long() -> None:
    lands("flux1-dev", "sformer_blocks.3.attn.to_q", Q, SINGLE + QKV, (0, 3072), spelling="peft")


# PEFT and wrappers


@pytest.mark.parametrize(
    ("base", "prefix", "module", "home"),
    [
        ("sdxl", "base_model.model.", f"down_blocks.1.attentions.0.{ATTN}", f"unet:down_blocks.1.attentions.0.{ATTN}"),
        (
            "sdxl",
            "base_model.model.unet.",
            f"down_blocks.1.attentions.0.{ATTN}",
            f"unet:down_blocks.1.attentions.0.{ATTN}",
        ),
        (
            "sdxl",
            "unet.base_model.model.",
            f"down_blocks.1.attentions.0.{ATTN}",
            f"unet:down_blocks.1.attentions.0.{ATTN}",
        ),
        ("sd1.5", "base_model.model.text_encoder.", TEXT, f"te1:{TEXT}"),
        ("sd1.5", "text_encoder.base_model.model.", TEXT, f"te1:{TEXT}"),
        ("sd1.5", "base_model.model.", TEXT, f"te1:{TEXT}"),
        ("sd3-medium", "base_model.model.", Q[5:], Q),
        ("flux1-dev", "base_model.model.", Q[5:], Q),
        ("flux1-dev", "base_model.model.transformer.", Q[5:], Q),
        ("flux1-dev", "transformer.base_model.model.", Q[5:], Q),
        ("flux1-dev", "base_model.model.", PROJ, OUT),
        ("flux1-dev", "base_model.model.diffusion_model.", PROJ, OUT),
        ("flux1-dev", "base_model.model.transformer.diffusion_model.", PROJ, OUT),
        ("flux1-dev", "transformer.diffusion_model.", PROJ, OUT),
        ("flux1-dev", "model.diffusion_model.", PROJ, OUT),
        ("flux1-dev", "conditional_transformer.", Q[5:], Q),
        ("sdxl", "model.diffusion_model.", f"input_blocks.4.1.{ATTN}", f"unet:down_blocks.1.attentions.0.{ATTN}"),
    ],
)
def test_wrappers(base: str, prefix: str, module: str, home: str) -> None:
    lands(base, prefix + module, home, spelling="peft", dialect="peft" if "base_model" in prefix else None)


@pytest.mark.parametrize(
    ("module_key", "component"),
    [
        ("lora_prior_unet_down_blocks_0", "unet"),
        ("lora_prior_te_text_model_encoder", "te"),
        ("oft_unet_down_blocks_0", "unet"),
        ("oft_te_text_model_encoder", "te"),
        ("text_encoders.clip_h.transformer.text_model.encoder", "te1"),
        ("text_encoders.qwen3_4b.transformer.model.layers", "te"),
        ("text_encoders.gemma2_2b.transformer.model.layers", "te"),
    ],
)
def test_components_without_a_shipped_base(module_key: str, component: str) -> None:
    assert locate(module_key)[0].component == component


def test_peft_bare_suffix_without_weight() -> None:
    """Mochi's `lora_A` and `lora_B`."""
    lands("flux1-dev", f"transformer.{Q[5:]}", Q, spelling="bare")


def test_diffsynth_adapter_name() -> None:
    lands("qwen-image", "transformer_blocks.3.attn.to_q", Q, SINGLE + Q[5:], spelling="named", dialect="diffsynth")
    lands(
        "qwen-image",
        "transformer_blocks.3.img_mlp.net.0.proj",
        "unet:transformer_blocks.3.img_mlp.net.0.proj",
        spelling="named",
    )


def test_two_adapter_names_in_one_file() -> None:
    pair = lora("transformer_blocks.3.attn.to_q", 3072, 3072, spelling="named", empty=True)
    both = pair | {key.replace("default", "style"): value for key, value in pair.items()}
    with pytest.raises(FormatError, match="default, style"):
        read(both)
    chosen = read(both, name="style")
    assert [entry.keys for entry in chosen] == [tuple(k for k in both if "style" in k)]
    assert not chosen.problems
    assert set(places("qwen-image", "diffusers", chosen)) == {Q}


# the original names: ComfyUI, ai-toolkit, BFL, XLabs


@pytest.mark.parametrize("spelling", ["peft", "kohya"])
def test_comfy_and_ai_toolkit(spelling: str) -> None:
    lands("flux1-dev", f"diffusion_model.{QKV}", [Q, K, V], SINGLE + QKV, spelling=spelling, dialect="comfy")
    lands(
        "flux1-dev",
        "diffusion_model.single_blocks.3.linear1",
        LINEAR1,
        f"{SINGLE}single_blocks.3.linear1",
        spelling=spelling,
    )
    for base, module in (
        ("qwen-image", "transformer_blocks.3.attn.add_v_proj"),
        ("z-image-turbo", "layers.3.attention.to_k"),
        ("z-image-turbo", "layers.3.feed_forward.w2"),
        ("chroma1-hd", "transformer_blocks.3.attn.to_q"),
    ):
        lands(base, f"diffusion_model.{module}", f"unet:{module}", spelling=spelling, dialect="comfy")
    lands("wan2.1-t2v-14b", "diffusion_model.blocks.3.cross_attn.k", "unet:blocks.3.attn2.to_k",
          f"{SINGLE}blocks.3.cross_attn.k", spelling=spelling)  # fmt: skip
    lands("chroma1-hd", "diffusion_model.distilled_guidance_layer.layers.2.in_layer",
          "unet:distilled_guidance_layer.layers.2.linear_1", spelling=spelling)  # fmt: skip
    lands("flux2-dev", "diffusion_model.single_blocks.3.linear1",
          "unet:single_transformer_blocks.3.attn.to_qkv_mlp_proj", spelling=spelling)  # fmt: skip


def test_comfy_text_encoders_differences_and_replacements() -> None:
    lands("sd3-medium", f"text_encoders.clip_g.transformer.{TEXT}", f"te2:{TEXT}", dialect="comfy")
    lands("sdxl", f"text_encoders.clip_l.transformer.{TEXT}", f"te1:{TEXT}", dialect="comfy")
    lands("sd2.1", f"text_encoders.clip_h.transformer.{TEXT}", f"te1:{TEXT}", dialect="comfy")
    base = small("flux1-dev", "original")
    tensors = {
        "diffusion_model.double_blocks.0.img_attn.proj.diff": random(1, 8, 8),
        "diffusion_model.double_blocks.0.img_attn.proj.diff_b": random(2, 8),
        "diffusion_model.double_blocks.0.txt_attn.proj.set_weight": random(3, 8, 8),
    }
    merged = base.merged(tensors, 0.5)
    name = "double_blocks.0.img_attn.proj."
    close(merged[f"{name}weight"], base[f"{name}weight"] + 0.5 * numbers(tensors[f"diffusion_model.{name}diff"]))
    close(merged[f"{name}bias"], base[f"{name}bias"] + 0.5 * numbers(tensors[f"diffusion_model.{name}diff_b"]))
    name = "double_blocks.0.txt_attn.proj."
    close(merged[f"{name}weight"], numbers(tensors[f"diffusion_model.{name}set_weight"]))


def test_comfy_reshape_weight_widens() -> None:
    base, module = small("flux1-dev", "original"), "diffusion_model.img_in"
    pair = lora(module, 8, 12)
    merged = base.merged(pair | {f"{module}.reshape_weight": tensor([8, 12], "I64")})
    wide = torch.cat([base["img_in.weight"], torch.zeros(8, 6, dtype=torch.float64)], 1)
    close(merged["img_in.weight"], wide + product(pair))


def test_bfl_native_and_control() -> None:
    lands("flux1-dev", QKV, [Q, K, V], SINGLE + QKV, spelling="peft", dialect="bfl")
    lands(
        "flux1-dev",
        "final_layer.linear",
        "unet:proj_out",
        f"{SINGLE}final_layer.linear",
        spelling="peft",
        dialect="bfl",
    )
    listing = lora_listing("invokeai_flux_control_lora_format")["tensors"]
    adapter = read({key: hollow(shape, dtype) for key, (dtype, shape) in listing.items()})  # type: ignore[attr-defined]
    assert adapter.dialects == ("bfl",)
    plan = known("flux1-dev", "original").plan(adapter)
    value = {p.tensor: p for p in plan.placements}
    assert value["model.diffusion_model.img_in.weight"].widen == (3072, 128)
    scale = value["model.diffusion_model.double_blocks.0.img_attn.norm.query_norm.scale"].factors
    assert scale.mode == "set"  # type: ignore[attr-defined]
    assert value["model.diffusion_model.img_in.bias"].factors.scale == 1


def test_xlabs() -> None:
    block = "double_blocks.3.processor"
    lands("flux1-dev", f"{block}.qkv_lora1", [Q, K, V], SINGLE + QKV, spelling="leaf", dialect="xlabs")
    added = [f"unet:transformer_blocks.3.attn.add_{leaf}_proj" for leaf in "qkv"]
    lands("flux1-dev", f"{block}.qkv_lora2", added, f"{SINGLE}double_blocks.3.txt_attn.qkv", spelling="leaf")
    lands("flux1-dev", f"{block}.proj_lora1", OUT, SINGLE + PROJ, spelling="leaf")
    lands("flux1-dev", f"{block}.proj_lora2", "unet:transformer_blocks.3.attn.to_add_out",
          f"{SINGLE}double_blocks.3.txt_attn.proj", spelling="leaf")  # fmt: skip


def test_xlabs_single_blocks() -> None:
    block = "single_blocks.3.processor"
    home = f"{SINGLE}single_blocks.3.linear1"
    lands("flux1-dev", f"{block}.qkv_lora", LINEAR1[:3], home, (0, 9216), spelling="leaf", dialect="xlabs")
    lands("flux1-dev", f"{block}.proj_lora", "unet:single_transformer_blocks.3.proj_out",
          f"{SINGLE}single_blocks.3.linear2", spelling="leaf")  # fmt: skip


# HCP, cloneofsimo, SAM


@pytest.mark.parametrize("suffixes", [("W_down", "W_up"), ("lora_down.weight", "lora_up.weight")])
def test_hcp(suffixes: tuple[str, str]) -> None:
    module = f"down_blocks.1.attentions.0.{ATTN}"
    down, up = random(1, 3, 640), random(2, 640, 3)
    tensors = {f"{module}.___.layer.{name}": value for name, value in zip(suffixes, (down, up), strict=True)}
    adapter = read(tensors | {f"{module}.___.alpha": tensor(2.0)})
    assert adapter.dialects == ("hcp",)
    close(known("sdxl").changes(adapter)[f"{module}.weight"], 2 / 3 * numbers(up) @ numbers(down))


def test_hcp_text_encoders() -> None:
    lands("sdxl", f"clip_B.{TEXT}", f"te1:{TEXT}", spelling="hcp", dialect="hcp")
    lands("sdxl", f"clip_bigG.{TEXT}", f"te2:{TEXT}", spelling="hcp", dialect="hcp")


def listed(prefix: str, order: list[tuple[str, str]], rank: int = 2) -> dict[str, Tensor]:
    """A numbered list with the shapes of these modules of SD 1.5 ("component:module")."""
    tensors: dict[str, Tensor] = {}
    for number, (component, module) in enumerate(order):
        out, into, *kernel = shape_of("sd1.5", f"{component}:{module}")
        tensors[f"{prefix}:{number}:down"] = hollow((rank, into, *kernel))
        tensors[f"{prefix}:{number}:up"] = hollow((out, rank, *(1 for _ in kernel)))
    return tensors


def test_cloneofsimo_plain_list() -> None:
    order = json.loads((DATA / "keymaps" / "cloneofsimo_sd15_index_order.json").read_text())
    unet, text = [("unet", name) for name in order["unet"]], [("te1", name) for name in order["text_encoder"]]
    adapter = read(listed("unet", unet) | listed("text_encoder", text) | {"<s1>": random(1, 768)}, {"<s1>": "<embed>"})
    assert adapter.dialects == ("cloneofsimo",)
    assert list(adapter.carried) == ["<s1>"]
    plan = known("sd1.5").plan(adapter)
    value = {p.keys[0].rpartition(":")[0]: f"{p.component}:{p.tensor}" for p in plan.placements}
    assert len(value) == len(unet) + len(text) == 144 + 48
    for prefix, modules in (("unet", unet), ("text_encoder", text)):
        for number, (component, module) in enumerate(modules):
            assert value[f"{prefix}:{number}"] == f"{component}:{module}.weight"


@pytest.mark.parametrize("name", ["cloneofsimo_lora_disney", "cloneofsimo_analog_svd_rank4"])
def test_cloneofsimo_real_files_have_scale_one(name: str) -> None:
    adapter = load(DATA / "files" / f"{name}.safetensors")
    plan = known("sd1.5", "original").plan(adapter)
    assert len(plan.placements) == len(adapter.entries)
    assert {entry.factors.scale for entry in adapter} == {1.0}


@pytest.mark.parametrize("recorded", [True, False])
def test_cloneofsimo_extended_list(recorded: bool) -> None:
    """With ResnetBlock2D among the classes each block's convolutions follow its attentions."""
    block = "down_blocks.0"
    order = [
        f"{block}.attentions.{a}.transformer_blocks.0.{leaf}"
        for a in (0, 1)
        for leaf in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ff.net.0.proj",
                     "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0")
    ]  # fmt: skip
    order += [f"{block}.resnets.{r}.{leaf}" for r in (0, 1) for leaf in ("conv1", "time_emb_proj", "conv2")]
    order += ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"]
    metadata = {"unet": json.dumps(["CrossAttention", "GEGLU", "ResnetBlock2D"])} if recorded else {}
    adapter = read(listed("unet", [("unet", name) for name in order]), metadata)
    assert [p.tensor for p in known("sd1.5").plan(adapter).placements] == [f"{name}.weight" for name in order]


def test_sam_lists_are_no_diffusion_adapter() -> None:
    adapter = read({f"w_{side}_{n:03}": random(n, 2, 4) for n in range(4) for side in "ab"})
    assert not adapter.entries
    assert "not a diffusion adapter" in adapter.problems[0].reason
    verdict = inweave.check(adapter, "sd1.5")
    assert not verdict.ok
    assert "not a diffusion adapter" in str(verdict.error)
    with pytest.raises(TargetError, match="not a diffusion adapter"):
        inweave.resolve(adapter, known_index("sd1.5"))
