"""Families whose text encoder is a language model: texts keep their own lengths, and files have many layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from inweave.errors import ConfigError, FormatError  # noqa: E402
from inweave.models.families.base import ConditioningRequest, Tensors  # noqa: E402
from inweave.models.model import Model, load_model  # noqa: E402
from inweave.models.single import open_single  # noqa: E402
from inweave.targets.index import component_from_names  # noqa: E402
from inweave.targets.tables import TABLES  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.peers.test_families import PROMPT, assert_same, ours, requests, theirs  # noqa: E402
from tests.unit.training.image_sets import make_set, sample_inputs, shared_model, task_on  # noqa: E402

VARIANTS = ("z-image-turbo", "qwen-image")
CAPTIONS = {"a": "a red apple", "b": "a blue boat on a quiet sea, with a white sail, under a sky full of small clouds"}
#: the same sums in another order, of numbers around one, through a few dozen layers
ROUNDING = 1e-4


def encoder_source(model: Model) -> Any:
    return model.blueprint.parts["text_encoder"].source


def conditioning(model: Model, prompt: str = PROMPT) -> torch.Tensor:
    request = ConditioningRequest(((prompt, 1.0),), (), 0.0, 64, 64)
    return model.family.condition(model, request).inputs["encoder_hidden_states"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_two_equals_two_batches_of_one(variant: str, tmp_path: Path) -> None:
    """Texts of different lengths are padded and masked, so none of them sees the other's length."""
    task = task_on(make_set(tmp_path / "set", CAPTIONS), model=shared_model(variant))
    inputs = sample_inputs(task)
    mask = inputs["text.encoder_hidden_states_mask"]
    assert mask.sum(1).unique().numel() == 2

    def one(number: int) -> Tensors:
        return {name: value[number : number + 1] for name, value in inputs.items()}

    with torch.no_grad():
        both = task.loss(inputs)
        apart = [task.loss(one(number)) for number in range(2)]
        unpadded = []  # and as long as each text is, the way images are generated
        for number in range(2):
            row = one(number)
            length = int(row.pop("text.encoder_hidden_states_mask").sum())
            row["text.encoder_hidden_states"] = row["text.encoder_hidden_states"][:, :length]
            unpadded.append(task.loss(row))
    torch.testing.assert_close(both, sum(apart) / 2, rtol=ROUNDING, atol=0)
    torch.testing.assert_close(torch.stack(unpadded), torch.stack(apart), rtol=ROUNDING, atol=0)
    assert abs(apart[0] - apart[1]) > 10 * ROUNDING * both


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_changes_no_state(variant: str) -> None:
    model = shared_model(variant)
    family = model.family
    with torch.no_grad():
        plain = family.encode(model, family.token_ids(model, PROMPT), None)
        padded = family.encode(model, family.token_ids(model, PROMPT, 9), None)
    states, mask = padded["encoder_hidden_states"], padded["encoder_hidden_states_mask"]
    assert "encoder_hidden_states_mask" not in plain and states.shape[1] == 9 * 32
    torch.testing.assert_close(states[:, mask[0]], plain["encoder_hidden_states"], rtol=ROUNDING, atol=ROUNDING)
    assert not states[:, ~mask[0]].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_long_prompt_is_cut_where_diffusers_cuts_it(variant: str) -> None:
    long = " ".join([PROMPT] * 40)
    mine, other = requests(variant)
    if variant == "qwen-image":
        other["max_sequence_length"] = 1024  # all that it reads
    result = ours(variant)(long, **mine)
    assert any("were ignored" in line for line in result.warnings)
    assert_same(result.images[0], theirs(variant)(long, **other).images[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_captions_that_are_too_long_are_counted(variant: str, tmp_path: Path) -> None:
    long = make_set(tmp_path / "set", {"a": "a red apple", "b": " ".join([PROMPT] * 40)})
    (line,) = task_on(long, model=shared_model(variant)).notes()[:1]
    assert line.startswith("captions: 1 are longer than the text encoder reads") and line.endswith("b.png")
    assert task_on(make_set(tmp_path / "other"), model=shared_model(variant)).notes() == []


def test_a_blank_stands_for_no_negative_prompt_in_qwen_image() -> None:
    mine, other = requests("qwen-image")
    del mine["negative_prompt"]
    other["negative_prompt"] = " "
    assert_same(ours("qwen-image")(PROMPT, **mine).images[0], theirs("qwen-image")(PROMPT, **other).images[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_has_no_effect_is_reported(variant: str) -> None:
    mine, _ = requests(variant)
    mine |= {"guidance": 0.0, "negative_prompt": ""}
    result = ours(variant)("a (red:1.4) apple", clip_skip=2, **mine | {"negative_prompt": "dark"})
    assert any("negative prompt has no effect without guidance" in line for line in result.warnings)
    assert any("weights in the prompt were ignored" in line for line in result.warnings)
    assert any("clip_skip was ignored" in line for line in result.warnings)
    assert_same(result.images[0], ours(variant)("a red apple", **mine).images[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_language_model_is_not_trained(variant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_text_encoders: the text encoder of .* is too large to train"):
        task_on(make_set(tmp_path / "set"), model=shared_model(variant), train_text_encoders=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_changes_the_prediction_as_it_does_in_diffusers(variant: str, tmp_path: Path) -> None:
    """The same change from a merge here as from adapter layers there."""
    file = tiny.lora(tmp_path / "style.safetensors", variant, dialect="diffusers")
    plain = shared_model(variant)
    merged = load_model(plain.blueprint, loras=[(file, 1.0)], device="cpu", dtype="fp32")
    pipe = theirs(variant)
    family, inputs = plain.family, {"encoder_hidden_states": conditioning(plain)}
    latents = torch.randn(plain.latent_space.shape(64, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (family.denoise(model, latents, torch.tensor(500.0), inputs) for model in (plain, merged))
        try:
            pipe.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="style")
            wrapped = Model(plain.blueprint, {"transformer": pipe.transformer, "vae": pipe.vae}, {}, plain.weaver,
                            plain.device, plain.dtype)  # fmt: skip
            peer = family.denoise(wrapped, latents, torch.tensor(500.0), inputs)
        finally:
            pipe.unload_lora_weights()
    change = after - before
    assert change.abs().max() > 0.1
    torch.testing.assert_close(change, peer - before, rtol=0, atol=ROUNDING * float(change.abs().max()))


# how files are laid out


def sharded(variant: str, output: Path, class_name: str, rename: Any) -> Path:
    """The same model with its text encoder in shards, under other names, saved as another class."""
    folder = Path(shutil.copytree(tiny.folder(variant), output / "model"))
    encoder = folder / "text_encoder"
    tensors = {rename(name): tensor for name, tensor in load_file(encoder / "model.safetensors").items()}
    (encoder / "model.safetensors").unlink()
    files = {}
    for number, name in enumerate(sorted(tensors)):
        files[name] = f"model-{number % 3 + 1:05}-of-00003.safetensors"
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in files if files[name] == file}, encoder / file)
    (encoder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"text_encoder": ["transformers", class_name]}))
    return folder


@pytest.mark.parametrize(
    ("variant", "class_name", "old", "new"),
    [
        ("z-image-turbo", "Qwen3ForCausalLM", "", "model."),  # as published
        ("z-image-turbo", "Qwen3Model", "", "model."),
        ("qwen-image", "Qwen2_5_VLForConditionalGeneration", "model.", "model.language_model."),  # newer libraries
    ],
)
def test_encoders_in_shards_under_any_of_their_names(
    variant: str, class_name: str, old: str, new: str, tmp_path: Path
) -> None:
    def rename(name: str) -> str:
        return f"{new}{name.removeprefix(old)}" if name.startswith(old) else name

    model = load_model(sharded(variant, tmp_path, class_name, rename), device="cpu", dtype="fp32")
    assert any(name.startswith(new) for name in encoder_source(model).names())
    assert torch.equal(conditioning(model), conditioning(shared_model(variant)))


def test_only_the_text_model_of_qwen2_5_vl_is_built() -> None:
    model = shared_model("qwen-image")
    assert type(model.networks["text_encoder"]) is transformers.Qwen2_5_VLTextModel
    assert any(name.startswith("visual.") for name in encoder_source(model).names())


def single_file(variant: str, output: Path) -> tuple[Path, dict[str, Path]]:
    """The transformer as ComfyUI has it, and every other part as a file or folder of its own."""
    folder = tiny.folder(variant)
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    table = component_from_names("unet", {name: tuple(tensor.shape) for name, tensor in weights.items()}).table
    original: dict[str, torch.Tensor] = {}
    for link in table.links({name: tuple(tensor.shape) for name, tensor in weights.items()}, "diffusers"):
        rows = [original[link.original]] if link.original in original else []
        original[link.original] = torch.cat([*rows, weights[link.part]])
    file = output / "comfy.safetensors"
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in original.items()}, file)
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    if variant == "qwen-image":  # in the names of Wan's own code
        tensors = load_file(vae)
        links = TABLES["causal-vae"].links({name: tuple(t.shape) for name, t in tensors.items()}, "diffusers")
        vae = output / "vae.safetensors"
        save_file({link.original: tensors[link.part] for link in links}, vae)
    parts = {
        "vae": vae,
        "text_encoder": folder / "text_encoder" / "model.safetensors",
        "tokenizer": folder / "tokenizer",
    }
    return file, parts


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_single_file_with_its_parts(variant: str, tmp_path: Path) -> None:
    file, parts = single_file(variant, tmp_path)
    model = load_model(file, config=tiny.folder(variant), parts=parts, device="cpu", dtype="fp32")
    plain = shared_model(variant)
    for folder, network in model.networks.items():
        built, expected = network.state_dict(), plain.networks[folder].state_dict()
        assert built.keys() == expected.keys()
        assert all(torch.equal(built[name], expected[name]) for name in expected)
    assert torch.equal(conditioning(model), conditioning(plain))


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_single_file_lacks_is_listed_with_the_tokenizer(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, parts = single_file(variant, tmp_path)
    monkeypatch.setattr("inweave.models.identify._verify", lambda base, tensors: [])  # a tiny one is none of the known
    with pytest.raises(
        FormatError, match=r"vae, text_encoder, tokenizer missing; .* Add --part vae=FILE --part text_enc"
    ):
        open_single(file)
    with pytest.raises(FormatError, match=r"--part tokenizer=FOLDER .*vocab\.json and merges\.txt"):
        open_single(file, parts={name: parts[name] for name in ("vae", "text_encoder")})
    with pytest.raises(ConfigError, match=r"no part 'text_encoder_2'; its parts are .*tokenizer"):
        open_single(file, parts={"text_encoder_2": file})
    assert open_single(file, parts=parts).tokenizers.keys() == {"tokenizer"}
