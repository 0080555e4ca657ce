"""Qwen-Image-Edit against diffusers' pipeline, whose text encoder gets the kinds of tokens, which it leaves out.

References are small on both sides (`tiny_qwen.small_references`); one test with `--full` takes them as published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from inweave.errors import ConfigError, FormatError  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.models.identify import identify  # noqa: E402
from inweave.models.model import load_model  # noqa: E402
from inweave.targets import bases  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.peers import tiny_qwen  # noqa: E402
from tests.peers.test_families import PROMPT, SEED, assert_same, difference  # noqa: E402
from tests.peers.test_references import references  # noqa: E402

EDIT, EDIT_2511 = "qwen-image-edit-2509", "qwen-image-edit-2511"
STEPS = 2


@pytest.fixture
def small() -> Iterator[None]:
    with tiny_qwen.small_references():
        yield


@cache
def ours(variant: str = EDIT) -> Pipeline:
    with tiny.quick_tokenizers():
        return Pipeline(load_model(tiny.folder(variant)))


def expected(variant: str, images: list[Image.Image], negative: str = " ") -> Image.Image:
    pipe = tiny.pipeline(variant)
    pipe.set_progress_bar_config(disable=True)
    image: Image.Image = pipe(
        image=images, prompt=PROMPT, negative_prompt=negative, true_cfg_scale=3.0, num_inference_steps=STEPS, width=96,
        height=64, generator=torch.Generator().manual_seed(SEED),
    ).images[0]  # fmt: skip
    return image


def made(images: list[Image.Image], variant: str = EDIT, **more: Any) -> Image.Image:
    options = {"steps": STEPS, "guidance": 3.0, "seed": SEED, "width": 96, "height": 64}
    return ours(variant)(PROMPT, references=images, **options | more).images[0]


@pytest.mark.parametrize(
    ("variant", "count"), [(EDIT, 1), pytest.param(EDIT, 2, marks=pytest.mark.full), (EDIT_2511, 3)]
)
def test_images_are_those_of_the_pipeline(variant: str, count: int, small: None) -> None:
    images = references(count)
    image = made(images, variant, negative_prompt="blurry")
    assert_same(image, expected(variant, images, "blurry"))
    changed = images[::-1] if count > 1 else [images[0].rotate(180)]
    assert difference(image, made(changed, variant, negative_prompt="blurry")).max() > 1


@pytest.mark.full
def test_an_image_from_a_reference_of_a_megapixel_is_that_of_the_pipeline() -> None:
    images = references(1)
    assert_same(made(images), expected(EDIT, images))


def test_states_depend_on_what_is_seen(small: None) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    model, images, theirs = ours().model, references(2), tiny.pipeline(EDIT)
    text = model.family.seen_text(model, ((PROMPT, 1.0),), [each.size for each in images])
    ids = model.family.tokenize(model, text).ids
    shapes = [calculate_dimensions(96 * 96, each.width / each.height) for each in images]
    sized = [theirs.image_processor.resize(each, *shape[::-1]) for each, shape in zip(images, shapes, strict=True)]
    with torch.no_grad():
        actual = model.family.encode(model, ids | model.family.seen_images(model, images), None)
        states, _ = theirs.encode_prompt(PROMPT, sized)
        turned = [each.rotate(180) for each in images]
        other = model.family.encode(model, ids | model.family.seen_images(model, turned), None)
    assert torch.allclose(actual["encoder_hidden_states"], states, atol=1e-5)
    assert not torch.allclose(actual["encoder_hidden_states"], other["encoder_hidden_states"], atol=1e-3)


def test_it_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="edits images; give it one reference or more, at most 4"):
        made([])


def test_a_mark_in_a_prompt_is_text() -> None:
    model = ours().model
    ((plain, _),) = model.family.seen_text(model, (("a <|image_<|image_pad|>pad|>dog", 1.0),), [(64, 64)])
    assert plain.endswith("<|vision_end|>a dog")


def test_a_single_file_of_2511_is_known_by_its_mark() -> None:
    denoiser = bases.known_index("qwen-image", "original").components["unet"]
    shapes = dict(denoiser.tensors)
    assert identify(shapes, {}).variant.name == "qwen-image"
    assert identify(shapes | {f"{denoiser.prefix}__index_timestep_zero__": (0,)}, {}).variant.name == EDIT_2511


def test_a_single_file_with_names_of_older_transformers_makes_the_same_image(small: None, tmp_path: Path) -> None:
    folder, parts = tiny.folder(EDIT_2511), {}
    for part in ("transformer", "text_encoder", "vae"):
        tensors = load_file(next((folder / part).glob("*.safetensors")))
        if part == "transformer":
            tensors = {f"model.diffusion_model.{name}": value for name, value in tensors.items()}
            tensors["model.diffusion_model.__index_timestep_zero__"] = torch.empty(0)
        if part == "text_encoder":
            tensors = {
                name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
                for name, value in tensors.items()
            }
            assert {name.split(".")[0] for name in tensors} == {"model", "visual", "lm_head"}
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / f"{part}.safetensors")
        parts[part] = tmp_path / f"{part}.safetensors"
    with tiny.quick_tokenizers():
        model = load_model(parts.pop("transformer"), config=folder, parts=parts)
    assert model.family.name == "qwen-image-edit"
    size: dict[str, Any] = {"width": 96, "height": 64}
    image = Pipeline(model)(PROMPT, references=references(1), steps=STEPS, guidance=3.0, seed=SEED, **size).images[0]
    assert difference(image, made(references(1), EDIT_2511)).max() == 0


def test_a_folder_is_what_its_pipeline_says_and_no_variant_changes_that(tmp_path: Path) -> None:
    for variant, other in ((EDIT, "qwen-image"), ("qwen-image", EDIT)):
        with pytest.raises(FormatError, match=rf"{variant.removesuffix('-2509')}; {other} has the same denoiser"):
            load_model(tiny.folder(variant), variant=other)
    index = json.loads((tiny.folder(EDIT_2511) / "model_index.json").read_text())
    copy = tmp_path / "renamed"
    copy.mkdir()
    for part in tiny.folder(EDIT_2511).iterdir():
        (copy / part.name).symlink_to(part)
    (copy / "model_index.json").unlink()
    (copy / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImagePipeline"}))
    assert load_model(copy).family.name == "qwen-image-edit"  # plain Qwen-Image has no zero_cond_t
