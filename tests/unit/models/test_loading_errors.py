"""What cannot be loaded is refused with the file, the reason and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, FormatError, InweaveError, RequestError, TargetError
from inweave.models import open as opening
from inweave.models.model import load_model
from inweave.models.single import _refuse_relative as refuse_file
from tests.peers import tiny_models as tiny

pytestmark = pytest.mark.usefixtures("quick_tokenizers")


def changed_index(folder: Path, **entries: Any) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | entries))


def test_a_missing_part(folder: Path) -> None:
    changed_index(folder, text_encoder=[None, None])
    with pytest.raises(FormatError, match="text_encoder missing"):
        load_model(folder)
    with pytest.raises(ConfigError, match="has no part 'text_encoder'; its parts are"):
        load_model(folder, parts={"text_encoder": tiny.folder("sd1.5") / "text_encoder"})


def test_classes_that_are_not_ours(folder: Path) -> None:
    changed_index(folder, unet=["diffusers", "UNetSpatioTemporalConditionModel"])
    with pytest.raises(FormatError, match=r"'UNetSpatioTemporalConditionModel'; known are UNet2DConditionModel"):
        load_model(folder)
    changed_index(folder, unet=["diffusers", "AutoencoderKL"])
    with pytest.raises(InweaveError, match="AutoencoderKL"):
        load_model(folder)
    changed_index(folder, unet=["diffusers", "UNet2DConditionModel"], tokenizer=["os", "system"])
    with pytest.raises(FormatError, match="a tokenizer of class 'system'"):
        load_model(folder)


def test_no_model_at_all(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no model_index\.json"):
        load_model(tmp_path)


def test_pickles_are_named_and_not_opened(folder: Path) -> None:
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    with pytest.raises(FormatError, match=r"diffusion_pytorch_model\.bin is a pickle, which inweave never opens"):
        load_model(folder)


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"diffusion_pytorch_model\.safetensors"):
        load_model(folder)


def test_no_configuration(folder: Path) -> None:
    (folder / "unet" / "config.json").unlink()
    with pytest.raises(FormatError, match=r"unet/config\.json"):
        load_model(folder)


def test_a_configuration_of_another_size_lists_what_differs(folder: Path) -> None:
    file = folder / "unet" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cross_attention_dim": 24}))
    with pytest.raises(TargetError, match=r"does not fit the model \(\d+ problems\)[\s\S]*attn2\.to_k\.weight"):
        load_model(folder)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block_out_channels": [8, 8]}))
    with pytest.raises(FormatError, match="unet: its configuration cannot be used"):
        load_model(folder)


def test_a_whole_configuration_is_only_for_single_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match="config is for single-file checkpoints"):
        load_model(folder, config=folder)


def test_qwen_image_edit_is_not_run_as_qwen_image(tmp_path: Path) -> None:
    """Its networks are the same: only names tell, of its pipeline, its file, or in metadata."""
    index = tmp_path / "model" / "model_index.json"
    shutil.copytree(tiny.folder("qwen-image"), tmp_path / "model")
    plain = json.loads(index.read_text())
    index.write_text(json.dumps(plain | {"_class_name": "QwenImageEditPipeline"}))
    with pytest.raises(FormatError, match=r"model_index.json: 'QwenImageEditPipeline' is Qwen-Image-Edit, which has"):
        load_model(tmp_path / "model")
    with pytest.raises(FormatError, match="is Qwen-Image-Edit"):
        load_model("qwen-image-edit")
    family = load_model(tiny.folder("qwen-image")).family
    family.refuse_relative("QwenImagePipeline", "my-edited-qwen", "Qwen-Image-2512", None, "")
    for text in ("qwen_image_edit_2509_fp8_e4m3fn", "qwen-image-edit/lora"):
        with pytest.raises(FormatError, match=text):
            family.refuse_relative("model", text)
    variant, file = family.variant("qwen-image"), tmp_path / "qwen_image_edit_bf16.safetensors"
    with pytest.raises(FormatError, match=r"edit_bf16\.safetensors: .*--variant qwen-image-edit-2509"):
        refuse_file(file, variant, file.stem)


def test_names_that_mean_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or folder.*inweave/emoji is built in"):
        load_model("no-such-model")
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_model(tmp_path / "gone.safetensors")
    with pytest.raises(ConfigError, match="no model variant is called 'sd9'"):
        load_model(tiny.folder("sd1.5"), variant="sd9")


def test_the_hub_is_not_queried_unless_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    requests: list[tuple[str, bool]] = []
    real = huggingface_hub.snapshot_download

    def spy(repo: str, **options: Any) -> str:
        requests.append((repo, options["local_files_only"]))
        return real(repo, cache_dir=tmp_path, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", spy)
    with pytest.raises(RequestError, match=r"someone/something: not on this machine.*--allow-download"):
        opening.open_model("someone/something")
    with pytest.raises(RequestError, match=r"stable-diffusion-xl-base-1\.0: not on this machine"):
        opening.open_model("sdxl")
    assert requests == [("someone/something", True), ("stabilityai/stable-diffusion-xl-base-1.0", True)]
