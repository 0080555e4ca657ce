"""Reference images of edit models in the configurations of other trainers: folders, areas, versions, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import Imported, import_config
from tests.unit.training.importers.small_imports import TUNER, toolkit

EDIT_PLUS = {"name_or_path": "Qwen/Qwen-Image-Edit-2509", "arch": "qwen_image_edit_plus"}


def subsets(result: Imported) -> list[dict[str, Any]]:
    assert isinstance(result.config.dataset, dict)
    return [subset for table in result.config.dataset["datasets"] for subset in table["subsets"]]


def lines_about(result: Imported, name: str) -> list[str]:
    return [line for line in result.no_equivalent if line.startswith(name)]


@pytest.mark.parametrize(
    ("options", "control"),
    [
        ({"control_path": "before"}, ["before"]),
        ({"control_path": ["before", "mask"]}, ["before", "mask"]),
        ({"control_path": "old", "control_path_1": "a", "control_path_2": "", "control_path_3": "c"}, ["a", "c"]),
    ],
)
def test_folders_of_ai_toolkit_are_references_of_a_megapixel(
    options: dict[str, Any], control: list[str], tmp_path: Path
) -> None:
    result = toolkit(tmp_path, model=EDIT_PLUS, datasets=[{"folder_path": "after", "flip_x": True, **options}])
    assert [subset["control"] for subset in subsets(result)] == [control]
    assert (result.config.reference_resolution, result.config.model) == (1024, "Qwen/Qwen-Image-Edit-2509")
    (line,) = lines_about(result, "datasets.0.control_path")
    assert "mirrored" in line and "white" in line


def test_references_of_flux2_and_kontext_in_ai_toolkit(tmp_path: Path) -> None:
    datasets, arch = [{"folder_path": "after", "control_path": "before"}], {"name_or_path": "m", "arch": "flux2"}
    assert toolkit(tmp_path, model=arch, datasets=datasets).config.reference_resolution == 1024
    matched = toolkit(tmp_path, model=arch | {"model_kwargs": {"match_target_res": True}}, datasets=datasets)
    assert matched.config.reference_resolution is None and "enlarged" in lines_about(matched, "datasets.0.control")[0]
    kontext = toolkit(tmp_path, model=arch | {"arch": "flux_kontext"}, datasets=datasets)
    assert (kontext.config.variant, kontext.config.reference_resolution) == ("flux1-kontext-dev", None)
    assert "not cut as their image" in lines_about(kontext, "datasets.0.control_path")[0]
    with pytest.raises(ConfigError, match="full_size_control_images: references of 512x512"):
        squares = [datasets[0] | {"full_size_control_images": False}]
        toolkit(tmp_path, model=arch | {"arch": "flux_kontext"}, datasets=squares)


def test_what_ai_toolkit_does_with_references_that_cannot_be_expressed_is_refused(tmp_path: Path) -> None:
    for model, options, text in (
        ({"name_or_path": "m", "arch": "flux"}, {"control_path": "x"}, "control_path: 'x': is not supported"),
        (EDIT_PLUS, {"control_from_same_folder": True}, "control_from_same_folder"),
        (EDIT_PLUS, {"controls": ["depth"]}, "controls"),
        (EDIT_PLUS, {"control_path": [1]}, "control_path: expected a folder or a list of folders"),
        ({"name_or_path": "m", "arch": "qwen_image_edit"}, {}, "Qwen-Image-Edit of August 2025"),
        (EDIT_PLUS | {"name_or_path": "Qwen/Qwen-Image-Edit"}, {}, "an editing model"),
        ({"name_or_path": "Qwen/Qwen-Image-Edit-2509", "arch": "qwen_image"}, {}, "an editing model"),
    ):
        with pytest.raises(ConfigError, match=text):
            toolkit(tmp_path, model=model, datasets=[{"folder_path": "after", **options}])


def test_samples_of_ai_toolkit_have_their_references(tmp_path: Path) -> None:
    samples = [{"prompt": "a", "ctrl_img_1": "x.png", "ctrl_img_2": "y.png"}, {"prompt": "b --ctrl_img z.png"}]
    result = toolkit(tmp_path, model=EDIT_PLUS, sample={"sample_every": 5, "samples": samples})
    first, second = result.config.sample_prompts
    assert first.endswith("--ci x.png --ci y.png") and "b --ci z.png" in second


def musubi(tmp_path: Path, dataset: str, script: str = "qwen_image", options: str = "") -> Imported:
    (tmp_path / "set.toml").write_text(f"[[datasets]]\nimage_directory = 'after'\n{dataset}\n", "utf-8")
    path = tmp_path / "train.sh"
    path.write_text(
        f"accelerate launch {script}_train_network.py --dit m.safetensors --dataset_config set.toml "
        f"--network_module networks.lora_{script} --timestep_sampling shift {options}", "utf-8",
    )  # fmt: skip
    return import_config(path)


def test_versions_of_qwen_image_edit_in_musubi_tuner(tmp_path: Path) -> None:
    control = "control_directory = 'before'"
    for options, variant in (
        ("--model_version edit-2511", "qwen-image-edit-2511"), ("--edit_plus", "qwen-image-edit-2509"),
    ):  # fmt: skip
        result = musubi(tmp_path, control, options=options)
        assert result.config.variant == variant
        assert [subset["control"] for subset in subsets(result)] == [["before"]]
        assert "not cut as their image" in lines_about(result, "dataset_config.datasets.0.control_directory")[0]
    for version in ("--model_version edit", "--edit", "--model_version layered"):
        with pytest.raises(ConfigError, match="a variant of Qwen-Image that cannot be trained here"):
            musubi(tmp_path, control, options=version)
    with pytest.raises(ConfigError, match=r"control_directory: 'before': a dataset is a folder of images"):
        musubi(tmp_path, control)
    with pytest.raises(ConfigError, match=r"image_jsonl_file: .*metadata\.jsonl"):
        musubi(tmp_path, "image_jsonl_file = 'a.jsonl'", options="--edit_plus")


@pytest.mark.parametrize(
    ("options", "side", "text"),
    [
        ("no_resize_control = true", 1024, ""),
        ("no_resize_control = true\ncontrol_resolution = [768, 768]", 768, ""),
        ("control_resolution = [512, 512]", 512, "are not enlarged here"),
        ("", None, "not cut as their image"),
    ],
)
def test_areas_of_references_in_musubi_tuner(options: str, side: int | None, text: str, tmp_path: Path) -> None:
    result = musubi(tmp_path, f"control_directory = 'before'\n{options}", "flux_2", "--model_version klein-base-4b")
    assert result.config.reference_resolution == side
    reported = [line for line in result.no_equivalent if "references" in line]
    assert (text in reported[0]) if text else not reported


def tuner(tmp_path: Path, *backends: dict[str, Any], **options: Any) -> Imported:
    images = {"id": "after", "type": "local", "instance_data_dir": "after", "crop": False, "resolution": 1024}
    images["caption_strategy"] = "textfile"
    listed = [images | {"conditioning_data": "before"}, *backends]
    (tmp_path / "backends.json").write_text(json.dumps(listed), "utf-8")
    table = {**TUNER, "model_family": "qwen_image", "model_flavour": "edit-v2", "data_backend_config": "backends.json"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(table | options), "utf-8")
    return import_config(path)


REFERENCES = {
    "id": "before", "type": "local", "dataset_type": "conditioning", "conditioning_type": "reference_loose",
    "instance_data_dir": "before", "resolution": 0.25, "resolution_type": "area",
}  # fmt: skip


def test_backends_of_references_in_simpletuner(tmp_path: Path) -> None:
    result = tuner(tmp_path, REFERENCES)
    assert [subset["control"] for subset in subsets(result)] == [["before"]]
    assert (result.config.model, result.config.reference_resolution) == ("Qwen/Qwen-Image-Edit-2509", 512)
    strict = tuner(tmp_path, REFERENCES | {"conditioning_type": "reference_strict"}, model_flavour="edit-v3")
    assert (strict.config.model, strict.config.reference_resolution) == ("Qwen/Qwen-Image-Edit-2511", None)
    kontext = tuner(tmp_path, REFERENCES, model_family="flux", model_flavour="kontext").config
    assert (kontext.model, kontext.variant) == ("black-forest-labs/FLUX.1-Kontext-dev", "flux1-kontext-dev")


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({"conditioning_type": "controlnet"}, {}, "is not a reference"),
        ({"type": "huggingface"}, {}, "references are images in a folder"),
        ({"id": "other"}, {}, "'before' is not the id of a backend of references"),
        ({}, {"model_flavour": "edit-v1"}, "August 2025"),
        ({}, {"model_flavour": "edit-v2+"}, "2509 with the times of 2511"),
        ({}, {"model_flavour": "v1.0"}, "conditioning"),
    ],
)
def test_what_simpletuner_does_with_references_that_cannot_be_expressed_is_refused(
    change: dict[str, Any], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        tuner(tmp_path, REFERENCES | change, **options)
