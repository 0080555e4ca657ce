"""Who reads a converted file: names that no table gives are refused, notes are computed, ties are named."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import TargetError
from inweave.exchange.convert import rewrite
from inweave.exchange.programs import DIFFUSERS_READS
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.detect import detect
from inweave.targets.forms import numbers_in
from tests.support import random, write, write_sparse

ATTENTION = ("attn.to_q", "attn.to_k", "attn1.to_q", "attn1.to_k")


def trained(base: str, leaves: tuple[str, ...] = ATTENTION, blocks: int | None = None) -> dict[str, Tensor]:
    """A LoRA of rank 1 on the modules of a base that end in ``leaves``, in diffusers names."""
    denoiser = known_index(base).denoiser
    assert denoiser is not None
    tensors: dict[str, Tensor] = {}
    for part, shape in denoiser.parts.items():
        module, numbers = part.removesuffix(".weight"), numbers_in(part)
        if part.endswith(".weight") and len(shape) == 2 and module.endswith(leaves):
            if blocks is None or not numbers or int(numbers[0]) < blocks:
                tensors[f"transformer.{module}.lora_A.weight"] = random(1, 1, shape[1])
                tensors[f"transformer.{module}.lora_B.weight"] = random(2, shape[0], 1)
    return tensors


@pytest.mark.parametrize("dialect", ["comfy", "kohya"])
def test_names_that_no_table_gives_are_refused_with_the_reason(dialect: str, tmp_path: Path) -> None:
    adapter = read(trained("cogvideox-2b"))
    with pytest.raises(TargetError, match="no table of the original names of cogvideox-2b"):
        inweave.save(adapter, tmp_path / "x.safetensors", dialect=dialect, base="cogvideox-2b")
    shapes = {name: ("BF16", shape) for name, shape in known_index("cogvideox-2b").components["unet"].parts.items()}
    file = write_sparse(tmp_path / "transformer.safetensors", shapes)
    with pytest.raises(TargetError, match="no table of the original names of cogvideox-2b"):
        inweave.save(adapter, tmp_path / "x.safetensors", dialect=dialect, base=file)
    other = {f"model.diffusion_model.{name.replace('to_', 'in_')}": shape for name, shape in shapes.items()}
    file = write_sparse(tmp_path / "unlisted.safetensors", other)
    unlisted = read({name.replace("to_", "in_"): tensor for name, tensor in trained("cogvideox-2b").items()})
    with pytest.raises(TargetError, match=r"no table of the original names of .*unlisted"):
        inweave.save(unlisted, tmp_path / "x.safetensors", dialect=dialect, base=file)
    assert inweave.save(unlisted, tmp_path / "x.safetensors", base=file).dialect == "diffusers"
    assert inweave.save(adapter, tmp_path / "x.safetensors", base="cogvideox-2b").dialect == "diffusers"
    unknown = write_sparse(tmp_path / "other.safetensors", {name + "x.weight": shape for name, shape in shapes.items()})
    with pytest.raises(TargetError, match="whose names inweave knows"):
        inweave.save(adapter, tmp_path / "x.safetensors", dialect=dialect, base=unknown)


@pytest.mark.parametrize("base", ["cogvideox-2b", None])
def test_the_worker_refuses_by_the_same_rule(base: str | None, tmp_path: Path) -> None:
    process = pytest.importorskip("inweave.serve.sandbox.process")
    file = write(tmp_path / "cog.safetensors", trained("cogvideox-2b", (*ATTENTION, "norm1.linear")))
    data = {"path": str(file), "label": "cog", "target": str(tmp_path), "base": base, "drop": True}
    for dialect in ("kohya", "comfy"):
        with pytest.raises(TargetError, match="no table of the original names of cogvideox-2b"):
            process.convert_lora({**data, "to": dialect})
    assert process.convert_lora({**data, "to": "diffusers"})["ok"]


def test_a_shorter_model_has_the_one_naming_of_its_listed_relative(tmp_path: Path) -> None:
    parts = known_index("qwen-image").components["unet"].parts
    shapes = {f"model.diffusion_model.{name}": ("BF16", shape) for name, shape in parts.items() if ".59." not in name}
    file = write_sparse(tmp_path / "pruned.safetensors", shapes)
    done = inweave.save(read(trained("qwen-image", blocks=9)), tmp_path / "x.safetensors", dialect="kohya", base=file)
    assert not any("diffusers does not read" in note for note in done.notes)


def test_a_dialect_that_is_refused_is_not_advised(tmp_path: Path) -> None:
    whole = {"transformer.transformer_blocks.0.attn1.to_q.diff": random(1, 1920, 1920)}
    with pytest.raises(TargetError) as refused:
        inweave.save(read(whole), tmp_path / "x.safetensors", dialect="diffusers", base="cogvideox-2b")
    assert "kohya" not in str(refused.value) and "comfy" not in str(refused.value)


def notes(base: str, dialect: str) -> str:
    leaves = ("attn.to_q", "attn1.to_q", "linear_1", "net.0.proj", "norm.linear")
    return " ".join(rewrite(read(trained(base, leaves)), dialect, known_index(base)).notes)


def test_modules_that_comfyui_skips_are_counted() -> None:
    assert "ComfyUI skips" in notes("hunyuanvideo", "kohya")
    assert "ComfyUI skips" not in notes("hunyuanvideo", "comfy")
    assert "ComfyUI skips" not in notes("flux1-dev", "kohya")
    for base in ("sana-1.6b", "flux3", "kolors"):
        assert f"no model class of {base}" in notes(base, "comfy")


def test_a_tie_is_asked_for_unless_every_base_gives_the_same_file(tmp_path: Path) -> None:
    flux = write(tmp_path / "flux.safetensors", trained("chroma1-hd"))
    done = inweave.convert(flux, tmp_path / "x.safetensors", to="kohya")
    assert any("flux1-dev" in note and "chroma1-hd" in note and "equally" in note for note in done.notes)
    file = write(tmp_path / "ltx.safetensors", trained("ltx-video-2b", ("attn1.to_q",)))
    with pytest.raises(TargetError, match=r"It fits ltx-video-2b, .*anima"):
        inweave.convert(file, tmp_path / "y.safetensors", to="comfy")


def test_a_base_that_is_not_proven_is_asked_for(tmp_path: Path) -> None:
    odd = trained("flux1-dev", ("attn.to_q", "ff.net.2")) | {
        "transformer.transformer_blocks.0.gate.lora_A.weight": random(1, 1, 3072),
        "transformer.transformer_blocks.0.gate.lora_B.weight": random(2, 3072, 1),
    }
    file = write(tmp_path / "odd.safetensors", odd)
    with pytest.raises(TargetError, match="1 of 77 modules do not fit flux1-dev"):
        inweave.convert(file, tmp_path / "x.safetensors", to="kohya", drop=True)


LOADERS = {"flux1-dev": "Flux", "flux2-klein-4b": "Flux2", "wan2.1-t2v-1.3b": "Wan", "sd3-medium": "SD3",
           "ltx-video-2b": "LTXVideo", "qwen-image": "QwenImage", "minimax-h3": "MiniMaxH3"}  # fmt: skip


@pytest.mark.parametrize("base", LOADERS)
@pytest.mark.parametrize("dialect", ["comfy", "kohya"])
def test_diffusers_reads_what_the_notes_say(base: str, dialect: str) -> None:
    """diffusers' own loader is asked for the modules that it finds."""
    torch = pytest.importorskip("torch")
    pipelines = pytest.importorskip("diffusers.loaders.lora_pipeline")
    index = known_index(base)
    leaves = ("attn.to_q", "attn.to_k", "attn.to_v", "attn1.to_q", "attn.to_qkv_mlp_proj")
    source = trained(base, leaves, blocks=1)
    written = rewrite(read(source), dialect, index)
    state = {name: torch.zeros(tensor.shape) for name, tensor in written.tensors.items()}
    state |= {name.replace("lora_down.weight", "alpha"): torch.tensor(1.0) for name in state if "lora_down" in name}
    try:
        with warnings.catch_warnings(action="ignore"):
            read_back = getattr(pipelines, f"{LOADERS[base]}LoraLoaderMixin").lora_state_dict(state)
    except (KeyError, ValueError):
        read_back = {}
    there: Mapping[str, object] = read_back[0] if isinstance(read_back, tuple) else read_back
    family = index.components["unet"].table.name if base != "qwen-image" else base
    assert (set(source) <= set(there)) == (family in DIFFUSERS_READS[dialect])
    assert any("diffusers does not read" in note for note in written.notes) == (family not in DIFFUSERS_READS[dialect])


def test_original_names_on_a_model_without_a_table_say_why() -> None:
    original = {
        f"diffusion_model.layers.0.attention.query_key_value.lora_{side}.weight": random(1, *shape)
        for side, shape in (("A", (1, 4096)), ("B", (12288, 1)))
    }
    report = inweave.check(read(original), "cogview4", values="none").report
    assert "diffusers' names alone" in report.unplaced[0].reason
    report = inweave.check(read(original), "qwen-image", values="none").report
    assert report.unplaced[0].reason == "no module of this name in the base"


ATTENTION_8B = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def of_hidream_o1(prefix: str, leaves: tuple[str, ...] = ATTENTION_8B) -> dict[str, Tensor]:
    diffusers = trained("hidream-o1", leaves).items()
    return {name.replace("transformer.", prefix, 1): tensor for name, tensor in diffusers}


def test_hidream_o1_is_separated_from_the_language_model_inside_it(tmp_path: Path) -> None:
    """Its decoder has the names and shapes of Qwen3-VL's: a prefix of denoisers, or a layer of its own, decides."""
    for prefix in ("base_model.model.model.", "model."):
        assert detect(read(of_hidream_o1(prefix))).base is None
        assert inweave.check(read(of_hidream_o1(prefix)), "hidream-o1", values="none").ok
        detection = detect(read(of_hidream_o1(prefix, (*ATTENTION_8B, "x_embedder.proj1"))))
        assert (detection.base, detection.proven) == ("hidream-o1", True)
    file = write(tmp_path / "o1.safetensors", of_hidream_o1("diffusion_model."))
    assert inweave.inspect(file).as_dict()["base"]["detected"] == "hidream-o1"
    done = inweave.convert(file, tmp_path / "kohya.safetensors", to="kohya")
    assert done.notes == ["diffusers has no model class of hidream-o1"]
    back = inweave.convert(tmp_path / "kohya.safetensors", tmp_path / "back.safetensors", to="comfy")
    assert back.base == "hidream-o1"
    written = inweave.load(back.path).tensors
    assert {key.rpartition(".lora_")[0] for key in written} >= {
        "diffusion_model.language_model.layers.35.self_attn.o_proj"
    }


def test_a_checkpoint_of_hidream_o1_is_recognized(tmp_path: Path) -> None:
    parts = known_index("hidream-o1").components["unet"].parts
    shapes = {f"model.{name}": ("BF16", shape) for name, shape in parts.items()}
    shapes["lm_head.weight"] = ("BF16", (151936, 4096))
    file = write_sparse(tmp_path / "hidream.safetensors", shapes)
    verdict = inweave.check(read(of_hidream_o1("diffusion_model.")), file, values="none")
    assert verdict.ok
    assert {placement.tensor for placement in verdict.placements} <= shapes.keys()


def test_shapes_of_no_known_base_come_with_the_bases_whose_names_they_have() -> None:
    narrow = {name: random(1, *(size if size == 1 else size * 3 // 4 for size in tensor.shape))
              for name, tensor in trained("qwen-image").items()}  # fmt: skip
    evidence = " ".join(detect(read(narrow)).evidence)
    assert "120 of 120 modules have names of sd3.5-large, " in evidence and "shapes of no known base" in evidence
    other = {name.replace("attn.", "mixer."): tensor for name, tensor in narrow.items()}
    assert detect(read(other)).evidence == ("no known base has these modules",)


def test_longcat_image_is_written_in_the_names_of_comfyuis_flux(tmp_path: Path) -> None:
    """ComfyUI builds its Flux for it, without pooled text: only the embedding of the time is called otherwise."""
    leaves = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp", "timestep_embedder.linear_1")
    file = write(tmp_path / "longcat.safetensors", trained("longcat-image", leaves))
    done = inweave.convert(file, tmp_path / "comfy.safetensors", to="comfy")
    keys = {key.rpartition(".lora_")[0] for key in inweave.load(done.path).tensors}
    assert keys >= {f"diffusion_model.{name}" for name in ("time_in.in_layer", "double_blocks.9.img_attn.qkv")}
    assert "diffusion_model.single_blocks.19.linear1" in keys and "names of ComfyUI" in " ".join(done.notes)
    back = inweave.convert(done.path, tmp_path / "back.safetensors", to="diffusers")
    assert back.base == "longcat-image"
    assert set(inweave.load(back.path).tensors) >= set(trained("longcat-image", leaves))


def test_a_wrong_base_is_refused_with_every_base_that_fits() -> None:
    one = inweave.check(read(trained("cogview4-6b")), "flux1-dev", values="none").error or ""
    assert one.startswith("this file is for cogview4-6b (")
    several = inweave.check(read(trained("cogview4-6b", ("attn1.to_q",), 3)), "flux1-dev", values="none").error or ""
    assert several.startswith("this file is for ltx-video-13b, ltx-2") and "not for flux1-dev" in several
