"""diffusion-pipe's configurations and dataset files become ours."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError
from inweave.training.importers.detect import Imported, import_config, import_table
from inweave.training.importers.files import leaves_of
from tests.unit.training.importers.other_trainers import accounted, write_text
from tests.unit.training.importers.small_imports import refusal

MAIN = """
# Output path for training runs. Each training run makes a new directory in here.
output_dir = '/data/runs/otter'
dataset = 'examples/otter.toml'
eval_datasets = [
    {name = 'held out', config = 'examples/eval.toml'},
]
epochs = 40
micro_batch_size_per_gpu = 2
pipeline_stages = 1
gradient_accumulation_steps = 1
gradient_clipping = 0.5
warmup_steps = 100
blocks_to_swap = 20
eval_every_n_epochs = 1
eval_before_first_step = true
eval_micro_batch_size_per_gpu = 1
eval_gradient_accumulation_steps = 1
save_every_n_epochs = 2
checkpoint_every_n_minutes = 120
activation_checkpointing = 'unsloth'
partition_method = 'parameters'
save_dtype = 'float16'
caching_batch_size = 1
steps_per_print = 1
video_clip_mode = 'single_beginning'
uncond_fraction = 0.1

[model]
type = 'flux'
diffusers_path = '/data2/imagegen_models/FLUX.1-dev'
transformer_path = '/data2/imagegen_models/flux-dev-dedistill.safetensors'
dtype = 'bfloat16'
transformer_dtype = 'float8'
flux_shift = true

[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
exclude_modules = ['proj_mlp']

[optimizer]
type = 'adamw_optimi'
lr = 2e-5
betas = [0.9, 0.99]
weight_decay = 0.02
eps = 1e-8

[monitoring]
enable_wandb = true
wandb_api_key = 'a-secret'
wandb_tracker_name = 'otters'
wandb_run_name = 'first'
"""
DATASET = """
resolutions = [512, [1280, 720]]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
num_ar_buckets = 7
frame_buckets = [1, 33]
caption_prefix = 'a photo of '

[[directory]]
path = '/data/otter'
num_repeats = 3

[[directory]]
path = '/data/river'
resolutions = [768]
cache_shuffle_num = 4
enable_ar_bucket = false
"""
SMALL: dict[str, Any] = {
    "epochs": 5, "save_every_n_epochs": 1, "dataset": "d.toml", "adapter": {"type": "lora", "rank": 16},
    "optimizer": {"type": "adamw_optimi", "lr": 1e-4},
    "model": {"type": "flux", "diffusers_path": "FLUX.1-dev", "dtype": "bfloat16"},
}  # fmt: skip


def small(
    tmp_path: Path, dataset: str = "resolutions = [512]\n[[directory]]\npath = 'x'\n", **changes: Any
) -> Imported:
    """Import SMALL with changes; those that are tables change single settings of a table."""
    write_text(tmp_path, dataset, "d.toml")
    table = dict(SMALL)
    for name, value in changes.items():
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value
    return import_table(table, tmp_path / "main.toml")


def test_diffusion_pipe(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    write_text(tmp_path, DATASET, "examples/otter.toml")
    result = import_config(write_text(tmp_path, MAIN, "main.toml"))
    c = result.config
    assert result.kind == "diffusion-pipe"
    assert (c.model, c.output, c.parts) == (
        "/data2/imagegen_models/FLUX.1-dev", "/data/runs/otter",
        {"transformer": "/data2/imagegen_models/flux-dev-dedistill.safetensors"},
    )  # fmt: skip
    assert (c.network, c.rank, c.alpha, c.dropout, c.save_dtype, c.precision) == ("lora", 32, 32, 0, "fp16", "bf16")
    assert (c.optimizer, c.learning_rate, c.betas, c.weight_decay, c.epsilon) == (
        "adamw", 2e-5, (0.9, 0.99), 0.02, 1e-8,
    )  # fmt: skip
    assert (c.epochs, c.steps, c.warmup, c.lr_scheduler, c.max_grad_norm) == (40, None, 100, "constant", 0.5)
    assert (c.objective, c.timestep_sampling, c.timestep_shift, c.logit_std, c.guidance) == (
        "flow",
        "shift",
        None,
        1,
        1,
    )
    assert (c.gradient_checkpointing, c.save_every_epochs, c.caption_dropout) == ("full", 2, 0.1)
    assert (c.wandb, c.wandb_project, c.wandb_run_name) == (True, "otters", "first")
    assert (c.batch_size, c.drop_incomplete, c.upscale, c.wildcards) == (2, True, True, False)
    assert [rule.skip for rule in c.rules] == [True]
    assert re.search(c.rules[0].pattern, "transformer.single_transformer_blocks.3.proj_mlp")
    assert not re.search(c.rules[0].pattern, "transformer.single_transformer_blocks.3.proj_mlp.lora")
    assert isinstance(c.dataset, dict)
    sets = [
        (each["resolution"], each["enable_bucket"], each["subsets"][0]["image_dir"], each["subsets"][0]["num_repeats"])
        for each in c.dataset["datasets"]
    ]
    assert sets == [
        (512, True, "/data/otter", 3), (960, True, "/data/otter", 3), (768, False, "/data/river", 4),
    ]  # fmt: skip
    otter, wide, river = c.dataset["datasets"]
    assert (otter["min_bucket_reso"], otter["max_bucket_reso"]) == (320, 768)
    assert (wide["min_bucket_reso"], wide["max_bucket_reso"]) == (640, 1408)
    assert otter["subsets"][0]["caption_prefix"] == "a photo of "
    shuffled = river["subsets"][0]
    assert (shuffled["shuffle_caption"], shuffled["caption_separator"], c.caption_variants) == (True, ", ", 4)
    names = {each.partition(":")[0] for each in result.no_equivalent}
    assert {"eval_datasets.0.config", "blocks_to_swap", "model.transformer_dtype", "adapter.dtype"} <= names
    for name in leaves_of(tomllib.loads(MAIN)):
        assert accounted(result, name), name
    assert "a-secret" not in c.to_toml() + "\n".join(result.report(verbose=True))
    assert any(
        line.startswith("differs: buckets: their sizes are chosen by inweave's own rule") for line in result.report()
    )


def test_what_a_file_leaves_out_is_the_trainers_default_and_no_preset_of_ours(tmp_path: Path) -> None:
    c = small(tmp_path).config
    assert (c.betas, c.weight_decay, c.epsilon, c.alpha, c.batch_size, c.warmup) == ((0.9, 0.99), 0, 1e-6, 16, 1, 0)
    assert (c.timestep_sampling, c.timestep_shift, c.buckets, c.resolution) == ("logit_normal", None, False, 512)
    assert (c.dataset, c.caption_extensions, c.save_dtype, c.gradient_checkpointing) == ("x", (".txt",), "bf16", "off")
    filled = c.with_preset("flux")
    assert {name for name in type(c).model_fields if getattr(c, name) != getattr(filled, name)} == set()
    for kind, expected in (
        ("adamw", ((0.9, 0.999), 0.01, 1e-8)), ("AdamW8bitKahan", ((0.9, 0.999), 0.01, 1e-8)),
        ("Prodigy", ((0.9, 0.999), 0, 1e-8)), ("Lion", ((0.9, 0.99), 0, 1e-8)),
    ):  # fmt: skip
        c = small(tmp_path, optimizer={"type": kind}).config
        assert (c.betas, c.weight_decay, c.epsilon) == expected, kind


def test_sdxl_trains_its_text_encoders_each_at_its_own_rate(tmp_path: Path) -> None:
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    from inweave.training.adapters.targets import select_modules

    model = {"type": "sdxl", "checkpoint_path": "m.safetensors", "dtype": "bfloat16", "min_snr_gamma": 5}
    base: dict[str, Any] = {**SMALL, "model": model}
    write_text(tmp_path, "resolutions = [1024]\n[[directory]]\npath = 'x'\n", "d.toml")

    def sdxl(**settings: Any) -> Imported:
        return import_table({**base, "model": {**model, **settings}}, tmp_path / "main.toml")

    c = sdxl().config
    assert (c.train_text_encoders, c.cache_text, c.learning_rate, c.text_encoder_learning_rate) == (
        True, False, 1e-4, 1e-4,
    )  # fmt: skip
    assert (c.objective, c.timestep_sampling, c.min_snr_gamma, c.debiased_estimation) == (
        "epsilon",
        "uniform",
        5,
        False,
    )
    assert c.max_token_length >= 1000  # captions are not cut
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), norm_num_groups=8,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=8, attention_head_dim=4,
            use_linear_projection=True, addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=64,
        )  # fmt: skip
    linear = {name for name, each in unet.named_modules() if isinstance(each, torch.nn.Linear) and "_block" in name}
    assert set(select_modules("unet", unet, c)) == linear and any("time_emb_proj" in name for name in linear)
    target = re.compile(c.targets[0])
    for name in ("text_projection", "text_model.encoder.layers.0.mlp.fc1", "encoder.layers.3.self_attn.q_proj"):
        assert target.fullmatch(name)

    c = sdxl(unet_lr=4e-5, text_encoder_1_lr=2e-5, text_encoder_2_lr=1e-5).config
    assert (c.learning_rate, c.text_encoder_learning_rate) == (4e-5, 2e-5)
    assert [(rule.pattern, rule.learning_rate) for rule in c.rules] == [(r"^te2\.", 1e-5)]
    c = sdxl(text_encoder_1_lr=0).config
    assert [(rule.pattern, rule.skip) for rule in c.rules] == [(r"^te1\.", True)]
    assert (c.text_encoder_learning_rate, c.train_text_encoders) == (1e-4, True)
    assert sdxl(text_encoder_1_lr=0, text_encoder_2_lr=0.0).config.train_text_encoders is False
    off = sdxl(debiased_estimation_loss=False)
    assert off.config.debiased_estimation and any("is on in diffusion-pipe" in line for line in off.no_equivalent)
    with pytest.raises(ConfigError, match=r"model\.v_pred: is trained with a schedule that ends in pure noise"):
        sdxl(v_pred=True)


def test_models_of_single_files_and_an_adapter_that_is_merged(tmp_path: Path) -> None:
    encoders = [{"path": "qwen_3_4b.safetensors", "type": "lumina2"}]
    model = {
        "type": "z_image", "diffusion_model": "z.safetensors", "vae": "v.safetensors", "text_encoders": encoders,
        "merge_adapters": ["turbo.safetensors"], "dtype": "bfloat16", "shift": 3, "sigmoid_scale": 1.5,
    }  # fmt: skip
    write_text(tmp_path, "resolutions = [512]\n[[directory]]\npath = 'x'\n", "d.toml")
    result = import_table({**SMALL, "model": model}, tmp_path / "main.toml")
    c = result.config
    assert (c.model, c.assistant) == ("z.safetensors", "turbo.safetensors")
    assert c.parts == {"vae": "v.safetensors", "text_encoder": "qwen_3_4b.safetensors"}
    assert (c.timestep_sampling, c.logit_std, c.timestep_shift) == ("logit_normal", 1.5, 3)
    assert any("joint projection of q, k, v" in line for line in result.no_equivalent)
    qwen = {
        "type": "qwen_image",
        "transformer_path": "t",
        "text_encoder_path": "e",
        "vae_path": "v",
        "dtype": "float16",
    }
    c = import_table({**SMALL, "model": qwen}, tmp_path / "main.toml").config
    assert (c.model, c.parts) == ("t", {"text_encoder": "e", "vae": "v"})
    c = import_table({**SMALL, "model": {**qwen, "diffusers_path": "folder"}}, tmp_path / "main.toml").config
    assert (c.model, c.parts["transformer"], c.timestep_shift) == ("folder", "t", None)


def test_an_adapter_that_is_trained_further_has_its_own_modules(tmp_path: Path) -> None:
    c = small(tmp_path, adapter={"init_from_existing": "runs/epoch50"}).config
    assert c.start_from == "runs/epoch50" and "targets" not in c.model_fields_set


def test_a_lokr_of_a_very_high_rank_is_whole(tmp_path: Path) -> None:
    result = small(tmp_path, adapter={"type": "lokr", "rank": 1e6, "decompose_factor": 4})
    c = result.config
    assert (c.network, c.rank, c.alpha, c.lokr_factor, c.lokr_decompose_both) == ("lokr", 10**6, 10**6, 4, False)
    assert any("the large one at zero" in line for line in result.no_equivalent)


def test_sizes_without_buckets_or_with_one_ratio(tmp_path: Path) -> None:
    def sizes(text: str) -> Any:
        c = small(tmp_path, f"{text}\n[[directory]]\npath = 'x'\n").config
        return c.resolution, c.buckets, c.bucket_step if not c.buckets else None

    assert sizes("resolutions = [500]") == (496, False, 16)  # 500 / 16 = 31.25
    assert sizes("resolutions = [[1280, 720]]") == (960, False, 64)  # a square of that area
    one = "enable_ar_bucket = true\nar_buckets = [[448, 576]]\nresolutions = [[448, 576]]"
    assert sizes(one) == ((448, 576), False, 64)
    assert sizes("size_buckets = [[960, 704, 1]]") == ((960, 704), False, 64)


def test_a_batch_size_for_each_resolution(tmp_path: Path) -> None:
    text = "resolutions = [512, 1024, 640]\n[[directory]]\npath = 'x'\n"
    c = small(tmp_path, text, micro_batch_size_per_gpu=[[512, 4], [1024, 1]]).config
    assert isinstance(c.dataset, dict)
    assert [(each["resolution"], each["batch_size"]) for each in c.dataset["datasets"]] == [
        (512, 4), (640, 4), (1024, 1),
    ]  # fmt: skip
    c = small(tmp_path, micro_batch_size_per_gpu=1, image_micro_batch_size_per_gpu=6).config
    assert c.batch_size == 6  # of images, in a run that may have videos


def test_the_length_and_the_schedule_of_a_run(tmp_path: Path) -> None:
    result = small(tmp_path, max_steps=2000, save_every_n_examples=400, micro_batch_size_per_gpu=4,
                   gradient_accumulation_steps=2)  # fmt: skip
    assert (result.config.steps, result.config.epochs, result.config.save_every) == (2000, None, 50)
    assert any(line.startswith("epochs: the run has 2000 steps") for line in result.no_equivalent)
    with pytest.raises(ConfigError, match="lr_scheduler: 'linear': its curve lasts for all epochs"):
        small(tmp_path, max_steps=2000, lr_scheduler="linear")
    c = small(tmp_path, lr_scheduler="cosine").config
    assert (c.lr_scheduler, c.epochs) == ("cosine", 5) and c.lr_min_ratio == pytest.approx(1e-2)
    c = small(tmp_path, lr_scheduler="cosine", force_constant_lr=3e-5, warmup_steps=10).config
    assert (c.lr_scheduler, c.learning_rate, c.warmup) == ("constant", 3e-5, 0)
    c = small(tmp_path, optimizer={"betas": [0.9, 0.99], "beta2_half_life": 1000}, micro_batch_size_per_gpu=4).config
    assert c.betas == pytest.approx((0.9, 0.5 ** (4 / 1000)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "wan"}}, "model.type: 'wan' (Wan) is a model that cannot be trained here"),
        ({"model": {"type": "minimax_h3"}}, "'minimax_h3' (MiniMax H3) is a model that cannot be trained here"),
        ({"adapter": {"type": "oft"}}, "adapter.type: 'oft': lora and lokr are trained (--set network=..."),
        ({"optimizer": {"type": "automagic"}}, "optimizer.type: 'automagic': is not supported (--set optimizer=..."),
        ({"optimizer": {"type": "AdamW8bitKahan", "stabilize": True}}, "optimizer.stabilize: True: updates are not"),
        ({"optimizer": {"gradient_release": True}}, "optimizer.gradient_release: True: each layer is updated"),
        ({"model": {"timestep_sample_method": "uniform", "flux_shift": True}}, "model.flux_shift: the shift of FLUX.1"),
        ({"pseudo_huber_c": 0.5}, "pseudo_huber_c: 0.5: its loss has another form there"),
        ({"model": {"bypass_guidance_embedding": True}}, "model.bypass_guidance_embedding: True"),
        ({"dataset": "[[directory]]\npath = 'x'\nmask_path = 'm'\n"}, "directory.0.mask_path: 'm': masks are files"),
        ({"dataset": "online_captions = true\n[[directory]]\npath = 'x'\n"}, "online_captions: True: captions are"),
        ({"dataset": "[[directory]]\npath = 'x'\nnum_repeats = 0.5\n"}, "directory.0.num_repeats: 0.5: images are"),
    ],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    changes = dict(changes)
    text = "resolutions = [512]\n" + str(changes.pop("dataset", "[[directory]]\npath = 'x'\n"))
    with pytest.raises(ConfigError) as caught:
        small(tmp_path, text, **changes)
    assert message in refusal(caught)


def test_files_that_lack_something(tmp_path: Path) -> None:
    full = {name: value for name, value in SMALL.items() if name != "adapter"}
    with pytest.raises(ConfigError, match="adapter: is missing: a full fine-tune"):
        import_table(full, tmp_path / "main.toml")
    with pytest.raises(ConfigError, match=r"dataset: expected \[\[directory\]\] tables"):
        small(tmp_path, "resolutions = [512]\n")
    with pytest.raises(ConfigError, match=r"directory\.0\.resolutions"):
        small(tmp_path, "resolutions = ['wide']\n[[directory]]\npath = 'x'\n")
    with pytest.raises(ConfigError, match=r"optimizer\.lr: is missing, and 'adamw_optimi' has no default"):
        import_table({**SMALL, "optimizer": {"type": "adamw_optimi"}}, tmp_path / "main.toml")
    (tmp_path / "d.toml").unlink()
    result = import_table(SMALL, tmp_path / "main.toml", dataset="photos")
    assert result.config.dataset == "photos" and any("d.toml' is not next to" in line for line in result.no_equivalent)
    dataset = write_text(tmp_path, DATASET, "otter.toml")
    with pytest.raises(ConfigError, match="is a dataset of diffusion-pipe; import the configuration that names it"):
        import_config(dataset)


def test_kontext_is_trained_with_its_references(tmp_path: Path) -> None:
    text = "resolutions = [512]\n[[directory]]\npath = 'x'\ncontrol_path = 'y'\n"
    result = small(tmp_path, text, model={"diffusers_path": "FLUX.1-Kontext-dev"})
    assert isinstance(result.config.dataset, dict)
    (subset,) = result.config.dataset["datasets"][0]["subsets"]
    assert (subset["image_dir"], subset["control"]) == ("x", ["y"])
    c = small(tmp_path, text, model={"transformer_path": "flux1-kontext-dev.safetensors"}).config
    assert c.variant == "flux1-kontext-dev"
