"""ai-toolkit's jobs become ours, in YAML and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import import_config
from inweave.training.importers.files import leaves_of
from inweave.training.output.sample_prompts import sample_requests
from tests.unit.training.importers.other_trainers import AI_TOOLKIT, accounted, write_text
from tests.unit.training.importers.small_imports import TOOLKIT, refusal, toolkit


def test_ai_toolkit(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    result = import_config(write_text(tmp_path, AI_TOOLKIT))
    c = result.config
    assert result.kind == "ai-toolkit"
    assert (c.name, c.output, c.device, c.trigger, c.model) == (
        "harbour_v2", "output", "cuda:0", "h4rbour", "black-forest-labs/FLUX.1-dev",
    )  # fmt: skip
    assert (c.network, c.rank, c.alpha, c.rules[0].skip) == ("lora", 32, 32, True)
    assert re.search(c.rules[0].pattern, "single_transformer_blocks.0.attn.to_q")
    assert (c.steps, c.learning_rate, c.weight_decay, c.optimizer, c.ema_decay) == (1500, 1e-4, 1e-4, "adamw8bit", 0.99)
    assert (c.objective, c.timestep_sampling, c.precision, c.gradient_checkpointing) == (
        "flow",
        "sigmoid",
        "bf16",
        "full",
    )
    assert isinstance(c.dataset, dict)
    sets = [
        (each["resolution"], each["subsets"][0]["image_dir"], each["subsets"][0]["num_repeats"])
        for each in c.dataset["datasets"]
    ]
    assert sets == [*((side, "/data/harbour", 3) for side in (512, 768, 1024)), (512, "/data/boats", 1)]
    assert (c.caption_extensions, c.caption_dropout) == ((".txt",), 0.05)
    assert (c.save_every, c.keep_last, c.sample_every, c.sample_steps, c.sample_guidance) == (250, 4, 250, 20, 4)
    assert c.sample_prompts == (
        "h4rbour at dawn --w 1024 --h 1024 --d 7", "a lighthouse, h4rbour --w 1024 --h 1024 --d 8",
    )  # fmt: skip
    assert [each.split(":")[0] for each in result.no_equivalent] == [
        "model.quantize", "dataset", "dataset",
    ]  # fmt: skip
    for name in leaves_of(yaml.safe_load(AI_TOOLKIT)):
        assert accounted(result, name.removeprefix("config.process.0.")), name


@pytest.mark.parametrize(("kind", "network"), [("lora", "lora"), ("lokr", ""), ("dora", "")])
def test_dropout_is_between_the_factors_of_a_lora(kind: str, network: str, tmp_path: Path) -> None:
    process = {
        "network": {"type": kind, "linear": 8, "dropout": 0.1},
        "datasets": [{"folder_path": "x"}],
        "model": {"name_or_path": "m", "is_flux": True},
        "sample": {"samples": [{"prompt": "p"}]},
    }
    path = write_text(tmp_path, json.dumps({"job": "extension", "config": {"name": "n", "process": [process]}}))
    if network:
        c = import_config(path).config
        assert (c.network, c.dropout, c.hidden_dropout) == (network, 0, 0.1)
    else:
        with pytest.raises(ConfigError, match=f"network.dropout: 0.1: {kind} has dropout on the adapter's inputs only"):
            import_config(path)


def test_ai_toolkit_in_json_and_with_little_in_it(tmp_path: Path) -> None:
    process = {
        "network": {"type": "lora"},
        "datasets": [{"folder_path": "x"}],
        "model": {"name_or_path": "m"},
        "sample": {"samples": [{"prompt": "p"}]},
    }
    result = import_config(
        write_text(tmp_path, json.dumps({"job": "extension", "config": {"name": "n", "process": [process]}}))
    )
    c = result.config
    assert (c.rank, c.alpha, c.steps, c.learning_rate, c.precision) == (4, 1.0, 1000, 1e-6, "fp32")
    assert c.sample_prompts == ("p",)


def test_merge_keys_mean_what_yaml_says() -> None:
    yaml = pytest.importorskip("yaml")
    from inweave.training.importers.yaml_loader import BoundedLoader

    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nz: &z {<<: [*x, *y], c: 5}\nw: {d: 1, <<: *z, a: 7}\n=: 1\n"
    assert yaml.load(text, BoundedLoader) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("arch", "kind", "alpha"),
    [("flux", "lora", 16), ("qwen_image", "lora", 16), ("sdxl", "lora", 4), ("flux", "lokr", 4)]
)  # fmt: skip
def test_adapters_of_transformers_have_no_alpha_of_their_own(
    arch: str, kind: str, alpha: float, tmp_path: Path
) -> None:
    noise = {"noise_scheduler": "ddpm"} if arch == "sdxl" else {}
    result = toolkit(
        tmp_path, network={"type": kind, "linear": 16, "linear_alpha": 4}, model={"name_or_path": "m", "arch": arch},
        train={**TOOLKIT["train"], **noise},
    )  # fmt: skip
    assert result.config.alpha == alpha
    assert any(note.startswith("network.linear_alpha: in ai-toolkit adapters") for note in result.notes) is (
        alpha == 16
    )


def test_steps_are_batches_where_gradients_are_accumulated_in_the_older_way(tmp_path: Path) -> None:
    prompts = {"prompts": ["p"], "sample_every": 8}
    older = {**TOOLKIT["train"], "gradient_accumulation_steps": 4}
    c = toolkit(tmp_path, train=older, save={"save_every": 40}, sample=prompts).config
    assert (c.steps, c.gradient_accumulation, c.save_every, c.sample_every) == (5, 4, 10, 2)
    with pytest.raises(ConfigError, match="ai-toolkit counts batches, and steps = 21 is not a multiple of it"):
        toolkit(tmp_path, train={**older, "steps": 21}, save={"save_every": 40})
    c = toolkit(tmp_path, train={**TOOLKIT["train"], "gradient_accumulation": 4}).config
    assert (c.steps, c.gradient_accumulation) == (20, 4)


def test_a_flipped_folder_is_seen_twice_as_often_as_one_that_is_not(tmp_path: Path) -> None:
    folders = [{"folder_path": "a", "flip_x": True, "caption_type": "caption"}, {"folder_path": "b", "num_repeats": 3}]
    c = toolkit(tmp_path, datasets=folders).config
    assert isinstance(c.dataset, dict)
    subsets = [table["subsets"][0] for table in c.dataset["datasets"]]
    assert [(each["flip_aug"], each["num_repeats"]) for each in subsets] == [(True, 2), (False, 3)]
    assert [each["caption_extension"] for each in subsets] == [".caption", ".txt"]
    single = toolkit(tmp_path, datasets=folders[:1]).config
    assert (single.dataset, single.flip) == ("a", True)


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"max_denoising_steps": 500}, "of which 0 is pure noise"),
        ({"ema_config": {"use_ema": True, "use_feedback": True}}, "the average does not change the weights"),
        ({"loss_type": "wavelet"}, "'wavelet' is not supported, only mse, l1"),
        ({"timestep_type": "shift"}, "'shift' is not supported"),
    ],
)
def test_what_ai_toolkit_alone_does_is_refused(train: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        toolkit(tmp_path, train={**TOOLKIT["train"], **train})
    assert len(caught.value.problems) == 1


def test_rates_and_losses(tmp_path: Path) -> None:
    train = {
        "steps": 9, "lr": 1e-4, "unet_lr": 2e-4, "train_text_encoder": True, "loss_type": "mae", "optimizer": "adamw8",
        "ema_config": {"use_ema": True, "ema_decay": 0.9},
    }  # fmt: skip
    c = toolkit(tmp_path, train=train, model={"name_or_path": "m"}, network={"rank": 8, "linear": 4}).config
    assert (c.learning_rate, c.text_encoder_learning_rate, c.loss, c.ema_decay, c.weight_decay) == (
        2e-4, 1e-4, "l1", 0.9, 0.0,
    )  # fmt: skip
    assert c.rank == 8


@pytest.mark.parametrize("arch", ["flux2", "flux2_klein_4b", "flux2_klein_9b"])
def test_flux2_is_adapted_in_its_blocks(arch: str, tmp_path: Path) -> None:
    result = toolkit(tmp_path, model={"name_or_path": "black-forest-labs/FLUX.2-klein-base-4B", "arch": arch})
    c = result.config
    assert (c.model, c.objective, c.train_text_encoders) == ("black-forest-labs/FLUX.2-klein-base-4B", "flow", False)
    assert any("network.type" in line and "here each has its own" in line for line in result.no_equivalent)
    pattern = c.targets[0].partition("|.*layers")[0]
    names = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.3.attn.to_out", "context_embedder")
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [True, True, False]


def test_refiners_of_z_image_are_not_adapted(tmp_path: Path) -> None:
    (pattern,) = list(toolkit(tmp_path, model={"name_or_path": "m", "arch": "zimage"}).config.targets)
    assert re.fullmatch(pattern, "layers.3.adaLN_modulation.0") and re.fullmatch(pattern, "layers.3.attention.to_q")
    assert not re.fullmatch(pattern, "noise_refiner.0.attention.to_q")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"type": "concept_slider"}, "'concept_slider' is not the training of a LoRA"),
        ({"slider": {"targets": [{"positive": "x"}]}}, "a slider"),
        ({"network": None}, "a full fine-tune"),
        (
            {"model": {"name_or_path": "m", "arch": "wan22_14b:t2v"}},
            "'wan22_14b:t2v' is a model that cannot be trained",
        ),
        ({"model": {"name_or_path": "m", "is_lumina2": True}}, "Lumina"),
        ({"model": {"name_or_path": "black-forest-labs/FLUX.1-Kontext-dev", "arch": "flux"}}, "Kontext"),
        ({"model": {"name_or_path": "m", "arch": "flux", "assistant_lora_path": "a"}}, "model.assistant_lora_path"),
        ({"train": {**TOOLKIT["train"], "timestep_type": "lumina2_shift"}}, "'lumina2_shift' is not supported"),
        ({"datasets": [{"folder_path": "x", "control_path": "y"}]}, "datasets.0.control_path"),
    ],
)
def test_ai_toolkit_refuses_by_name(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        toolkit(tmp_path, **changes)
    assert reason in refusal(caught)


def test_weighted_timesteps_are_linear_ones_with_weights(tmp_path: Path) -> None:
    for kind, weighting in (("weighted", "ai-toolkit"), ("linear", "none")):
        c = toolkit(tmp_path, train={**TOOLKIT["train"], "timestep_type": kind}).config
        assert (c.timestep_sampling, c.timestep_weighting) == ("uniform", weighting)


def test_an_assistant_is_a_file_and_not_a_download(tmp_path: Path) -> None:
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(b"")
    result = toolkit(tmp_path, model={**TOOLKIT["model"], "assistant_lora_path": str(file)})
    assert result.config.assistant == str(file)
    assert any("samples show the model with it" in line for line in result.no_equivalent)
    hub = {**TOOLKIT["model"], "assistant_lora_path": "ostris/FLUX.1-schnell-training-adapter"}
    with pytest.raises(ConfigError, match=r"is not downloaded; download it, and set assistant.*--set assistant="):
        toolkit(tmp_path, model=hub)


def test_samples_carry_over_with_their_own_values(tmp_path: Path) -> None:
    sample = {
        "width": 512, "height": 768, "neg": "blurry", "seed": 3,
        "samples": [{"prompt": "a --w 640", "seed": 9, "guidance_scale": 4.5}, {"prompt": "b", "neg": "dark"}],
    }  # fmt: skip
    c = toolkit(tmp_path, sample=sample, model={"name_or_path": "m", "arch": "sdxl"},
                train={**TOOLKIT["train"], "noise_scheduler": "ddpm"}).config  # fmt: skip
    assert c.sample_prompts == ("a --w 640 --n blurry --h 768 --d 9 --l 4.5", "b --n dark --w 512 --h 768")
    first, second = (request for _, request in sample_requests(c))
    assert (first.width, first.seed, second.negative_prompt, second.seed) == (640, 9, "dark", 3)
