"""Command lines of diffusers' LoRA scripts become ours; those of its other scripts are refused for what they train."""

from __future__ import annotations

import re
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import Imported, import_text

DOG = '--instance_data_dir="dog" --instance_prompt="a photo of sks dog"'


def command(script: str, options: str, **overrides: Any) -> Imported:
    line = (
        f"accelerate launch --mixed_precision=fp16 examples/{script}.py "
        f"--pretrained_model_name_or_path=some/model {options}"
    )
    return import_text(line.replace(" --", " \\\n  --"), "run.sh", **overrides)


def test_text_to_image_on_sd() -> None:
    result = command(
        "text_to_image/train_text_to_image_lora",
        "--dataset_name=lambdalabs/naruto --caption_column=text --random_flip --learning_rate=2e-4 --rank 8 "
        "--snr_gamma=5 "
        "--max_train_steps=15000 --validation_prompt='a robot' --seed=1337 --output_dir=out/naruto --report_to=wandb",
        dataset="naruto",
    )
    c = result.config
    assert (result.kind, c.model, c.dataset, c.output) == ("diffusers", "some/model", "naruto", "out/naruto")
    assert (c.rank, c.alpha, c.network, c.learning_rate, c.steps, c.epochs) == (8, 8, "lora", 2e-4, 15000, None)
    assert (c.batch_size, c.warmup, c.weight_decay, c.max_grad_norm, c.precision) == (16, 0, 0.01, 1.0, "fp16")
    assert (c.resolution, c.buckets, c.upscale, c.crop, c.flip, c.min_snr_gamma) == (
        512,
        False,
        True,
        "random",
        True,
        5,
    )
    assert (c.train_text_encoders, c.save_every, c.wandb, c.max_token_length, c.seed) == (False, 500, True, 75, 1337)
    assert re.fullmatch(c.targets[0], "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_out.0")
    assert not re.fullmatch(c.targets[0], "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.2")
    assert [line.partition(":")[0] for line in result.no_equivalent] == ["dataset_name"]
    assert (c.sample_prompts, c.sample_every_epochs) == (("a robot",), 1)


def test_dreambooth_on_sdxl_with_a_prior() -> None:
    c = command(
        "dreambooth/train_dreambooth_lora_sdxl",
        f"{DOG} --with_prior_preservation --class_data_dir=dogs --class_prompt='a dog' "
        "--prior_loss_weight=0.5 --repeats=2 "
        "--train_text_encoder --use_8bit_adam --use_dora --lr_scheduler=cosine --lr_warmup_steps=100 --center_crop "
        "--mixed_precision=bf16 --pretrained_vae_model_name_or_path=madebyollin/sdxl-vae-fp16-fix",
    ).config
    assert isinstance(c.dataset, dict)
    (table,) = c.dataset["datasets"]
    assert [(s["image_dir"], s.get("is_reg"), s.get("num_repeats")) for s in table["subsets"]] == [
        ("dog", None, 2),
        ("dogs", True, None),
    ]
    assert (c.caption, c.prior_loss_weight, c.network, c.optimizer, c.precision) == (
        "a photo of sks dog", 0.5, "dora", "adamw8bit", "bf16",
    )  # fmt: skip
    assert (c.epochs, c.steps, c.batch_size, c.resolution, c.crop, c.warmup) == (1, None, 4, 1024, "center", 100)
    assert (c.train_text_encoders, c.text_encoder_learning_rate, c.learning_rate) == (True, 5e-6, 1e-4)
    assert re.fullmatch(c.targets[0], "text_model.encoder.layers.3.self_attn.out_proj")
    assert c.parts == {"vae": "madebyollin/sdxl-vae-fp16-fix"}


def test_dreambooth_on_flux_and_sd3() -> None:
    c = command(
        "dreambooth/train_dreambooth_lora_flux",
        f"{DOG} --optimizer=prodigy --learning_rate=1. --guidance_scale=1 --rank=16 --max_train_steps=500 "
        "--mixed_precision=bf16",
    ).config
    assert (c.optimizer, c.learning_rate, c.guidance, c.rank, c.alpha) == ("prodigy", 1.0, 1.0, 16, 4)
    assert c.optimizer_args == {"decouple": True, "use_bias_correction": True, "safeguard_warmup": True}
    assert (c.timestep_sampling, c.timestep_shift, c.save_dtype, c.weight_decay) == ("uniform", None, "bf16", 1e-4)
    assert re.fullmatch(c.targets[0], "transformer_blocks.3.ff_context.net.0.proj")
    assert re.fullmatch(c.targets[0], "single_transformer_blocks.3.attn.to_q")
    assert not re.fullmatch(c.targets[0], "single_transformer_blocks.3.proj_mlp")
    c = command(
        "dreambooth/train_dreambooth_lora_sd3", f"{DOG} --lora_layers=attn.to_q,attn.to_k --logit_mean=0.5"
    ).config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_mean, c.alpha) == ("logit_normal", 3.0, -0.5, 4)
    assert c.sigma_weighting == 2, "the script compares images, unless precondition_outputs is 0"
    assert re.fullmatch(c.targets[0], "transformer_blocks.3.attn.to_q")
    assert not re.fullmatch(c.targets[0], "transformer_blocks.3.attn.to_v")


def test_the_loss_of_sd3_and_its_alpha() -> None:
    script = "dreambooth/train_dreambooth_lora_sd3"
    c = command(script, f"{DOG} --rank=16 --precondition_outputs=0").config
    assert (c.sigma_weighting, c.rank, c.alpha) == (0, 16, 16)
    c = command(script, f"{DOG} --weighting_scheme=sigma_sqrt").config
    assert (c.timestep_sampling, c.timestep_shift, c.sigma_weighting) == ("uniform", 3.0, 0)


def test_which_captions_dreambooth_uses() -> None:
    script = "dreambooth/train_dreambooth_lora_sdxl"
    c = command(script, '--instance_data_dir=x --instance_prompt=""').config
    assert (c.caption, c.caption_extensions) == ("", (".no-captions",)), "text files beside images are not read"
    hub = "--dataset_name=a/b --instance_prompt=temp"
    assert command(script, hub, dataset="x").config.caption == "temp"
    result = command(script, f"{hub} --caption_column=text", dataset="x")
    assert result.config.caption is None
    assert "instance_prompt: the captions in caption_column are used instead" in result.notes


def test_dreambooth_on_qwen_image_and_z_image() -> None:
    result = command("dreambooth/train_dreambooth_lora_qwen_image", f"{DOG} --rank=16 --mixed_precision=bf16")
    c = result.config
    assert (c.rank, c.alpha, c.weight_decay, c.batch_size, c.save_dtype) == (16, 4, 1e-4, 4, "bf16")
    assert (c.timestep_sampling, c.timestep_shift, c.objective) == ("uniform", None, "flow")
    assert any("before diffusers 0.34 used the rank" in note for note in result.notes)
    assert re.fullmatch(c.targets[0], "transformer_blocks.3.attn.to_out.0")
    assert not re.fullmatch(c.targets[0], "transformer_blocks.3.attn.add_q_proj")
    script = "dreambooth/train_dreambooth_lora_z_image"
    c = command(script, f"{DOG} --guidance_scale=5 --pretrained_model_name_or_path=Tongyi-MAI/Z-Image-Turbo").config
    assert (c.timestep_sampling, c.timestep_shift, c.guidance, c.train_text_encoders) == ("uniform", 3.0, 1.0, False)
    assert re.fullmatch(c.targets[0], "noise_refiner.0.attention.to_q")
    c = command(
        script, f"{DOG} --pretrained_model_name_or_path=Tongyi-MAI/Z-Image --weighting_scheme=logit_normal"
    ).config
    assert (c.timestep_sampling, c.timestep_shift) == ("logit_normal", 6.0)


def test_dreambooth_on_flux2() -> None:
    result = command("dreambooth/train_dreambooth_lora_flux2", f"{DOG} --mixed_precision=bf16 --caption_dropout=0.1")
    c = result.config
    assert (c.rank, c.alpha, c.weight_decay, c.guidance, c.save_dtype, c.caption_dropout) == (
        4,
        4,
        1e-4,
        3.5,
        "bf16",
        0.1,
    )
    assert (c.timestep_sampling, c.timestep_shift, c.objective, c.train_text_encoders) == (
        "uniform",
        None,
        "flow",
        False,
    )
    pattern = c.targets[0]
    blocks = ("transformer_blocks.0.attn.", "single_transformer_blocks.3.attn.")
    names = [f"{blocks[0]}{leaf}" for leaf in ("to_q", "to_out.0", "add_q_proj", "to_add_out")]
    names += [f"{blocks[1]}{leaf}" for leaf in ("to_qkv_mlp_proj", "to_out")] + ["transformer_blocks.0.ff.linear_in"]
    adapted = [name for name in names if re.fullmatch(pattern, name)]
    assert adapted == [names[0], names[1], names[4], names[5]]
    klein = command("dreambooth/train_dreambooth_lora_flux2_klein", f"{DOG} --pretrained_model_name_or_path=a/b")
    assert any("whose 9, 18 and 27 are used here" in note for note in klein.notes)
    assert klein.config.model == "a/b"


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        ("dreambooth/train_dreambooth_lora_hidream", DOG, r"'hidream' \(HiDream\) is a model that cannot be trained"),
        ("dreambooth/train_dreambooth_lora_flux2_img2img", DOG,
        r"script: 'flux2_img2img' \(FLUX.2 with reference images\) is a model that cannot be trained here"),
        ("own/train_lora", DOG, r"script: 'examples/own/train_lora.py' is not one whose settings are known here"),
        ("dreambooth/train_dreambooth_lora_flux_kontext", DOG, r"script: 'flux_kontext' .*cannot be trained here"),
        ("advanced/train_dreambooth_lora_sdxl_advanced", DOG, r"pivotal tuning"),
        ("dreambooth/train_dreambooth", DOG, r"DreamBooth trains the whole model"),
        ("text_to_image/train_text_to_image", "--train_data_dir=x", r"a full fine-tune"),
        ("controlnet/train_controlnet", "--train_data_dir=x", r"a ControlNet is trained"),
        ("dreambooth/train_dreambooth_lora_sdxl", f"{DOG} --do_edm_style_training",
        r"do_edm_style_training: True: EDM"),
        ("dreambooth/train_dreambooth_lora_flux", f"{DOG} --weighting_scheme=mode",
        r"weighting_scheme: 'mode' is not supported"),
        ("dreambooth/train_dreambooth_lora", f"{DOG} --scale_lr", r"scale_lr: True"),
        ("text_to_image/train_text_to_image_lora", "--dataset_name=x/y", r"dataset: is required"),
    ],
)  # fmt: skip
def test_what_is_refused(script: str, options: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        command(script, options)
    assert len(caught.value.problems) == 1
