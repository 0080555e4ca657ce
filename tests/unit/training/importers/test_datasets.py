"""Folders, resolutions and tables of the dataset in an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import import_config, import_text
from tests.unit.training.importers.small_imports import ONE, SHELL, TOOLKIT, TUNER, imported, toolkit


def test_resolutions_are_datasets(tmp_path: Path) -> None:
    result = toolkit(
        tmp_path,
        datasets=[
            {"folder_path": "x", "resolution": [512, 1024], "num_repeats": 2},
            {"folder_path": "reg", "is_reg": True},
        ],
    )
    assert isinstance(result.config.dataset, dict)
    rows = [
        (t["resolution"], t["subsets"][0]["image_dir"], t["subsets"][0].get("is_reg"))
        for t in result.config.dataset["datasets"]
    ]
    assert rows == [(512, "x", None), (1024, "x", None), (512, "reg", True)]
    assert (result.config.epsilon, result.config.timestep_sampling) == (1e-6, "sigmoid")
    again = tmp_path / "ours.toml"
    again.write_text(result.config.to_toml(), "utf-8")
    assert TrainConfig.load(again).dataset == result.config.dataset


def test_the_tables_of_an_import_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbered folders, a regularization folder and two resolutions, relative to the current folder."""
    from PIL import Image

    from inweave.training.data.reader import read_dataset

    for name in ("train/3_cat", "reg/1_animal"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (64, 64), (9, 9, len(name))).save(tmp_path / name / "a.png")
    monkeypatch.chdir(tmp_path)
    c = import_text(f"{SHELL} --train_data_dir train --reg_data_dir reg --caption_prefix 'x, '", "a.sh").config
    assert isinstance(c.dataset, dict)
    rows = [(e.repeats, e.regularization, e.captions, e.subset.prefix) for e in read_dataset(c.dataset).examples]
    assert rows == [(3, False, ("cat",), "x, "), (3, True, ("animal",), "x, ")]
    (tmp_path / "train" / "a.txt").write_text("a cat")
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "train" / "a.png")
    both = toolkit(tmp_path, datasets=[{"folder_path": "train", "resolution": [32, 64]}]).config
    assert isinstance(both.dataset, dict)
    assert [each.subset.resolution for each in read_dataset(both.dataset).examples] == [(32, 32), (64, 64)]
    with pytest.raises(
        ConfigError, match=r"dataset: datasets\[0\]\.subsets\[0\]\.image_dir: expected the path of a folder"
    ):
        read_dataset({"datasets": [{"subsets": [{"image_dir": "none"}]}]})


def test_a_folder_of_the_command_is_read_as_the_file_says(tmp_path: Path) -> None:
    """Without a dataset its trainer's options of one are written; with one, that folder's own stay."""
    tuner = imported(tmp_path, {**TUNER, "loss_type": "huber"}).config
    assert (tuner.resolution, tuner.caption_extensions, tuner.crop, tuner.upscale) == (1024, (".txt",), "center", True)
    assert (tuner.loss, tuner.huber_c, tuner.huber_schedule) == ("huber", 0.1, "snr")
    one = imported(tmp_path, ONE).config
    assert (one.resolution, one.caption_extensions, one.crop, one.flip) == (512, (".txt",), "random", False)
    path = tmp_path / "job.json"
    job: dict[str, Any] = {"job": "extension", "config": {"name": "n", "process": [{**TOOLKIT, "datasets": [
        {"folder_path": "a", "resolution": [512, 768], "num_repeats": 3}]}]}}  # fmt: skip
    path.write_text(json.dumps(job), "utf-8")
    c = import_config(path, dataset="b").config
    assert isinstance(c.dataset, dict)
    tables = [
        (table["resolution"], *(table["subsets"][0][key] for key in ("image_dir", "num_repeats")))
        for table in c.dataset["datasets"]
    ]
    assert tables == [(512, "b", 3), (768, "b", 3)]
    assert import_config(path, dataset="b.toml").config.dataset == "b.toml"
    job["config"]["process"][0]["datasets"].append({"folder_path": "c"})
    path.write_text(json.dumps(job), "utf-8")
    several = import_config(path, dataset="b")
    assert several.config.dataset == "b" and any("has several folders" in note for note in several.notes)


def test_what_differs_although_no_setting_does_is_reported(tmp_path: Path) -> None:
    def about(result: Any) -> set[str]:
        return {line.partition(":")[0] for line in result.notes} & {"buckets", "captions"}

    assert about(imported(tmp_path, ONE)) == about(toolkit(tmp_path)) == {"buckets"}
    assert about(import_text(SHELL, "train.sh", dataset="pictures")) == {"captions"}
    assert about(import_text(f"{SHELL.rstrip()} --enable_wildcard", "train.sh", dataset="pictures")) == set()


KOHYA_FILE = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = '{folder}'\nclass_tokens = 'cat'\n"


@pytest.mark.parametrize(
    "place", ["dataset.toml", "{here}/dataset.toml", "/home/me/dataset.toml", "C:\\a\\dataset.toml"]
)
def test_what_a_dataset_file_leaves_out_is_what_kohya_does(place: str, tmp_path: Path) -> None:
    """No buckets, sides up to 1024, captions in .caption files without wildcards: fluxgym's runs, for one."""
    (tmp_path / "dataset.toml").write_text(KOHYA_FILE.format(folder="x"), "utf-8")
    line = f"{SHELL} --dataset_config '{place.format(here=tmp_path)}' --keep_tokens 2"
    (tmp_path / "train.sh").write_text(line, "utf-8")
    c = import_config(tmp_path / "train.sh").config
    assert (c.buckets, c.upscale, c.max_bucket, c.min_bucket, c.bucket_rule) == (False, True, 1024, 256, "kohya")
    assert (c.caption_extensions, c.keep_tokens) == ((".caption",), 2)
    assert isinstance(c.dataset, dict)
    assert c.dataset["general"] == {"balance_regularization": True}
    assert c.wildcards is False
    assert c.dataset["datasets"][0]["subsets"] == [{"image_dir": "x", "class_tokens": "cat"}]


def test_tables_of_a_dataset_file_are_trained_with_kohyas_buckets(tmp_path: Path) -> None:
    """What the file says counts before the command, and the command before kohya's default."""
    from PIL import Image

    from inweave.training.data.batches import arrange
    from inweave.training.data.buckets import BucketRules
    from inweave.training.data.reader import read_dataset

    (tmp_path / "x").mkdir()
    Image.new("RGB", (2000, 1500)).save(tmp_path / "x" / "a.png")

    def bucket(general: str, flags: str) -> str:
        text = f"[general]\n{general}\n{KOHYA_FILE.format(folder=tmp_path / 'x')}"
        (tmp_path / "dataset.toml").write_text(text, "utf-8")
        (tmp_path / "train.sh").write_text(f"{SHELL} --dataset_config dataset.toml {flags}", "utf-8")
        c = import_config(tmp_path / "train.sh").config
        assert isinstance(c.dataset, dict)
        rules = BucketRules(1024, c.bucket_step, c.min_bucket, c.max_bucket, c.upscale, c.buckets, c.bucket_rule)
        (fit,), _ = arrange(read_dataset(c.dataset), rules)
        return str(fit and fit.bucket)

    assert bucket("", "--enable_bucket --bucket_no_upscale") == "512x384"
    assert bucket("", "") == bucket("enable_bucket = false", "--enable_bucket") == "512x512"
    assert bucket("enable_bucket = true\nmin_bucket_reso = 64", "--bucket_reso_steps 64") == "576x448"


def test_paths_of_another_machine_are_named_with_what_to_pass(tmp_path: Path) -> None:
    command = f"{SHELL} --train_data_dir 'D:\\photos\\train' --reg_data_dir /home/nobody/reg"
    lines = [line for line in import_text(command, "a.sh").no_equivalent if "there is no such folder" in line]
    assert len(lines) == 2 and all("name another with --dataset" in line for line in lines)
    result = import_text(f"{SHELL}/home/nobody/m.safetensors", "a.sh", dataset="photos")
    assert not any("there is no such folder" in line for line in result.no_equivalent)


@pytest.mark.parametrize("path", ["/home/nobody/set.toml", "C:\\\\data\\\\set.toml"])
def test_a_dataset_file_of_another_machine_is_not_written_as_a_path(path: str, tmp_path: Path) -> None:
    command = f"{SHELL.rstrip()} --dataset_config '{path}'"
    with pytest.raises(ConfigError, match=r"dataset_config \(dataset\): is required"):
        import_text(command, "train.sh")
    result = import_text(command, "train.sh", dataset="photos")
    assert result.config.dataset == "photos"
    assert any("put it next to this file, or name a folder of images with --dataset" in s for s in result.no_equivalent)
