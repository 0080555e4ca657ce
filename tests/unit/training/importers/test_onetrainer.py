"""OneTrainer's files become ours: whole configurations, presets, old versions, and the concepts next to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import import_config
from inweave.training.importers.files import leaves_of
from inweave.training.optim.schedules import learning_rate_at
from tests.unit.training.importers.other_trainers import ONE_TRAINER, accounted, write_text
from tests.unit.training.importers.small_imports import GUI, ONE, imported


def test_one_trainer(tmp_path: Path) -> None:
    path = write_text(tmp_path, json.dumps(ONE_TRAINER))
    with pytest.raises(ConfigError, match=r"perturbation_noise_weight: 0\.2"):
        import_config(path)
    result = import_config(path, without=["perturbation_noise_weight"])
    c = result.config
    assert result.kind == "OneTrainer"
    assert (c.network, c.rank, c.alpha, c.targets) == ("dora", 24, 12, (r".*attn.*|.*ff\.net.*",))
    assert (c.epochs, c.batch_size, c.learning_rate, c.lr_scheduler, c.warmup, c.cosine_cycles) == (
        40,
        2,
        3e-4,
        "cosine",
        100,
        1,
    )
    assert (c.ema_decay, c.precision, c.save_dtype, c.resolution, c.device) == (0.998, "bf16", "bf16", 768, "cuda")
    assert (c.optimizer, c.betas, c.optimizer_args["d_coef"]) == ("prodigy", (0.9, 0.99), 2.0)
    assert (c.timestep_sampling, c.timestep_shift, c.logit_std, c.caption_dropout, c.guidance) == (
        "shift",
        None,
        1.0,
        0.1,
        1.0,
    )
    assert isinstance(c.dataset, dict)
    assert [each["subsets"][0]["image_dir"] for each in c.dataset["datasets"]] == ["pictures/knight", "pictures/armour"]
    assert c.dataset["datasets"][1]["subsets"][0]["flip_aug"] is False  # OneTrainer's default
    assert (c.flip, c.shuffle_tags, c.keep_tokens, c.caption_variants) == (True, True, 1, 3)
    assert (c.output, c.name, c.save_every, c.train_text_encoders) == ("models", "knight", 500, False)
    missed = {each.split(":")[0] for each in result.no_equivalent}
    assert missed == {
        "transformer.weight_dtype",
        "perturbation_noise_weight",
        "something_new.deep.0.x",
        "ema_update_step_interval",
    }
    for name in leaves_of(ONE_TRAINER):
        assert accounted(result, name), name
    assert "a-secret" not in repr(result)


def test_one_trainer_presets_only_hold_what_differs(tmp_path: Path) -> None:
    preset = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "learning_rate": 0.0003,
              "base_model_name": "x", "concept_file_name": "concepts/c.json", "unet": {"train": True},
              "text_encoder": {"train": False}, "text_encoder_2": {"train": False}, "loss_weight_fn": "MIN_SNR_GAMMA",
              "resolution": "512,1024", "layer_filter_preset": "mine", "layer_filter": "attn1,attn2"}  # fmt: skip
    path = write_text(tmp_path, json.dumps(preset))
    with pytest.raises(ConfigError, match=r"concept_file_name \(dataset\): is required"):
        import_config(path)
    assert import_config(path, dataset="there").config.dataset == "there"
    (tmp_path / "concepts").mkdir()
    write_text(tmp_path / "concepts", json.dumps([{"path": "off", "enabled": False}, {"path": "on"}]), "c.json")
    result = import_config(path)
    c = result.config
    assert (c.rank, c.alpha, c.warmup, c.precision) == (16, 1.0, 200, "fp16")
    assert (c.min_snr_gamma, c.targets) == (5, (".*attn1.*|.*attn2.*",))
    assert isinstance(c.dataset, dict)
    assert [(each["resolution"], each["subsets"][0]["image_dir"]) for each in c.dataset["datasets"]] == [
        (512, "on"),
        (1024, "on"),
    ]
    assert c.epochs == 50 and any("100 epochs are 50" in each for each in result.notes)


def test_one_trainer_of_long_ago(tmp_path: Path) -> None:
    old = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_15", "base_model_name": "x", "optimizer": "ADAMW",
           "learning_rate": 0.0003, "unet_learning_rate": 0.0001, "text_encoder_learning_rate": 0.0002,
           "train_text_encoder": True, "text_encoder_layer_skip": 1, "concepts": [{"path": "x"}], "weight_decay": 0.02,
           "timestep_distribution": "LOGIT_NORMAL", "gradient_checkpointing": "CPU_OFFLOADED", "text_caching": True,
           "save_after": 0, "save_after_unit": "NEVER", "train_text_encoder_epochs": 30}  # fmt: skip
    with pytest.raises(ConfigError, match="'LOGIT_NORMAL' has no equivalent"):
        import_config(write_text(tmp_path, json.dumps(old)))
    result = import_config(write_text(tmp_path, json.dumps({**old, "timestep_distribution": "UNIFORM"})))
    c = result.config
    assert (c.learning_rate, c.text_encoder_learning_rate, c.train_text_encoders, c.cache_text) == (
        1e-4,
        2e-4,
        True,
        False,
    )
    assert (c.clip_skip, c.weight_decay, c.gradient_checkpointing, c.save_every) == (2, 0.02, "full", 0)
    assert (c.epochs, c.text_encoder_stop, result.no_equivalent) == (100, 0.3, [])


def test_when_parts_stop_training(tmp_path: Path) -> None:
    preset: dict[str, Any] = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "epochs": 60}

    def stop(**parts: dict[str, Any]) -> float:
        path = write_text(tmp_path, json.dumps({**preset, **parts}))
        return import_config(path, dataset="x").config.text_encoder_stop

    def after(value: float | None, unit: str, train: bool = True) -> dict[str, Any]:
        return {"train": train, "stop_training_after": value, "stop_training_after_unit": unit}

    assert stop() == 0.5, "30 epochs, unless a file says otherwise"
    assert stop(text_encoder=after(60, "EPOCH"), text_encoder_2=after(None, "NEVER")) == 0
    assert stop(text_encoder=after(400, "STEP"), text_encoder_2=after(7, "EPOCH", train=False)) == 400
    assert stop(text_encoder=after(6, "EPOCH"), text_encoder_2=after(6, "EPOCH")) == 0.1
    with pytest.raises(
        ConfigError, match=r"text_encoder_2.stop_training_after: 7 epochs: all text encoders stop at the"
    ):
        stop(text_encoder=after(6, "EPOCH"), text_encoder_2=after(7, "EPOCH"))
    with pytest.raises(ConfigError, match=r"unet.stop_training_after: 10 epochs: the denoiser is trained to the end"):
        stop(unet=after(10, "EPOCH"))
    with pytest.raises(
        ConfigError, match=r"text_encoder.stop_training_after: 10 minutes: text encoders stop after steps"
    ):
        stop(text_encoder=after(10, "MINUTE"), text_encoder_2=after(10, "MINUTE"))


def test_uniform_times_may_be_shifted_and_a_file_without_a_method_is_a_fine_tune(tmp_path: Path) -> None:
    preset = {
        "training_method": "LORA",
        "model_type": "Z_IMAGE",
        "text_encoder": {"train": False},
        "timestep_shift": 3.0,
    }
    c = import_config(write_text(tmp_path, json.dumps(preset)), dataset="x").config
    assert (c.timestep_sampling, c.timestep_shift) == ("uniform", 3.0)
    biased = {**preset, "timestep_distribution": "LOGIT_NORMAL", "noising_bias": 0.5}
    c = import_config(write_text(tmp_path, json.dumps(biased)), dataset="x").config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_mean) == ("logit_normal", 3.0, 0.5)
    with pytest.raises(ConfigError, match="'UNIFORM' with a shift by resolution has no equivalent"):
        import_config(write_text(tmp_path, json.dumps({**preset, "dynamic_timestep_shifting": True})), dataset="x")
    minimal = {"epochs": 2, "batch_size": 2, "concepts": [{"path": "icons"}], "samples": []}
    with pytest.raises(ConfigError, match="FINE_TUNE: a full fine-tune trains the whole model"):
        import_config(write_text(tmp_path, json.dumps(minimal)))


def test_the_concepts_of_onetrainer_are_read_from_below_its_folder_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('[{"path": "/home/somebody/photos", "enabled": true}]')
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    settings = {"training_method": "LORA", "model_type": "STABLE_DIFFUSION_XL_10_BASE", "base_model_name": "x"}
    for name in (str(secret), "../../../secret.json", "link.json"):
        if name == "link.json":
            (folder / name).symlink_to(secret)
        (folder / "config.json").write_text(json.dumps({**settings, "concept_file_name": name}))
        with pytest.raises(ConfigError, match=r"concept_file_name \(dataset\): is required"):
            import_config(folder / "config.json")
    (folder / "concepts.json").write_text(secret.read_text("utf-8"), "utf-8")
    absolute = {**settings, "concept_file_name": r"C:\\OneTrainer\\concepts.json"}
    (folder / "config.json").write_text(json.dumps(absolute), "utf-8")
    result = import_config(folder / "config.json")
    assert result.config.dataset == "/home/somebody/photos"
    assert any("there is no such folder on this machine" in line for line in result.no_equivalent)


def test_steps_are_batches(tmp_path: Path) -> None:
    """A warmup and intervals are divided by the number of batches that gradients are accumulated over."""
    table = {
        **ONE,
        "gradient_accumulation_steps": 4,
        "learning_rate_warmup_steps": 102,
        "save_every": 40,
        "save_every_unit": "STEP",
    }
    c = imported(tmp_path, table).config
    assert (c.gradient_accumulation, c.warmup, c.save_every, c.upscale) == (4, 25, 10, True)
    with pytest.raises(ConfigError, match="save_every: 41: OneTrainer counts batches"):
        imported(tmp_path, {**table, "save_every": 41})
    free = imported(
        tmp_path, {**table, "optimizer": {"optimizer": "SCHEDULE_FREE_ADAMW"}, "learning_rate_scheduler": "COSINE"}
    )
    assert (free.config.warmup, free.config.lr_scheduler) == (0, "constant")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"timestep_shift": 2.0}, "sample timesteps without a shift"),
        ({"model_type": "FLUX_DEV_1", "timestep_shift": 2.0, "max_noising_strength": 0.5},
         "a range of noise levels before the shift"),
        ({"learning_rate_scheduler": "COSINE_WITH_RESTARTS"}, "is a wave here, without restarts"),
        ({"learning_rate_scheduler": "CUSTOM", "custom_learning_rate_scheduler": "mine.Curve"}, "is not a scheduler"),
        ({"k_noise_sampling": 4}, "noise is sampled without it"),
        ({"dropout_probability": 0.1, "lora_decompose": True}, "dora has dropout on the adapter's inputs only"),
        ({"dropout_probability": 0.1, "peft_type": "LOHA"}, "loha has dropout on the adapter's inputs only"),
    ],
)  # fmt: skip
def test_what_has_another_meaning_is_refused(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        imported(tmp_path, {**ONE, **changes})
    assert len(caught.value.problems) == 1
    if "dropout" in why:
        assert imported(tmp_path, {**ONE, **changes}, dropout=0.1).config.dropout == 0.1
        plain = {**ONE, **changes, "lora_decompose": False, "peft_type": "LORA"}
        c = imported(tmp_path, plain).config
        assert (c.network, c.dropout, c.hidden_dropout) == ("lora", 0, 0.1)


def test_one_trainer_without_a_filter_adapts_every_layer(tmp_path: Path) -> None:
    c = imported(tmp_path, ONE).config
    assert (c.targets, c.train_text_encoders, c.noise_offset, c.timestep_sampling) == ((".*",), False, 0.0, "uniform")
    assert (c.rank, c.alpha, c.epochs, c.warmup, c.learning_rate, c.save_dtype) == (16, 1, 100, 200, 3e-6, "fp32")
    listed = imported(tmp_path, {**ONE, "layer_filter": "attentions", "layer_filter_preset": "attn-mlp"}).config
    preset = imported(tmp_path, {**ONE, "layer_filter_preset": "attn-mlp"}).config
    assert listed.targets == preset.targets == (".*attentions.*",)
    regex = {"layer_filter": "^(?=.*attention)(?!.*refiner).*", "layer_filter_regex": True}
    z = {**ONE, **regex, "model_type": "Z_IMAGE", "timestep_distribution": "LOGIT_NORMAL"}
    assert imported(tmp_path, z).config.targets == (regex["layer_filter"],)
    shifted = {**z, "timestep_shift": 3.0, "noising_weight": 0.5}
    c = imported(tmp_path, shifted).config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_std) == ("shift", 3.0, 1.5)
    assert imported(tmp_path, {**ONE, "clip_grad_norm": None}).config.max_grad_norm == 0


def test_one_trainer_on_flux2(tmp_path: Path) -> None:
    """Both dev and klein are FLUX_2 there; guidance is dev's."""
    table = {**ONE, "model_type": "FLUX_2", "layer_filter_preset": "blocks", "transformer": {"guidance_scale": 1.5}}
    times = {"timestep_distribution": "LOGIT_NORMAL", "dynamic_timestep_shifting": True}
    c = imported(tmp_path, {**table, **times, "base_model_name": "black-forest-labs/FLUX.2-klein-base-9B"}).config
    assert (c.model, c.guidance, c.train_text_encoders) == ("black-forest-labs/FLUX.2-klein-base-9B", 1.5, False)
    assert (c.targets, c.timestep_sampling, c.timestep_shift) == ((".*transformer_block.*",), "shift", None)


def test_schedules_with_arguments(tmp_path: Path) -> None:
    """Its formulas of REX and of the lowest factor, and a class of torch with text for values."""
    rex = imported(tmp_path, {**ONE, "learning_rate_scheduler": "REX", "learning_rate_min_factor": 0.1,
                              "learning_rate_warmup_steps": 0}).config  # fmt: skip
    for step in (0, 30, 99):
        t = step / 100
        expected = 0.1 + 0.9 * (1 - t) / (0.1 + 0.9 * (1 - t))
        assert learning_rate_at(rex, step, 100) == pytest.approx(expected)
    name = "torch.optim.lr_scheduler.MultiStepLR"
    params = [{"key": "milestones", "value": "[10, 20]"}, {"key": "gamma", "value": "0.5"}]
    custom = {**ONE, "learning_rate_scheduler": "CUSTOM", "custom_learning_rate_scheduler": name}
    c = imported(tmp_path, {**custom, "scheduler_params": params}).config
    assert (c.lr_scheduler, c.lr_scheduler_args, c.warmup) == (name, {"milestones": [10, 20], "gamma": 0.5}, 200)
    unknown = {**custom, "scheduler_params": [{"key": "total_iters", "value": "%TOTAL_STEPS%"}]}
    with pytest.raises(ConfigError, match="only the run knows it"):
        imported(tmp_path, unknown)
    assert imported(tmp_path, unknown, lr_scheduler_args={"milestones": [3]}).config.lr_scheduler_args == {
        "milestones": [3]
    }


def test_samples_of_its_own_file_carry_over(tmp_path: Path) -> None:
    samples = [
        {"prompt": "a knight", "negative_prompt": "blurry", "width": 512, "height": 768, "seed": 5, "cfg_scale": 7.0,
         "diffusion_steps": 20, "enabled": True, "random_seed": False},
        {"prompt": "a castle", "width": 640, "height": 640, "seed": 8, "random_seed": True},
        {"prompt": "not this one", "enabled": False},
    ]  # fmt: skip
    expected = ("a knight --n blurry --w 512 --h 768 --d 5 --l 7 --s 20", "a castle --w 640 --h 640")
    every = {"sample_after": 100, "sample_after_unit": "STEP"}
    assert imported(tmp_path, {**ONE, **every, "samples": samples}).config.sample_prompts == expected
    (tmp_path / "samples.json").write_text(json.dumps(samples), "utf-8")
    c = imported(tmp_path, {**ONE, **every, "sample_definition_file_name": "samples.json"}).config
    assert (c.sample_prompts, c.sample_every) == (expected, 100)


def test_its_epochs_leave_out_batches_that_are_not_full(tmp_path: Path) -> None:
    assert imported(tmp_path, ONE).config.drop_incomplete is True
    assert imported(tmp_path, GUI).config.drop_incomplete is False


def test_concepts_for_validation_are_not_trained_on(tmp_path: Path) -> None:
    concepts = [{"path": "a"}, {"path": "b", "type": "VALIDATION"}, {"path": "c", "validation_concept": True}]
    result = import_config(write_text(tmp_path, json.dumps({**ONE, "concepts": concepts})))
    assert result.config.dataset == "a"
    assert sum("is for validation: its images are not trained on" in line for line in result.no_equivalent) == 2


def test_concepts_of_prior_predictions_are_regularization_toward_the_base(tmp_path: Path) -> None:
    concepts = [{"path": "a"}, {"path": "b", "type": "PRIOR_PREDICTION", "loss_weight": 0.5}]
    c = import_config(write_text(tmp_path, json.dumps({**ONE, "concepts": concepts}))).config
    assert c.prior_prediction and c.prior_loss_weight == 0.5
    subsets = [subset for table in c.dataset["datasets"] for subset in table["subsets"]]
    assert [(each["image_dir"], each.get("is_reg", False)) for each in subsets] == [("a", False), ("b", True)]
    assert not imported(tmp_path, {**ONE, "concepts": concepts[:1]}).config.prior_prediction

    concepts.append({"path": "c", "type": "PRIOR_PREDICTION"})
    with pytest.raises(ConfigError, match=r"concepts\.2\.loss_weight: 1: .*have one weight, prior_loss_weight"):
        import_config(write_text(tmp_path, json.dumps({**ONE, "concepts": concepts})))
    with pytest.raises(ConfigError, match=r"concepts\.0\.type: 'SOMETHING'"):
        import_config(write_text(tmp_path, json.dumps({**ONE, "concepts": [{"path": "a", "type": "SOMETHING"}]})))


def test_an_exact_size_is_trained_as_such(tmp_path: Path) -> None:
    c = imported(tmp_path, {**ONE, "resolution": "1024x768"}).config
    assert c.resolution == (1024, 768) and not c.buckets and c.bucket_step == 64
    c = imported(tmp_path, {**ONE, "resolution": "1000x760", "concepts": [{"path": "a", "balancing": 2}]}).config
    assert c.resolution == (1000, 760) and c.bucket_step == 8


def test_lokr_with_both_factors_and_a_core(tmp_path: Path) -> None:
    table = {**ONE, "peft_type": "LOKR", "lokr_decompose_both": True, "lokr_use_tucker": True}
    c = imported(tmp_path, table).config
    assert (c.network, c.lokr_decompose_both, c.tucker) == ("lokr", True, True)
    plain = imported(tmp_path, {**ONE, "lokr_decompose_both": True, "lokr_use_tucker": True}).config
    assert (plain.network, plain.lokr_decompose_both, plain.tucker) == ("lora", False, False)
    for name, why in (("lokr_full_matrix", "lokr_decompose_both: with"), ("lokr_weight_decompose", "no magnitude")):
        with pytest.raises(ConfigError, match=why):
            imported(tmp_path, {**table, name: True})
