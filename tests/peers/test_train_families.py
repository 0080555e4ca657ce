"""Every family trains, and diffusers generates with the file what inweave generates with it.

Three steps of a real run on tiny models, always the same batch with the same noise, so that the loss has to fall.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from inweave.errors import ConfigError  # noqa: E402
from inweave.exchange.check import check  # noqa: E402
from inweave.models.model import file_index  # noqa: E402
from inweave.training.loop import Run  # noqa: E402
from tests.peers.test_families import FLOWS, PROMPT, assert_other, assert_same, ours, requests, theirs  # noqa: E402
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, shared_model, task_on  # noqa: E402

VARIANTS = (
    "sd1.5", "sd2.1", "sdxl", "sd3-medium", "sd3.5-medium", "flux1-dev", "flux1-schnell", "z-image-turbo", "qwen-image",
)  # fmt: skip
STEPS = 3


def trained(variant: str, folder: Path, **settings: Any) -> tuple[Path, list[float]]:
    """(the file, the loss at every step)."""
    data, model = make_set(folder / "set"), fresh_model(variant)
    settings = {
        "targets": "attention-mlp", "steps": STEPS, "learning_rate": 1e-2, "max_grad_norm": 0,
        "output": str(folder / "out"), **settings,
    }  # fmt: skip
    task = task_on(data, model=model, **settings)
    task.prepare()
    same = sample_inputs(task)
    task.sample_batch = lambda batch, generators: same  # type: ignore[method-assign]
    report = Run(task, model, file_index(model), task.config).train()
    with torch.no_grad():
        return report.path, [*report.losses, float(task.loss(same))]


def keys(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def drawn_by_diffusers(variant: str, file: Path) -> Any:
    _, other = requests(variant)
    pipe = theirs(variant)
    try:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="style")
        return pipe(PROMPT, **other).images[0]
    finally:
        pipe.unload_lora_weights()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("variant", "text"), [(v, v in ("sd1.5", "sdxl", "sd3-medium", "flux1-dev")) for v in VARIANTS], ids=VARIANTS
)
def test_every_family(variant: str, text: bool, tmp_path: Path) -> None:
    """SD 1, 2 and XL in kohya's dialect; of the others with text encoders diffusers reads its own only."""
    flow = variant.startswith(FLOWS)
    file, losses = trained(
        variant, tmp_path, train_text_encoders=text, cache_text=not text, dialect="diffusers" if flow else "kohya"
    )
    assert sorted(losses, reverse=True) == losses and losses[-1] < 0.995 * losses[0]
    verdict = check(file, file_index(shared_model(variant)))
    assert verdict.ok and verdict.report.placed == verdict.report.tensors > 0
    clips = {"sd1": 1, "sd2": 1, "sdx": 2, "sd3": 2, "flu": 1}.get(variant[:3], 0)
    assert set(verdict.report.components) == {"unet", *(f"te{n + 1}" for n in range(clips) if text)}
    mine, _ = requests(variant)
    actual = ours(variant)(PROMPT, **mine, loras=[str(file)]).images[0]
    assert_other(actual, ours(variant)(PROMPT, **mine).images[0])
    assert_same(actual, drawn_by_diffusers(variant, file))


@pytest.mark.parametrize(
    ("variant", "roots"),
    [
        ("sd1.5", {"lora_te_text_model_encoder_layers", "lora_unet_down_blocks", "lora_unet_mid_block",
                   "lora_unet_up_blocks"}),
        ("sdxl", {"lora_te1_text_model_encoder_layers", "lora_te2_text_model_encoder_layers", "lora_unet_input_blocks",
                  "lora_unet_middle_block", "lora_unet_output_blocks"}),
        ("sd3-medium", {"lora_te1_text_model_encoder_layers", "lora_te2_text_model_encoder_layers",
                        "lora_unet_joint_blocks"}),
        ("flux1-dev", {"lora_te1_text_model_encoder_layers", "lora_unet_double_blocks", "lora_unet_single_blocks"}),
    ],
)  # fmt: skip
def test_kohya_keys_are_those_other_programs_look_for(variant: str, roots: set[str], tmp_path: Path) -> None:
    file, _ = trained(variant, tmp_path, train_text_encoders=True, cache_text=False, steps=1)
    modules = {key.partition(".")[0] for key in keys(file)}
    assert {key.partition(".")[2] for key in keys(file)} == {"lora_down.weight", "lora_up.weight", "alpha"}
    assert {root for root in roots if any(module.startswith(root) for module in modules)} == roots
    assert all(module.startswith(tuple(roots)) for module in modules)
    ends = {module.partition("_layers_")[2][2:] for module in modules if "_te" in module}
    assert ends == {
        "self_attn_q_proj",
        "self_attn_k_proj",
        "self_attn_v_proj",
        "self_attn_out_proj",
        "mlp_fc1",
        "mlp_fc2",
    }
    assert check(file, file_index(shared_model(variant))).ok


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", ["sd3-medium", "flux1-dev", "z-image-turbo", "qwen-image"])
def test_kohya_files_of_transformers_give_the_same_image(variant: str, tmp_path: Path) -> None:
    """Fused in the file, apart in the model: the same image as from diffusers' dialect."""
    pictures = []
    for dialect in ("kohya", "diffusers"):
        file, _ = trained(variant, tmp_path / dialect, dialect=dialect)
        mine, _ = requests(variant)
        pictures.append(ours(variant)(PROMPT, **mine, loras=[str(file)]).images[0])
    assert_same(*pictures)


@pytest.mark.parametrize("variant", ["sd1.5-inpaint", "sd2-inpaint", "sdxl-inpaint"])
def test_inpainting_models_are_trained_through_their_base(variant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train on the model it was made from"):
        task_on(make_set(tmp_path / "set"), model=shared_model(variant))
    if variant == "sd1.5-inpaint":  # and that file fits
        file, _ = trained("sd1.5", tmp_path, steps=1, train_text_encoders=True, cache_text=False)
        assert check(file, file_index(shared_model(variant))).ok
