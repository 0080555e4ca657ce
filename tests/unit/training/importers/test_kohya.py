"""kohya's files become ours: every setting is accounted for, and its defaults are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.detect import import_config
from tests.unit.training.importers.other_trainers import KOHYA, accounted, write_text


def test_kohya(tmp_path: Path) -> None:
    import tomllib

    cored = KOHYA.replace("attn-mlp", "full")
    assert import_config(write_text(tmp_path, cored), without=["multires_noise_iterations"]).config.tucker
    with pytest.raises(ConfigError, match=r"network_args\.use_scalar") as caught:
        import_config(write_text(tmp_path, cored.replace("use_tucker", "use_scalar")))
    assert len(caught.value.problems) == 1
    result = import_config(
        write_text(tmp_path, KOHYA), without=["multires_noise_iterations", "multires_noise_discount"]
    )
    c = result.config
    assert result.kind == "kohya"
    assert (c.network, c.rank, c.alpha, c.lokr_factor, c.conv_rank) == ("lokr", 32, 16, 8, None)
    assert re.fullmatch(c.targets[0], "down_blocks.1.attentions.0.transformer_blocks.0.ff.net.0.proj")
    assert not re.fullmatch(c.targets[0], "down_blocks.1.resnets.0.conv1")
    assert (c.epochs, c.steps, c.batch_size, c.gradient_accumulation) == (12, None, 4, 2)
    assert (c.learning_rate, c.train_text_encoders, c.precision) == (3e-4, False, "bf16")
    assert (c.optimizer, c.weight_decay, c.betas, c.lr_scheduler, c.cosine_cycles, c.warmup) == (
        "adamw8bit", 0.05, (0.9, 0.99), "cosine", 3, 0.1,
    )  # fmt: skip
    assert (c.resolution, c.buckets, c.min_bucket, c.max_bucket, c.bucket_step, c.upscale) == (
        1024,
        True,
        512,
        2048,
        32,
        False,
    )
    assert (c.caption_extensions, c.shuffle_tags, c.keep_tokens, c.flip) == ((".txt",), True, 2, True)
    assert (c.save_every, c.keep_last, c.sample_every, c.sample_prompts) == (500, 3, 250, ("prompts.txt",))
    assert (c.model, c.parts, c.output, c.name, c.seed) == (
        "models/sd_xl_base_1.0.safetensors", {"vae": "models/sdxl_vae.safetensors"}, "trained", "marble_v1", 1234,
    )  # fmt: skip
    missed = {each.split(":")[0] for each in result.no_equivalent}
    assert {"fp8_base", "my_own_extra"} <= missed
    later = {
        "multires_noise_iterations",
        "multires_noise_discount",
        "save_every_n_epochs",
    }  # where there are such settings
    assert missed - later == {"fp8_base", "my_own_extra"}
    assert result.mapping["network_dim"] == "rank" and result.mapping["unet_lr"] == "learning_rate"
    for section in tomllib.loads(KOHYA).values():
        for name in section:
            assert accounted(result, name), name


def test_kohya_is_silent_about_what_it_does(tmp_path: Path) -> None:
    """Its defaults are not ours: a file without them must not train something else here."""
    result = import_config(write_text(tmp_path, 'train_data_dir = "x"\nnetwork_dim = 16\nlearning_rate = 1e-4\n'))
    c = result.config
    assert (c.alpha, c.steps, c.precision, c.buckets, c.upscale) == (1, 1600, "fp32", False, True)
    assert c.caption_extensions == (".caption",)
    assert (c.train_text_encoders, c.text_encoder_learning_rate, c.cache_text) == (True, 1e-4, False)
    assert any(note.startswith("network_alpha: not in the file") for note in result.notes)
    assert "network_alpha" not in result.mapping


@pytest.mark.parametrize(("written", "length"), [("", 75), ("75", 75), ("150", 150), ('"225"', 225)])
def test_captions_are_cut_at_kohyas_length(written: str, length: int, tmp_path: Path) -> None:
    setting = f"max_token_length = {written}\n" if written else ""
    result = import_config(write_text(tmp_path, f'train_data_dir = "x"\nnetwork_dim = 16\n{setting}'))
    assert result.config.max_token_length == length
    assert result.mapping.get("max_token_length") == ("max_token_length" if written else None)


def test_kohya_for_flux(tmp_path: Path) -> None:
    text = """
    pretrained_model_name_or_path = "flux1-dev.safetensors"
    clip_l = "clip_l.safetensors"
    t5xxl = "t5xxl_fp16.safetensors"
    ae = "ae.safetensors"
    dataset_config = "dataset.toml"
    network_module = "networks.lora_flux"
    network_dim = 16
    network_alpha = 16
    network_args = ["train_blocks=single", "split_qkv=False"]
    cache_text_encoder_outputs = true
    network_train_unet_only = true
    learning_rate = 1e-4
    max_train_steps = 1000
    mixed_precision = "bf16"
    timestep_sampling = "shift"
    discrete_flow_shift = 3.1582
    model_prediction_type = "raw"
    guidance_scale = 1.0
    """
    result = import_config(write_text(tmp_path, text))
    c = result.config
    assert c.parts == {
        "text_encoder": "clip_l.safetensors",
        "text_encoder_2": "t5xxl_fp16.safetensors",
        "vae": "ae.safetensors",
    }
    assert (c.dataset, c.timestep_sampling, c.timestep_shift, c.guidance, c.targets) == (
        "dataset.toml",
        "shift",
        3.1582,
        1.0,
        (r"single_transformer_blocks\.\d+\..+|.*layers\.\d+\.(self_attn|mlp)\..+",),
    )
    assert (c.train_text_encoders, c.cache_text) == (False, True)
    assert (c.buckets, c.max_bucket, c.bucket_rule) == (False, 1024, "kohya")  # unless the dataset file says otherwise
    differ = ["dataset_config", "network_module"]  # it is not there; q, k and v are not fused here
    assert [each.split(":")[0] for each in result.no_equivalent] == differ
    again = write_text(tmp_path, c.to_toml(), "ours.toml")
    assert TrainConfig.load(again) == c == import_config(again).config
    mixed = write_text(tmp_path, 'train_data_dir = "x"\nrank = 8\nepochs = 2\nprecision = "bf16"\n')
    assert (import_config(mixed).config.rank, import_config(mixed).config.alpha) == (8, 1.0)


def test_without_buckets_images_are_cropped_to_the_resolution_itself(tmp_path: Path) -> None:
    """Whatever its steps, and however small they are."""
    text = 'train_data_dir = "x"\nnetwork_dim = 16\nresolution = "600"\nbucket_no_upscale = true\n'
    c = import_config(write_text(tmp_path, text)).config
    assert (c.buckets, c.resolution, c.bucket_step, c.upscale) == (False, 600, 8, True)
    with pytest.raises(ConfigError, match=r"'custom\.came\.CAME' is a class of a package that is not known here"):
        import_config(write_text(tmp_path, text + 'optimizer_type = "custom.came.CAME"\n'))
    with pytest.raises(ConfigError, match="'DAdaptation' is DAdaptAdamPreprint, an older"):
        import_config(write_text(tmp_path, text + 'optimizer_type = "DAdaptation"\n'))


def test_dropout_of_kohyas_own_networks(tmp_path: Path) -> None:
    """`networks.lora` does not read the argument that LyCORIS calls dropout; LyCORIS takes it from either."""
    text = 'train_data_dir = "x"\nnetwork_dim = 8\nnetwork_dropout = 0.1\nnetwork_module = "networks.lora"\n'
    arguments = 'network_args = ["dropout=0.3", "rank_dropout=0.2"]\n'
    result = import_config(write_text(tmp_path, text + arguments))
    c = result.config
    assert (c.network, c.dropout, c.hidden_dropout, c.rank_dropout) == ("lora", 0, 0.1, 0.2)
    assert "network_args.dropout: is not read by this network_module; network_dropout is" in result.notes
    assert (result.mapping["network_dropout"], result.mapping["network_args.rank_dropout"]) == (
        "hidden_dropout",
        "rank_dropout",
    )
    lycoris = text.replace("networks.lora", "lycoris.kohya")
    for more, name in (("", "network_dropout: 0.1"), ('network_args = ["dropout=0.3"]\n', "network_args.dropout: 0.3")):
        with pytest.raises(ConfigError, match=f"{name}: LyCORIS drops the adapter's outputs") as caught:
            import_config(write_text(tmp_path, lycoris + more))
        assert len(caught.value.problems) == 1
    c = import_config(write_text(tmp_path, lycoris + 'network_args = ["dropout=0"]\n')).config  # it counts
    assert (c.network, c.dropout, c.hidden_dropout) == ("locon", 0, 0)
    with pytest.raises(ConfigError, match="loha has dropout on the adapter's inputs only"):
        import_config(write_text(tmp_path, text.replace("networks.lora", "networks.loha")))


def test_a_list_of_images_becomes_a_metadata_file(tmp_path: Path) -> None:
    command = "train_network.py --network_module networks.lora --pretrained_model_name_or_path m --train_data_dir x "
    c = import_config(write_text(tmp_path, f"{command} --in_json meta.json --dataset_repeats 3", "a.sh")).config
    subset = {"image_dir": "x", "metadata_file": "meta.json"}
    assert c.dataset == {"general": {"num_repeats": 3}, "datasets": [{"subsets": [subset]}]}


def test_train_norm_is_that_of_lycoris(tmp_path: Path) -> None:
    arguments = '["algo=loha", "preset=attn-mlp", "train_norm=True"]'
    text = re.sub(r"network_args = .*", f"network_args = {arguments}", KOHYA)
    assert import_config(write_text(tmp_path, text)).config.train_norm
    text = re.sub(r"network_args = .*", 'network_args = ["algo=loha", "train_norm=False"]', KOHYA)
    assert not import_config(write_text(tmp_path, text)).config.train_norm


@pytest.mark.parametrize(
    ("algorithm", "cored"), [("locon", True), ("loha", True), ("lokr", True), ('locon", "dora_wd=True', False)]
)
def test_a_tucker_core_is_that_of_lycoris(algorithm: str, cored: bool, tmp_path: Path) -> None:
    arguments = f'["algo={algorithm}", "preset=full", "conv_dim=8", "conv_alpha=4", "use_tucker=True"]'
    text = re.sub(r"network_args = .*", f"network_args = {arguments}", KOHYA)
    if cored:
        c = import_config(write_text(tmp_path, text)).config
        assert (c.network, c.tucker, c.conv_rank) == (algorithm, True, 8)
    else:
        with pytest.raises(ConfigError, match="use_tucker: 'True': only convolutions of LoCon, LoHa"):
            import_config(write_text(tmp_path, text))
