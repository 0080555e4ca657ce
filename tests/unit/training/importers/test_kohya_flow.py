"""kohya's scripts for transformers, sd-scripts' and musubi-tuner's: what they train, and at which times."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import Imported, import_config, import_text
from inweave.training.optim.schedules import learning_rate_at
from tests.unit.training.importers.other_trainers import write_text

FLUX = "accelerate launch flux_train_network.py --network_module networks.lora_flux --model_prediction_type raw "
SD3 = "accelerate launch sd3_train_network.py --network_module networks.lora_sd3 "
QWEN = (
    "accelerate launch --mixed_precision fp16 src/musubi_tuner/qwen_image_train_network.py --dit a "
    "--network_module networks.lora_qwen_image "
)
Z_IMAGE = "accelerate launch zimage_train_network.py --dit a --network_module networks.lora_zimage "

FLUX2 = "accelerate launch flux_2_train_network.py --dit a --network_module networks.lora_flux_2 "


def of(line: str, **options: Any) -> Imported:
    return import_text(line, "a.sh", **{"dataset": "x", **options})


def test_musubi_trains_the_denoiser_alone_with_defaults_of_its_own() -> None:
    result = of(QWEN)
    c = result.config
    assert (c.train_text_encoders, c.text_encoder_learning_rate, c.learning_rate) == (False, None, 2e-6)
    assert (c.timestep_sampling, c.timestep_shift, c.save_dtype) == ("uniform", None, "bf16")
    assert (c.rank, c.alpha, c.steps, c.precision) == (4, 1, 1600, "fp16")  # the launcher's precision
    assert of(Z_IMAGE).config.precision == "bf16"
    assert result.defaults["discrete_flow_shift"] == 1.0 and "text_encoder_lr" not in result.defaults
    ignored = of(f"{QWEN}--unet_lr 1e-3 --text_encoder_lr 1e-3 --learning_rate 1e-4")
    assert (ignored.config.learning_rate, ignored.config.train_text_encoders) == (1e-4, False)
    assert any(note.startswith("unet_lr: is ignored") for note in ignored.notes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{QWEN}--timestep_sampling qwen_shift", ("shift", None, 0.0, 1.0)),
        (f"{FLUX2}--timestep_sampling flux2_shift --sigmoid_scale 0.5", ("shift", None, 0.0, 0.5)),
        (f"{QWEN}--timestep_sampling shift --discrete_flow_shift 2.2", ("shift", 2.2, 0.0, 1.0)),
        (f"{Z_IMAGE}--timestep_sampling logsnr --logit_mean 3 --logit_std 4", ("logit_normal", None, -1.5, 2.0)),
        (f"{SD3}--weighting_scheme logit_normal --logit_mean 0.5", ("logit_normal", None, 0.5, 1.0)),
        (f"{FLUX}--timestep_sampling sigma --weighting_scheme cosmap --discrete_flow_shift 1",
         ("uniform", None, 0.0, 1.0)),
    ],
)  # fmt: skip
def test_times(line: str, expected: tuple[Any, ...]) -> None:
    c = of(line).config
    assert (c.timestep_sampling, c.timestep_shift, c.logit_mean, c.logit_std) == expected


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"{Z_IMAGE}--timestep_sampling qwen_shift", "'qwen_shift', 'none' with a shift of 1"),
        (f"{QWEN}--timestep_sampling sigmoid --weighting_scheme sigma_sqrt", "'sigmoid', 'sigma_sqrt' with"),
        (f"{QWEN}--timestep_sampling qinglong_qwen", "'qinglong_qwen', 'none' with"),
        (f"{QWEN}--timestep_sampling sigma --min_timestep 200", "min_timestep: .* counts from pure noise"),
        (f"{QWEN}--timestep_sampling shift --num_timestep_buckets 4", "num_timestep_buckets: 4: .* not by strata"),
        (f"{QWEN}--edit", "a variant of Qwen-Image"),
        (f"{FLUX}--model_type chroma", r"model_type: 'chroma' \(Chroma\) is a model that cannot be trained"),
    ],
)
def test_what_has_no_equivalent_is_refused(line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        of(line)
    assert len(caught.value.problems) == 1


def test_ranges_of_times_are_used_by_sd3_and_musubi_alone() -> None:
    limits = " --min_timestep 100 --max_timestep 800"
    for line in (SD3, f"{QWEN}--timestep_sampling sigmoid"):
        c = of(line + limits).config
        assert (c.min_timestep, c.max_timestep) == (100, 800)
    flux = of(FLUX + limits)
    assert (flux.config.min_timestep, flux.config.max_timestep) == (None, None)
    assert any(note.startswith("max_timestep: is ignored") for note in flux.notes)


def test_cached_captions_do_not_stop_clip_from_being_trained() -> None:
    """SDXL's script demands that it is not; those for FLUX.1 and SD 3 cache what T5 makes of captions."""
    cached = " --cache_text_encoder_outputs --learning_rate 1e-4"
    for line in (FLUX, SD3):
        result = of(line + cached)
        assert (result.config.train_text_encoders, result.config.cache_text) == (True, False)
        assert any("because CLIP is trained" in note for note in result.notes)
        for off in ("--network_train_unet_only", "--text_encoder_lr 0"):
            c = of(f"{line}{cached} {off}").config
            assert (c.train_text_encoders, c.cache_text) == (False, True)
    sdxl = of("accelerate launch sdxl_train_network.py --network_module networks.lora" + cached).config
    assert (sdxl.train_text_encoders, sdxl.cache_text) == (False, True)


def test_flux2_of_musubi_names_its_variant() -> None:
    result = of(f"{FLUX2}--model_version klein-base-4b --vae v --text_encoder t --network_dim 32 --guidance_scale 3")
    c = result.config
    assert (c.variant, c.rank, c.guidance, c.model) == ("flux2-klein-base-4b", 32, 1.0, "a")
    assert (c.precision, c.train_text_encoders) == ("bf16", False)
    assert result.mapping["model_version"] == "variant"
    assert any("here each has its own" in line for line in result.no_equivalent)
    (pattern,) = [each.partition("|.*layers")[0] for each in c.targets]
    names = ("transformer_blocks.0.ff.linear_in", "single_transformer_blocks.3.attn.to_qkv_mlp_proj", "x_embedder")
    assert [bool(re.fullmatch(pattern, name)) for name in names] == [True, True, False]


def test_modulation_of_qwen_image_is_adapted_where_it_is_asked_for() -> None:
    import re

    name = "transformer_blocks.3.img_mod.1"
    for argument, adapted in (("", False), ("exclude_mod=True", False), ("exclude_mod=False", True)):
        (pattern,) = list(of(f"{QWEN} {'--network_args ' + argument if argument else ''}").config.targets)
        assert bool(re.fullmatch(pattern, name)) is adapted
    with pytest.raises(ConfigError, match=r"network_args.exclude_patterns: .* left out by rules"):
        of(f"{QWEN} --network_args \"exclude_patterns=['.*attn.*']\"")


@pytest.mark.parametrize(
    ("size", "bucket"), [("512,768", (512, 768)), ("832,1216", (832, 1216)), ("1024,1024", (1024, 1024))]
)
def test_a_rectangle_is_an_area_whose_own_size_is_a_bucket(size: str, bucket: tuple[int, int], tmp_path: Path) -> None:
    from inweave.training.data.buckets import BucketRules, assign

    line = f"accelerate launch train_network.py --network_module networks.lora --resolution {size} --train_data_dir x"
    c = import_text(f"{line} --enable_bucket --max_bucket_reso 2048", "a.sh").config
    rules = BucketRules(
        c.resolution or 0, c.bucket_step, c.min_bucket, c.max_bucket, upscale=c.upscale, rule=c.bucket_rule
    )
    placed = assign(bucket, rules)
    assert (placed.bucket.width, placed.bucket.height) == bucket
    flat = import_text(line, "a.sh").config
    assert (flat.dataset, flat.buckets, flat.resolution) == ("x", False, bucket if len({*bucket}) > 1 else bucket[0])
    assert of(line.replace(" --train_data_dir x", ""), dataset="y").config.resolution == flat.resolution
    assert TrainConfig.load(write_text(tmp_path, flat.to_toml())) == flat
    crop = assign((3000, 2000), BucketRules(flat.resolution or 0, flat.bucket_step, enabled=False, rule="kohya"))
    assert (crop.bucket.width, crop.bucket.height) == bucket


@pytest.mark.parametrize(
    ("arguments", "ratio"),
    [
        ('"loraplus_lr_ratio=16"', 16), ('"loraplus_unet_lr_ratio=8" "loraplus_text_encoder_lr_ratio=8"', 8),
        ('"loraplus_unet_lr_ratio=8"', "8 of the denoiser, 1 of the text encoders"),
        ('"loraplus_lr_ratio=4" "loraplus_text_encoder_lr_ratio=2"', "4 of the denoiser, 2 of the text encoders"),
    ],
)  # fmt: skip
def test_lora_plus_has_one_ratio(arguments: str, ratio: int | str) -> None:
    line = f"accelerate launch train_network.py --network_module networks.lora --network_args {arguments}"
    if isinstance(ratio, str):
        with pytest.raises(ConfigError, match=ratio):
            of(line)
        assert of(f"{line} --network_train_unet_only").config.loraplus_lr_ratio in (4, 8)
    else:
        assert of(line).config.loraplus_lr_ratio == ratio


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("algo=lora dora_wd=True wd_on_output=False", "one magnitude per output"),
        ("algo=lokr decompose_both=True full_matrix=True", "decompose_both: 'True': with full_matrix"),
        ("algo=lokr unbalanced_factorization=True", "is not supported"),
        ("algo=locon dora_wd=True use_conv_cp=True", "have a Tucker core"),
    ],
)
def test_options_of_lycoris_that_change_the_factors(arguments: str, why: str) -> None:
    line = f"accelerate launch train_network.py --network_module lycoris.kohya --network_args {arguments}"
    with pytest.raises(ConfigError, match=why):
        of(line)
    others = " ".join(arguments.split()[1:]).replace("dora_wd=True", "")
    plain = of(
        f"{line.partition(' --network_args')[0]} --network_args algo=loha full_matrix=True disable_conv_cp=True"
    ).config
    assert (plain.network, plain.rank) == ("loha", 4), "options of LoKr, and one that LyCORIS does not read"
    if "conv_cp" not in others and "wd_on" not in others:
        assert of(f"{line.partition(' --network_args')[0]} --network_args algo=loha {others}").config.network == "loha"


def test_a_scheduler_of_torch_is_read_with_its_arguments() -> None:
    line = "accelerate launch train_network.py --network_module networks.lora --lr_scheduler cosine "
    line += "--max_train_steps 9 --lr_scheduler_type "
    c = of(f"{line}CosineAnnealingLR --lr_scheduler_args T_max=9 eta_min=1e-6").config
    assert (c.lr_scheduler, c.warmup) == ("torch.optim.lr_scheduler.CosineAnnealingLR", 0)
    assert c.lr_scheduler_args == {"T_max": 9, "eta_min": 1e-6}
    c = of(f"{line}torch.optim.lr_scheduler.MultiStepLR --lr_scheduler_args 'milestones=[3, 6]' gamma=0.5").config
    assert c.lr_scheduler_args == {"milestones": [3, 6], "gamma": 0.5}
    again = TrainConfig.of(**c.model_dump())
    assert [round(learning_rate_at(again, step, 9), 3) for step in (0, 2, 3, 8)] == [1, 1, 0.5, 0.25]


def test_options_of_a_scheduler_are_refused_and_an_old_spelling_is_read() -> None:
    line = "accelerate launch train_network.py --network_module networks.lora --lr_scheduler cosine "
    with pytest.raises(ConfigError, match=r"lr_scheduler_args: .*schedulers have no further options"):
        of(f"{line}--lr_scheduler_args num_cycles=3")
    assert of(f"{line}--caption_extention .tags").config.caption_extensions == (".tags",)
    half = of(f"{line}--full_bf16 --mixed_precision bf16").config
    assert half.save_dtype == "bf16"


def test_a_dataset_file_of_musubi_is_read(tmp_path: Path) -> None:
    dataset = tmp_path / "data.toml"
    dataset.write_text(
        '[general]\nresolution = [1328, 1024]\ncaption_extension = ".txt"\nenable_bucket = true\nbatch_size = 2\n'
        '[[datasets]]\nimage_directory = "a"\ncache_directory = "c"\nnum_repeats = 3\n[[datasets]]\n'
        'image_directory = "b"\n'
    )
    path = tmp_path / "run.sh"
    path.write_text(f"{QWEN} --dataset_config configs/data.toml --network_dim 8\n")
    c = import_config(path).config
    assert isinstance(c.dataset, dict)
    first, second = c.dataset["datasets"]
    assert (first["resolution"], first["batch_size"], first["enable_bucket"], first["bucket_reso_steps"]) == (
        [1328, 1024], 2, True, 16,
    )  # fmt: skip
    assert [each["subsets"][0] for each in (first, second)] == [
        {"image_dir": "a", "num_repeats": 3, "caption_extension": ".txt"},
        {"image_dir": "b", "num_repeats": 1, "caption_extension": ".txt"},
    ]
    dataset.write_text('[[datasets]]\nimage_directory = "a"\n')
    smallest = import_config(path).config.dataset
    assert isinstance(smallest, dict) and smallest["datasets"][0]["resolution"] == [960, 544]
    dataset.write_text('[[datasets]]\nvideo_directory = "a"\n')
    with pytest.raises(ConfigError, match=r"datasets\.0\.video_directory: 'a': a dataset is a folder of images"):
        import_config(path)
    dataset.unlink()
    assert import_config(path).config.dataset == "configs/data.toml"


def test_a_cosine_that_ends_above_zero() -> None:
    c = of(f"{FLUX}--lr_scheduler cosine_with_min_lr --lr_scheduler_min_lr_ratio 0.1 --lr_decay_steps 0.2").config
    assert (c.lr_scheduler, c.lr_min_ratio, c.cosine_cycles) == ("cosine", 0.1, 1)
    assert learning_rate_at(c, 100, 100) == pytest.approx(0.1)
    assert of(f"{FLUX}--lr_scheduler cosine --lr_scheduler_min_lr_ratio 0.1").config.lr_min_ratio == 0
    with pytest.raises(ConfigError, match="rises again"):
        of(f"{FLUX}--lr_scheduler cosine_with_min_lr --lr_scheduler_num_cycles 3")
