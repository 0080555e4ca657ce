"""Several dialects or adapters in one file, tensors that only travel along, and files that are something else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import inweave
from inweave.errors import FormatError
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.resolve import resolve
from tests.golden.weave import known, lora, places
from tests.support import DATA, base_listing, dotted_pair, hollow, lora_pair, random, write

TEXT = "text_model.encoder.layers.5.self_attn.q_proj"
FLAT_TEXT = TEXT.replace(".", "_")


def test_mixed_dialects_in_one_file() -> None:
    attention = "down_blocks.1.attentions.0.transformer_blocks.0"
    flat = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
    tensors = (
        lora(f"unet.{attention}.attn1.to_k", 640, 640, 2, spelling="peft")
        | lora(f"unet.{attention}.attn1.to_v", 640, 640, 3, spelling="dotted")
        | lora(flat, 640, 640, 4, alpha=2.0)
        | lora(f"{attention}.attn1.processor.to_out_lora", 640, 640, spelling="leaf")
        | {f"lycoris_{attention.replace('.', '_')}_attn2_to_q.diff": random(1, 640, 640)}
        | {"lora_unet_conv_in.hada_w1_a": random(1, 320, 2), "lora_unet_conv_in.hada_w1_b": random(2, 2, 36)}
        | {"lora_unet_conv_in.hada_w2_a": random(3, 320, 2), "lora_unet_conv_in.hada_w2_b": random(4, 2, 36)}
        | lora(f"text_encoder.{TEXT}", 768, 768, spelling="linear")
        | lora(f"lora_te2_{FLAT_TEXT}", 1280, 1280)
    )
    adapter = read(tensors)
    assert not adapter.problems
    for naming in ("diffusers", "original"):
        report = known("sdxl", naming).plan(adapter).report
        assert report.placed == len(tensors)
    assert set(places("sdxl", "diffusers", adapter)) == {
        *(
            f"unet:{attention}.{leaf}"
            for leaf in ("attn1.to_k", "attn1.to_v", "attn1.to_q", "attn1.to_out.0", "attn2.to_q")
        ),
        "unet:conv_in",
        f"te1:{TEXT}",
        f"te2:{TEXT}",
    }


def test_two_suffixes_in_one_flux2_file() -> None:
    one = lora("diffusion_model.double_blocks.3.img_attn.proj", 6144, 6144, spelling="peft", empty=True)
    two = lora("diffusion_model.double_blocks.3.txt_attn.proj", 6144, 6144, spelling="dotted", empty=True)
    assert set(places("flux2-dev", "diffusers", one | two)) == {
        "unet:transformer_blocks.3.attn.to_out.0",
        "unet:transformer_blocks.3.attn.to_add_out",
    }


@pytest.mark.parametrize("root", ["controlnet", "vae.encoder", "image_proj"])
def test_an_unknown_root_is_not_dropped(root: str) -> None:
    """Only known wrappers are: an adapter of another network must not land in the denoiser."""
    pair = lora(f"{root}.down_blocks.1.attentions.0.proj_in", 640, 640, spelling="peft", empty=True)
    plan = known("sdxl").plan(pair, strict=False)
    assert not plan.placements
    assert [set(finding.keys) for finding in plan.report.unplaced] == [set(pair)]


def test_passengers_are_carried() -> None:
    passengers = {
        "bundle_emb.sks.string_to_param.*": random(1, 2, 768),
        "bundle_emb.style.clip_l": random(2, 2, 768),
        "bundle_emb.style.clip_g": random(3, 2, 1280),
        "<s1>": random(4, 768),
        "_aux.slider.weight": random(5, 3),
        "emb_params": random(6, 1, 768),
        "trainable_tokens.weight": random(7, 2, 768),
    }
    pair = lora(f"lora_te1_{FLAT_TEXT}", 768, 768)
    adapter = read(pair | passengers, {"<s1>": "<embed>"})
    assert set(adapter.carried) == set(passengers)
    report = known("sdxl").plan(adapter).report
    assert (report.placed, report.carried, report.tensors) == (2, 7, 9)
    assert report.clean


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {
                "lora_controlnet": (),
                "input_blocks.1.0.in_layers.2.down": (8, 320, 3, 3),
                "input_blocks.1.0.in_layers.2.up": (320, 8, 1, 1),
            },
            "Control-LoRA",
        ),
        ({"lllite_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q.down.0.weight": (4, 640)}, "LLLite"),
        ({"emb_params": (4, 768)}, "textual-inversion"),
        ({"clip_l": (4, 768), "clip_g": (4, 1280)}, "textual-inversion"),
    ],
)
def test_other_kinds_of_file_are_refused_by_name(tensors: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read({name: hollow(shape) for name, shape in tensors.items()})


def test_t_lora_is_refused_by_name() -> None:
    module = "lora_unet_down_blocks_1_attentions_0_proj_in"
    roles = {"q_layer.weight": (4, 640), "p_layer.weight": (640, 4), "lambda_layer": (1, 4), "alpha": ()}
    adapter = read({f"{module}.{role}": hollow(shape) for role, shape in roles.items()})
    assert not adapter.entries
    verdict = inweave.check(adapter, "sdxl", values="none")
    assert not verdict.ok
    assert "T-LoRA" in str(verdict.error)
    report = known("sdxl").plan(adapter, strict=False).report
    assert {key for finding in report.unsupported for key in finding.keys} == {f"{module}.{role}" for role in roles}


@pytest.mark.parametrize("name", sorted(path.stem for path in (DATA / "base").glob("*.json")))
def test_checkpoints_are_refused(name: str) -> None:
    names = {key: hollow(shape) for key, shape in base_listing(name).items()}
    for extra in ({}, {"model_ema.decay": hollow(()), "alphas_cumprod": hollow((1000,))}):
        with pytest.raises(FormatError, match="checkpoint"):
            read(names | extra)


@pytest.mark.parametrize("base", ["sd1.5", "sdxl", "sd3.5-medium", "flux1-dev", "wan2.1-t2v-1.3b", "clip-l", "t5-xxl"])
def test_networks_in_diffusers_names_are_refused(base: str) -> None:
    first = next(iter(known_index(base)))
    with pytest.raises(FormatError, match="checkpoint"):
        read({key: hollow(shape) for key, shape in first.tensors.items()})


def test_duplicates_do_not_depend_on_the_order_of_keys_and_never_mix() -> None:
    module = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    one = {f"unet.{module}.lora_A.weight": random(1, 4, 320), f"unet.{module}.lora_B.weight": random(2, 320, 4)}
    two = {f"unet.{module}.lora.down.weight": random(3, 4, 320), f"unet.{module}.lora.up.weight": random(4, 320, 4)}
    flat = lora_pair(f"lora_unet_{module.replace('.', '_')}", 320, 320, seed=9)
    for other in (two, flat):
        used = set()
        for order in itertools.permutations(one | other):
            plan = resolve(read({key: (one | other)[key] for key in order}), known_index("sd1.5"), strict=False)
            used.add(frozenset(key for placement in plan.placements for key in placement.keys))
        assert len(used) == 1
        assert next(iter(used)) in (frozenset(one), frozenset(other))


def test_two_names_in_one_file_can_be_inspected(tmp_path: Path) -> None:
    from tests.e2e.test_commands import inweave as run

    tensors = {
        key.replace(".weight", f".{name}.weight"): t
        for name in ("a", "b")
        for key, t in dotted_pair("transformer.x_embedder", 3072, 64).items()
    }
    path = write(tmp_path / "two.safetensors", tensors)
    refused = run("inspect", path)
    assert refused.returncode == 2
    assert "--adapter" in refused.stderr
    assert json.loads(run("inspect", path, "--adapter", "b", "--json").stdout)["modules"] == 1
