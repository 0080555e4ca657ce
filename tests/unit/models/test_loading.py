"""Loading a model: the same bits from a folder, a single file, shards or half precision, plain, merged or swapped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inweave.errors import ConfigError, FormatError, TargetError
from inweave.generate.pipeline import Pipeline
from inweave.models.model import Model, load_model
from inweave.targets.index import Component
from inweave.targets.tables import TABLES
from inweave.weights.source import FileSource, Stacked
from tests.peers import tiny_models as tiny

pytestmark = pytest.mark.usefixtures("quick_tokenizers")

Weights = dict[str, dict[str, torch.Tensor]]


def weights(model: Model) -> Weights:
    """Copies, so that a later swap does not change them."""
    return {
        part: {name: value.detach().clone() for name, value in network.state_dict().items()}
        for part, network in model.networks.items()
    }


def assert_equal(actual: Weights, expected: Weights) -> None:
    assert actual.keys() == expected.keys()
    for part, tensors in expected.items():
        assert actual[part].keys() == tensors.keys()
        different = [name for name, value in tensors.items() if not torch.equal(actual[part][name], value)]
        assert not different, (part, different)


def generated_bytes(model: Model) -> bytes:
    return Pipeline(model)("a red apple", steps=2, guidance=4.0, seed=3, width=64, height=64).images[0].tobytes()


def rewritten(file: Path, change: Any) -> None:
    save_file(change(load_file(file)), file)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("loras")
    return (
        tiny.lora(folder / "one.safetensors", "sdxl", dialect="kohya", seed=1),
        tiny.lora(folder / "two.safetensors", "sdxl", dialect="kohya", seed=2),
    )


# ---- merged while loading, and swapped --------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["device", "file"])
def test_merged_while_loading_is_swapped_afterwards(keep: Any, loras: tuple[Path, Path]) -> None:
    folder = tiny.folder("sdxl")
    plain = load_model(folder, keep=keep)
    base = weights(plain)
    merged = load_model(folder, loras=[(loras[0], 0.8)], keep=keep)
    woven = weights(merged)
    for part in ("unet", "text_encoder", "text_encoder_2"):
        assert any(not torch.equal(woven[part][name], value) for name, value in base[part].items()), part
    assert_equal({"vae": woven["vae"]}, {"vae": base["vae"]})
    plain.swap([(loras[0], 0.8)])
    assert_equal(weights(plain), woven)
    plain.swap([])
    merged.swap([])
    assert_equal(weights(plain), base)
    assert_equal(weights(merged), base)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_another_precision_than_the_file_s(dtype: str, loras: tuple[Path, Path]) -> None:
    """What an adapter is added to is the weight as the model has it, both ways."""
    folder = tiny.folder("sdxl")
    plain = load_model(folder, dtype=dtype)
    base = weights(plain)
    merged = load_model(folder, dtype=dtype, loras=[(loras[0], 0.8)])
    plain.swap([(loras[0], 0.8)])
    assert_equal(weights(plain), weights(merged))
    merged.swap([])
    assert_equal(weights(merged), base)


def test_from_a_merged_load_to_another_lora(loras: tuple[Path, Path]) -> None:
    folder = tiny.folder("sdxl")
    one, two = loras
    model = load_model(folder, loras=[(one, 0.8)])  # keep="auto"
    first = weights(model)
    model.swap([(two, -0.5)])
    assert_equal(weights(model), weights(load_model(folder, loras=[(two, -0.5)])))
    model.swap([(one, 0.4), (two, {"unet": 1.0, "te": 0.0})])
    both = load_model(folder, loras=[(one, 0.4), (two, {"unet": 1.0, "te": 0.0})])
    assert_equal(weights(model), weights(both))
    model.swap([(one, 0.8)])
    assert_equal(weights(model), first)


def test_a_lora_of_another_model_is_refused_before_anything_is_built(loras: tuple[Path, Path]) -> None:
    with pytest.raises(TargetError, match=r"one\.safetensors"):
        load_model(tiny.folder("flux1-dev"), loras=[(loras[0], 1.0)])


# ---- single files ------------------------------------------------------------------------------------------------

#: variant -> (part, table, prefix in a single file); "" means that the names are the same in both
SINGLE = {
    "sd1.5": (
        ("unet", "unet", "model.diffusion_model."), ("vae", "vae", "first_stage_model."),
        ("text_encoder", "own", "cond_stage_model.transformer."),
    ),
    "sd2.1": (
        ("unet", "unet", "model.diffusion_model."), ("vae", "vae", "first_stage_model."),
        ("text_encoder", "openclip", "cond_stage_model.model."),
    ),
    "sdxl": (
        ("unet", "unet", "model.diffusion_model."), ("vae", "vae", "first_stage_model."),
        ("text_encoder", "own", "conditioner.embedders.0.transformer."),
        ("text_encoder_2", "openclip", "conditioner.embedders.1.model."),
    ),
    "sd3.5-medium": (
        ("transformer", "sd3", "model.diffusion_model."), ("vae", "vae", "first_stage_model."),
        ("text_encoder", "own", "text_encoders.clip_l.transformer."),
        ("text_encoder_2", "own", "text_encoders.clip_g.transformer."),
        ("text_encoder_3", "own", "text_encoders.t5xxl.transformer."),
    ),
    "flux1-dev": (("transformer", "flux", ""),),
    "flux2-dev": (("transformer", "flux2", ""),), "flux2-klein-4b": (("transformer", "flux2", ""),),
}  # fmt: skip


def original(folder: Path, part: str, table: str, prefix: str) -> dict[str, torch.Tensor]:
    """One network as a single file holds it."""
    source = FileSource(next((folder / part).glob("*.safetensors")))
    shapes = {name: source.spec(name).shape for name in source.names()}
    stacked = Stacked(source, Component(part, TABLES[table], "diffusers", shapes))
    tensors = {prefix + name: stacked.get(name, owned=True).contiguous() for name in stacked.names()}
    if part == "vae":  # attention as 1x1 convolutions
        tensors |= {n: t[:, :, None, None] for n, t in tensors.items() if ".attn_1." in n and t.dim() == 2}
    return tensors


@pytest.fixture(scope="module")
def singles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("single")
    for variant, parts in SINGLE.items():
        tensors: dict[str, torch.Tensor] = {}
        for part in parts:
            tensors |= original(tiny.folder(variant), *part)
        if variant == "sd2.1":  # what such files hold beyond the model: a layer SD 2 leaves out, and leftovers
            layer = "cond_stage_model.model.transformer.resblocks."
            tensors |= {
                n.replace(f"{layer}0.", f"{layer}23."): t.clone() for n, t in tensors.items() if layer + "0." in n
            }
            tensors["cond_stage_model.model.text_projection"] = torch.randn(tiny.WIDTH, tiny.WIDTH)
            tensors["cond_stage_model.model.logit_scale"] = torch.tensor(4.6)
            tensors["model_ema.decay"] = torch.tensor(0.99)
        if variant == "sd1.5":
            tensors["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
        save_file(tensors, folder / f"{variant}.safetensors")
    return {variant: folder / f"{variant}.safetensors" for variant in SINGLE}


@pytest.mark.parametrize("variant", ["sd1.5", "sd2.1", "sdxl", "sd3.5-medium"])
def test_a_single_file_is_the_folder(variant: str, singles: dict[str, Path]) -> None:
    names = load_file(singles[variant])
    assert not any(name.startswith(("unet.", "down_blocks", "transformer_blocks")) for name in names)
    folder = tiny.folder(variant)
    actual = load_model(singles[variant], config=folder)
    expected = load_model(folder)
    assert_equal(weights(actual), weights(expected))
    assert generated_bytes(actual) == generated_bytes(expected)


def test_a_transformer_only_file_takes_its_other_components_from_elsewhere(
    singles: dict[str, Path], tmp_path: Path
) -> None:
    folder = tiny.folder("flux1-dev")
    clip, vae = tmp_path / "clip_l.safetensors", tmp_path / "ae.safetensors"
    save_file(load_file(folder / "text_encoder" / "model.safetensors"), clip)
    save_file(original(folder, "vae", "vae", ""), vae)
    parts = {"text_encoder": clip, "text_encoder_2": folder / "text_encoder_2", "vae": vae}
    actual = load_model(singles["flux1-dev"], config=folder, parts=parts)
    expected = load_model(folder)
    assert_equal(weights(actual), weights(expected))
    assert generated_bytes(actual) == generated_bytes(expected)
    with pytest.raises(FormatError, match=r"text_encoder, text_encoder_2 missing.*--part text_encoder=FILE"):
        load_model(singles["flux1-dev"], config=folder, parts={"vae": vae})


@pytest.mark.parametrize("variant", ["flux2-dev", "flux2-klein-4b"])
def test_flux2_of_files_of_their_own(variant: str, singles: dict[str, Path], tmp_path: Path) -> None:
    """Its autoencoder in original names and without a count of batches, its language model as others store it."""
    folder = tiny.folder(variant)
    encoder, vae = tmp_path / "encoder.safetensors", tmp_path / "ae.safetensors"
    stored = load_file(folder / "text_encoder" / "model.safetensors")
    if variant == "flux2-dev":
        assert any(name.startswith("language_model.model.") for name in stored)
        stored = {name: tensor for name, tensor in stored.items() if name.startswith("language_model.model.")}
        stored = {name.removeprefix("language_model."): tensor for name, tensor in stored.items()}
        stored["tekken_model"] = torch.zeros(4, dtype=torch.uint8)
    save_file(stored, encoder)
    tensors = original(folder, "vae", "vae", "")
    assert "encoder.quant_conv.weight" in tensors
    save_file({name: each for name, each in tensors.items() if "num_batches" not in name}, vae)
    parts = {"text_encoder": encoder, "vae": vae, "tokenizer": folder / "tokenizer"}
    actual = load_model(singles[variant], config=folder, parts=parts)
    expected = load_model(folder)
    assert_equal(weights(actual), weights(expected))
    assert generated_bytes(actual) == generated_bytes(expected)


def test_parts_may_come_out_of_a_whole_checkpoint(singles: dict[str, Path]) -> None:
    folder = tiny.folder("sdxl")
    parts = {"vae": singles["sdxl"], "text_encoder": singles["sdxl"], "text_encoder_2": singles["sdxl"]}
    assert_equal(weights(load_model(folder, parts=parts)), weights(load_model(folder)))


def test_loras_fit_a_single_file_too(singles: dict[str, Path], loras: tuple[Path, Path]) -> None:
    folder = tiny.folder("sdxl")
    expected = weights(load_model(folder, loras=[(loras[0], 0.8)]))
    merged = load_model(singles["sdxl"], config=folder, loras=[(loras[0], 0.8)])
    assert_equal(weights(merged), expected)
    merged.swap([])
    assert_equal(weights(merged), weights(load_model(folder)))


# ---- how weights are stored --------------------------------------------------------------------------------------


def test_half_precision_is_loaded_as_float32_on_the_cpu(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        rewritten(file, lambda tensors: {n: t.half() if t.is_floating_point() else t for n, t in tensors.items()})
    model = load_model(folder, device="cpu")
    actual, exact = weights(model), weights(load_model(tiny.folder("sd1.5")))
    for part, tensors in actual.items():
        for name, value in tensors.items():
            assert value.dtype == exact[part][name].dtype
            assert torch.equal(value, exact[part][name].half().to(value.dtype)), name
    generated_bytes(model)


def test_precision_can_be_requested() -> None:
    model = load_model(tiny.folder("sdxl"), device="cpu", dtype="bf16")
    assert {t.dtype for t in model.denoiser.parameters()} == {torch.bfloat16}
    assert {t.dtype for t in model.vae.parameters()} == {torch.float32}  # its configuration asks for it
    with pytest.raises(ConfigError, match=r"no dtype is called 'int3'"):
        load_model(tiny.folder("sdxl"), dtype="int3")


def test_shards_with_an_index(folder: Path) -> None:
    expected = weights(load_model(folder))
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        file = folder / part / f"{stem}.safetensors"
        tensors = sorted(load_file(file).items())
        halves = {f"{stem}-0000{i + 1}-of-00002.safetensors": dict(tensors[i::2]) for i in range(2)}
        for name, half in halves.items():
            save_file(half, folder / part / name)
        mapping = {tensor: name for name, half in halves.items() for tensor in half}
        file.with_name(f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
        file.unlink()
    assert_equal(weights(load_model(folder)), expected)


@pytest.mark.parametrize("convolution", [False, True])
def test_old_names_of_attention_in_autoencoders(folder: Path, convolution: bool) -> None:
    expected = weights(load_model(folder))
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}

    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {}
        for name, value in tensors.items():
            old_name = name
            for new, former in old.items():
                old_name = old_name.replace(new, former)
            renamed[old_name] = (
                value[:, :, None, None] if convolution and old_name != name and value.dim() == 2 else value
            )
        assert renamed.keys() != tensors.keys()
        return renamed

    rewritten(folder / "vae" / "diffusion_pytorch_model.safetensors", rename)
    assert_equal(weights(load_model(folder)), expected)


def test_clip_with_and_without_its_upper_level(folder: Path) -> None:
    expected = weights(load_model(folder))
    file = folder / "text_encoder" / "model.safetensors"
    bare = {name.removeprefix("text_model."): value for name, value in load_file(file).items()}
    for prefix in ("text_model.", ""):
        save_file({prefix + name: value for name, value in bare.items()}, file)
        assert_equal(weights(load_model(folder)), expected)


def test_t5_under_either_name_of_its_vocabulary(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("flux1-schnell"), tmp_path / "model"))
    expected = weights(load_model(folder))
    file = folder / "text_encoder_2" / "model.safetensors"
    tensors = load_file(file)
    table = tensors.pop("shared.weight")
    for names in (("encoder.embed_tokens.weight",), ("shared.weight", "encoder.embed_tokens.weight")):
        save_file(tensors | {name: table.clone() for name in names}, file)
        assert_equal(weights(load_model(folder)), expected)


def test_sd3_without_t5(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("sd3-medium"), tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))
    result = Pipeline(load_model(folder))("a red apple", steps=2, seed=3, width=64, height=64)
    assert any("CLIP only" in warning for warning in result.warnings)


def test_a_folder_s_name_never_makes_it_another_family(tmp_path: Path) -> None:
    misnamed = Path(shutil.copytree(tiny.folder("sd1.5"), tmp_path / "sdxl"))
    assert load_model(misnamed).blueprint.variant is None
    right = misnamed.rename(tmp_path / "sd1.5")
    model = load_model(right)
    assert model.blueprint.variant is not None
    assert model.size == 512
