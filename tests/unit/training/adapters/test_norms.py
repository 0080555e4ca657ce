"""train_norm: which layers are trained, the file they make, and going on from it; against lycoris-lora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from safetensors.torch import load_file

from inweave import attach, load
from inweave.errors import ConfigError
from inweave.layers import lora_layers
from inweave.layers.norms import NormLayer
from inweave.models.model import file_index
from inweave.training.adapters.attach import NAME, attach_adapters, collect_adapters
from inweave.training.config.schema import TrainConfig
from inweave.training.importers.targets import lycoris_targets
from inweave.training.memory.meta import measure
from inweave.training.optim.weight_norms import limit_norms
from inweave.training.output.adapter_file import save_adapter
from inweave.training.session import train
from tests.unit.training.image_sets import fresh_model, make_set, shared_model


def plain(**settings: Any) -> TrainConfig:
    usual = {"dataset": "-", "rank": 4, "precision": "fp32", "save_dtype": "fp32", "train_norm": True}
    return TrainConfig.of(**(usual | settings))


def norms_of(network: torch.nn.Module) -> list[str]:
    return [name for name, layer in lora_layers(network).items() if isinstance(layer, NormLayer)]


def trained(settings: TrainConfig, seed: int = 1) -> tuple[Any, Any]:
    """A model with random adapters, and what `attach_adapters` returned."""
    model = fresh_model()
    networks = {"unet": model.denoiser, "te1": model.networks["text_encoder"]}
    made = attach_adapters(networks if settings.train_text_encoders else {"unet": model.denoiser}, settings,
                           file_index(shared_model()))  # fmt: skip
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters.values():
            parameter.normal_(std=0.1)
    return model, made


def output(model: Any) -> torch.Tensor:
    torch.manual_seed(0)
    latents, text = torch.randn(1, 4, 8, 8), torch.randn(1, 77, model.denoiser.config.cross_attention_dim)
    with torch.no_grad():
        return model.denoiser(latents, torch.tensor([5]), encoder_hidden_states=text).sample  # type: ignore[no-any-return]


@pytest.mark.parametrize(("preset", "network"), [("full", "locon"), ("attn-mlp", "lora")])
def test_the_file_has_the_keys_of_lycoris(preset: str, network: str, tmp_path: Path, monkeypatch: Any) -> None:
    lycoris, presets = pytest.importorskip("lycoris.kohya"), pytest.importorskip("lycoris.config")
    base, targets = fresh_model(), lycoris_targets("sd", preset.replace("-", ""))
    kind = lycoris.LycorisNetworkKohya
    for name, value in {**presets.BUILTIN_PRESET_CONFIGS[preset].to_dict(), "unet_target_name": []}.items():
        replaced = name.upper().replace("_TARGET_", "_TARGET_REPLACE_")
        monkeypatch.setattr(
            kind, replaced, [each for each in value if "Time" not in each] if name != "enable_conv" else value
        )
    theirs = kind(
        base.networks["text_encoder"], base.denoiser, lora_dim=4, conv_lora_dim=4, alpha=4, conv_alpha=4,
        train_norm=True,
    )  # fmt: skip
    expected = {
        f"{each.lora_name}.{name}": value.shape
        for each in (*theirs.unet_loras, *theirs.text_encoder_loras)
        for name, value in each.named_parameters()
        if name in ("w_norm", "b_norm")
    }
    settings = plain(targets=targets, network=network, train_text_encoders=True, cache_text=False)
    model, _ = trained(settings)
    networks = {"unet": model.denoiser, "te1": model.networks["text_encoder"]}
    path = tmp_path / "a.safetensors"
    save_adapter(collect_adapters(networks), path, settings, file_index(shared_model()), {})
    stored = load_file(path)
    assert {name: value.shape for name, value in stored.items() if name.endswith(("w_norm", "b_norm"))} == expected
    assert expected and not {name for name in stored if name.endswith((".diff", ".diff_b"))}
    merged, again = base.denoiser, fresh_model()
    for each in theirs.unet_loras:  # they make the same weights of the file
        if type(each).__name__ == "NormModule":
            with torch.no_grad():
                each.w_norm.copy_(stored[f"{each.lora_name}.w_norm"])
                each.b_norm.copy_(stored[f"{each.lora_name}.b_norm"])
            each.merge_to()
    attach(again.denoiser, load(path), component="unet")
    assert norms_of(model.denoiser)
    for name in norms_of(model.denoiser):
        one, two = again.denoiser.get_submodule(name), merged.get_submodule(name)
        torch.testing.assert_close(one.weight, two.weight)
        torch.testing.assert_close(one.bias, two.bias)


def test_presets_train_the_norms_of_the_blocks() -> None:
    model, made = trained(plain())
    names = norms_of(model.denoiser)
    assert {name.rpartition(".")[2] for name in names} == {"norm", "norm1", "norm2", "norm3"}
    assert not [name for name in names if name.startswith("conv_norm_out")]
    leaves = [name for name in made.parameters if name.endswith("_norm")]
    assert len(leaves) == 2 * len(names) and set(leaves) < set(made.parameters)


def test_rules_skip_them_or_set_their_rate() -> None:
    rules = [{"pattern": r"norm2$", "skip": True}, {"pattern": r"norm1$", "learning_rate": 1e-3}]
    model, made = trained(plain(rules=rules))
    assert {name.rpartition(".")[2] for name in norms_of(model.denoiser)} == {"norm", "norm1", "norm3"}
    rates = {name: round(rate, 6) for name, rate in made.multipliers.items() if name.endswith("_norm")}
    assert {rate for name, rate in rates.items() if ".norm1." in name} == {10.0}
    assert {rate for name, rate in rates.items() if ".norm1." not in name} == {1.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dialect", ["kohya", "diffusers", "onetrainer"])
def test_training_goes_on_from_the_file(dialect: str, tmp_path: Path) -> None:
    settings = plain(dialect=dialect)
    try:
        model, made = trained(settings)
    except ConfigError as error:
        assert dialect == "diffusers" and "norm" in str(error)
        return
    path = tmp_path / "a.safetensors"
    settings = settings.model_copy(update={"dialect": made.dialect})
    save_adapter(collect_adapters({"unet": model.denoiser}), path, settings, file_index(shared_model()), {})
    again = fresh_model()
    further = attach_adapters({"unet": again.denoiser}, plain(start_from=str(path)), file_index(shared_model()))
    assert further.parameters.keys() == made.parameters.keys()
    assert all(torch.equal(further.parameters[name], value) for name, value in made.parameters.items())
    torch.testing.assert_close(output(again), output(model))
    with pytest.raises(ConfigError, match="train_norm: start_from has True, but False is set"):
        attach_adapters({"unet": fresh_model().denoiser}, plain(start_from=str(path), train_norm=False),
                        file_index(shared_model()))  # fmt: skip


def test_targets_without_norms_are_refused() -> None:
    with pytest.raises(ConfigError, match="train_norm: targets match no LayerNorm or GroupNorm"):
        trained(plain(targets=lycoris_targets("sd", "attnonly"), train_text_encoders=True, cache_text=False))


def test_a_model_without_such_layers_is_refused() -> None:
    model = fresh_model("z-image-turbo")
    with pytest.raises(ConfigError, match="train_norm: targets match no LayerNorm or GroupNorm"):
        attach_adapters({"unet": model.denoiser}, plain())


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("network", "drops"),
    [("lora", {}), ("dora", {"module_dropout": 0.3}), ("lokr", {"rank_dropout": 0.3, "module_dropout": 0.3})],
)
def test_a_resumed_run_is_the_straight_one(network: str, drops: dict[str, float], tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")

    def run(folder: str, steps: int) -> Path:
        settings = {"model": "inweave/emoji", "dataset": str(data), "output": str(tmp_path / folder), "name": "t"}
        return train(TrainConfig.of(
            **settings, **drops, steps=steps, resolution=32, min_bucket=32, bucket_step=32, batch_size=1, rank=2,
            train_norm=True, resume="auto", lr_scheduler="constant", network=network,
            precision="fp32", save_dtype="fp32", save_every=1, ema_decay=0.9, warmup=0,
            scale_weight_norms=1.0, weight_decay=0.1, device="cpu", gradient_checkpointing="full",
        )).path  # fmt: skip

    straight = load_file(run("straight", 3))
    run("parts", 2)
    resumed = load_file(run("parts", 3))
    assert resumed.keys() == straight.keys() and all(torch.equal(straight[name], resumed[name]) for name in straight)
    norms = [name for name in straight if name.endswith(("w_norm", "b_norm"))]
    assert norms and all(straight[name].any() for name in norms)


@pytest.mark.sample(1)
@pytest.mark.parametrize("network", ["lora", "dora"])
def test_the_planner_counts_them(network: str) -> None:
    _, made = trained(plain(network=network))
    blueprint = shared_model().blueprint
    settings = plain(network=network, resolution=64)
    measured = measure(blueprint, settings, torch.float32, lambda networks: None, backward=True)
    assert measured.parameters == sum(value.numel() for value in made.parameters.values())
    assert measured.activations > 0


def test_scale_weight_norms_leaves_them() -> None:
    model, made = trained(plain())
    before = {name: value.clone() for name, value in made.parameters.items()}
    branches = [layer.branch(NAME) for layer in lora_layers(model.denoiser).values()]
    limit_norms(branches, 1e-3, torch.ones(()))
    same = {name for name, value in made.parameters.items() if torch.equal(value, before[name])}
    assert same == {name for name in made.parameters if name.endswith("_norm")}
