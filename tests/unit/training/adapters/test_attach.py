"""Which modules are trained, with which network, and `start_from`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402

from inweave.errors import ConfigError, TargetError  # noqa: E402
from inweave.exchange.check import check  # noqa: E402
from inweave.exchange.convert import convert  # noqa: E402
from inweave.layers import eject, lora_layers  # noqa: E402
from inweave.models.model import file_index  # noqa: E402
from inweave.training.adapters.attach import NAME, attach_adapters, collect_adapters  # noqa: E402
from inweave.training.adapters.targets import select_modules  # noqa: E402
from inweave.training.config.schema import TrainConfig  # noqa: E402
from inweave.training.optim.flat import FlatParameters  # noqa: E402
from inweave.training.output.adapter_file import save_adapter  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, shared_model, task_on  # noqa: E402

#: what each preset means, with numbers of blocks left out: written down, not computed
ATTENTION = {
    "unet": {"attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_k", "attn2.to_v",
        "attn2.to_out.0"},
    "sd3": {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
        "attn.add_v_proj", "attn.to_add_out"},
    "flux": {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
        "attn.add_v_proj", "attn.to_add_out"},
    "z-image": {"attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"},
    "qwen-image": {"attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
        "attn.add_v_proj", "attn.to_add_out"},
    "clip": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"},
    "t5": {"SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o"},
    "llama": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"},
    "gpt2": {"attn.c_attn", "attn.c_proj"},
}  # fmt: skip
MLP = {
    "unet": {"ff.net.0.proj", "ff.net.2"},
    "sd3": {"ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"},
    "flux": {"ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out"},
    "z-image": {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"},
    "qwen-image": {"img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"},
    "clip": {"mlp.fc1", "mlp.fc2"},
    "t5": {"DenseReluDense.wi_0", "DenseReluDense.wi_1", "DenseReluDense.wo"},
    "llama": {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    "gpt2": {"mlp.c_fc", "mlp.c_proj"},
}
REST = {
    "unet": {"proj_in", "proj_out", "conv", "conv1", "conv2", "conv_shortcut", "time_emb_proj"},
    "sd3": {"norm1.linear", "norm1_context.linear"},
    "flux": {"norm1.linear", "norm1_context.linear", "norm.linear"},
    "z-image": {"adaLN_modulation.0"},
    "qwen-image": {"img_mod.1", "txt_mod.1"},
    "clip": set(), "t5": set(), "llama": set(), "gpt2": set(),
}  # fmt: skip
#: layers that are excluded: those before and after the blocks
NEVER = (
    "conv_in", "conv_out", "time_embedding", "add_embedding", "x_embedder", "context_embedder", "norm_out", "lm_head",
    "img_in", "txt_in", "cap_embedder", "t_embedder", "all_x_embedder", "all_final_layer", "time_text_embed",
    "pos_embed", "embed_tokens", "shared", "text_projection", "relative_attention_bias",
)  # fmt: skip
_NUMBERED = re.compile(
    r"^.*?(?:resnets|attentions|upsamplers|downsamplers|\w*transformer_blocks|layers|\w+_refiner|layer|h)\.\d+\.(?:transformer_blocks\.\d+\.|layer\.\d+\.)?"
)


def networks() -> dict[str, nn.Module]:
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
            )
        )
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))
    flux = tiny.pipeline("flux1-dev")
    return {
        "unet": tiny.pipeline("sd1.5").unet, "sd3": tiny.pipeline("sd3-medium").transformer, "flux": flux.transformer,
        "z-image": tiny.pipeline("z-image-turbo").transformer, "qwen-image": tiny.pipeline("qwen-image").transformer,
        "clip": flux.text_encoder, "t5": flux.text_encoder_2, "llama": llama, "gpt2": gpt2,
    }  # fmt: skip


def plain(**settings: Any) -> TrainConfig:
    return TrainConfig.of(dataset="-", rank=4, precision="fp32", save_dtype="fp32", **settings)


@pytest.mark.parametrize("kind", list(ATTENTION))
def test_presets_select_the_documented_modules(kind: str) -> None:
    network = networks()[kind]
    expected = {"attention": ATTENTION[kind], "attention-mlp": ATTENTION[kind] | MLP[kind]}
    expected["all"] = expected["attention-mlp"] | REST[kind]
    for preset, ends in expected.items():
        names = select_modules("unet", network, plain(targets=preset))
        assert {_NUMBERED.sub("", name) for name in names} == ends, preset
        assert not [name for name in names if name.startswith(NEVER)]
        every = [
            name
            for name, module in network.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D"
        ]
        assert names == [name for name in every if _NUMBERED.sub("", name) in ends and _NUMBERED.match(name)]


def test_locon_adds_the_convolutions_of_the_blocks() -> None:
    unet = tiny.pipeline("sd1.5").unet
    before = set(select_modules("unet", unet, plain(targets="attention")))
    modules = set(select_modules("unet", unet, plain(targets="attention", network="locon")))
    assert {_NUMBERED.sub("", name) for name in modules - before} == {"conv", "conv1", "conv2", "conv_shortcut"}


def ranks_of(network: nn.Module) -> dict[str, tuple[int, float]]:
    ranks = {}
    for name, layer in lora_layers(network).items():
        term: Any = layer.adapters[NAME]
        ranks[name] = (term.rank, term.alpha)
    return ranks


def test_rules_give_rank_alpha_rate_and_skip() -> None:
    model = fresh_model()
    rules = [
        {"pattern": "mid_block.*to_q", "skip": True},
        {"pattern": r"unet\.down_blocks.*to_q", "rank": 8},
        {"pattern": "down_blocks.*to_k", "rank": 2, "alpha": 1.0, "learning_rate": 1e-3},
        {"pattern": "to_v", "learning_rate": 5e-4},
        {"pattern": r"te1\..*layers\.0", "alpha": 3.0},
    ]
    config = plain(targets="attention", alpha=2.0, learning_rate=1e-4, text_encoder_learning_rate=2e-5, rules=rules,
                   train_text_encoders=True, cache_text=False)  # fmt: skip
    trained = attach_adapters({"unet": model.denoiser, "te1": model.networks["text_encoder"]}, config)
    unet, te = ranks_of(model.denoiser), ranks_of(model.networks["text_encoder"])
    assert not [name for name in unet if re.search("mid_block.*to_q", name)]
    assert {v for n, v in unet.items() if re.search("down_blocks.*to_q", n)} == {(8, 8.0)}, "a rule's rank is its alpha"
    assert {v for n, v in unet.items() if re.search("down_blocks.*to_k", n)} == {(2, 1.0)}
    assert {v for n, v in unet.items() if re.search("up_blocks.*to_[qkv]", n)} == {(4, 2.0)}
    assert {v for n, v in te.items() if "layers.0" in n} == {(4, 3.0)} and {
        v for n, v in te.items() if "layers.1" in n
    } == {(4, 2.0)}
    rates = {name: pytest.approx(factor * 1e-4) for name, factor in trained.multipliers.items()}
    for name, rate in rates.items():
        if re.search("down_blocks.*to_k", name):
            assert rate == 1e-3
        elif "to_v" in name:
            assert rate == 5e-4
        else:
            assert rate == (2e-5 if name.startswith("te1") else 1e-4)
    flat = FlatParameters(trained.parameters, trained.multipliers)
    assert not flat.uniform and len(trained.parameters) == 2 * trained.modules
    assert all(
        parameter.dtype == torch.float32 and parameter.requires_grad for parameter in trained.parameters.values()
    )


def test_ranks_are_of_whole_names() -> None:
    """`a` is not the end of `b.a`: each has its own."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.b = nn.ModuleDict({"proj": nn.Linear(4, 4)})

    network = Two()
    attach_adapters({"model": network}, plain(targets=["proj"], rules=[{"pattern": r"^model\.proj", "rank": 1}]))
    assert ranks_of(network) == {"proj": (1, 1.0), "b.proj": (4, 4.0)}


@pytest.mark.parametrize(
    ("settings", "linear", "wide"),
    [
        ({}, (4, 4.0), (4, 4.0)),
        ({"alpha": 1.0}, (4, 1.0), (4, 1.0)),
        ({"alpha": 1.0, "conv_rank": 2}, (4, 1.0), (2, 2.0)),
        ({"alpha": 1.0, "conv_rank": 2, "conv_alpha": 0.5}, (4, 1.0), (2, 0.5)),
        ({"conv_alpha": 2.0}, (4, 4.0), (4, 2.0)),
    ],
)
def test_convolutions_have_their_own_rank(settings: dict[str, Any], linear: Any, wide: Any) -> None:
    unet = fresh_model().denoiser
    attach_adapters({"unet": unet}, plain(network="locon", **settings))
    ranks = ranks_of(unet)
    assert {value for name, value in ranks.items() if name.endswith((".conv1", ".conv2", ".conv"))} == {wide}
    assert {value for name, value in ranks.items() if name.endswith(("to_q", "conv_shortcut"))} == {linear}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["to_q", "to_quack"]}, "to_quack"),
        ({"targets": "nothing.*"}, "nothing"),
        ({"rules": [{"pattern": "to_quack", "rank": 2}]}, "to_quack"),
        (
            {"rules": [{"pattern": "to_q", "rank": 2}, {"pattern": "attn1.to_q", "rank": 3}]},
            "belongs to an earlier rule",
        ),
        ({"rules": [{"pattern": ".", "skip": True}]}, "every module is skipped"),
    ],
)
def test_settings_without_effect_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attach_adapters({"unet": fresh_model().denoiser}, plain(**settings))


def test_a_target_may_match_modules_of_one_network_only() -> None:
    model = fresh_model()
    config = plain(targets=["to_q", "q_proj"], train_text_encoders=True, cache_text=False)
    attach_adapters({"unet": model.denoiser, "te1": model.networks["text_encoder"]}, config)
    with pytest.raises(ConfigError, match=r"matches none of the .* layers of te1"):
        other = fresh_model()
        lonely = plain(targets=["to_q"], train_text_encoders=True, cache_text=False)
        attach_adapters({"unet": other.denoiser, "te1": other.networks["text_encoder"]}, lonely)


# every kind of network, trained, saved and continued

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "locon": {"network": "locon", "conv_rank": 2},
    "dora": {"network": "dora"},
    "loha": {"network": "loha"},
    "lokr": {"network": "lokr", "lokr_factor": 2},
    "rslora": {"rslora": True, "alpha": 2.0},
    "all": {"targets": "all", "alpha": 2.0},
}


def steps_on(task: Any, trained: Any, count: int = 4, rate: float = 1e-2) -> list[float]:
    """Run torch's Adam on one batch with the same random draws."""
    optimizer = torch.optim.Adam(list(trained.parameters.values()), lr=rate)
    inputs = sample_inputs(task)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = task.loss(inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_trains_and_continues_from_its_file(kind: str, tmp_path: Path) -> None:
    data, model = make_set(tmp_path / "set"), fresh_model()
    settings: dict[str, Any] = {"targets": "attention", **KINDS[kind], "train_text_encoders": True, "cache_text": False}
    task = task_on(data, model=model, **settings)
    inputs = sample_inputs(task)
    with torch.no_grad():
        bare = task.loss(inputs)
    trained = attach_adapters(task.networks, task.config)
    with torch.no_grad():
        torch.testing.assert_close(task.loss(inputs), bare, rtol=1e-5, atol=1e-6, msg="a fresh adapter changes nothing")
    losses = steps_on(task, trained)
    assert losses[-1] < losses[0] - 1e-4 and sorted(losses, reverse=True) == losses
    index = file_index(model)
    for dialect in ("kohya", "diffusers") if kind in ("lora", "rslora") else ("kohya",):
        file = save_adapter(
            collect_adapters(task.networks),
            tmp_path / f"{dialect}.safetensors",
            task.config.model_copy(update={"dialect": dialect}),
            index,
            {},
        )
        assert check(file, index).ok
        with torch.no_grad():
            trained_loss = task.loss(inputs)
        other = fresh_model()
        again = task_on(data, model=other, **settings, start_from=str(file))
        more = attach_adapters(again.networks, again.config, file_index(other))
        with torch.no_grad():
            torch.testing.assert_close(again.loss(inputs), trained_loss, rtol=1e-5, atol=1e-6)
        assert more.parameters.keys() == trained.parameters.keys()
        assert steps_on(again, more, 2)[-1] < float(trained_loss)


def on_unet(model: Any, file: Path, **settings: Any) -> None:
    config = plain(start_from=str(file), train_text_encoders=True, cache_text=False, **settings)
    clips = {
        f"te{n}": model.networks[f] for n, f in enumerate(("text_encoder", "text_encoder_2"), 1) if f in model.networks
    }
    clips = {name: clip for name, clip in clips.items() if "T5" not in type(clip).__name__}
    attach_adapters({"unet": model.denoiser, **clips}, config, file_index(model))


def denoised(model: Any, seed: int = 0) -> torch.Tensor:
    """Return one prediction of the text encoders and the denoiser."""
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, model.vae.config.latent_channels, 8, 8, generator=generator)
    with torch.no_grad():
        family, sizes = model.family, torch.tensor([[64.0, 64, 0, 0, 64, 64]])
        text = family.encode(model, family.token_ids(model, "a red apple"), None)
        inputs = family.batch_inputs(model, text, sizes, tuple(latents.shape), 1.0)
        return family.denoise(model, latents, torch.tensor([500.0]), inputs)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("variant", "dialect"),
    [("sd1.5", "kohya"), ("sd1.5", "diffusers"), ("sdxl", "kohya"), ("sdxl", "diffusers"), ("sd3-medium", "diffusers"),
     ("flux1-dev", "kohya"), ("flux1-dev", "diffusers")],
)  # fmt: skip
def test_start_from_another_dialect(variant: str, dialect: str, tmp_path: Path) -> None:
    """Trainable layers predict what the merged weights predict, denoiser and text encoders."""
    fused = variant == "flux1-dev" and dialect == "kohya"  # q, k and v are one module there
    file = tiny.lora(tmp_path / "style.safetensors", variant, dialect="diffusers" if fused else dialect)
    if fused:
        file = Path(convert(file, tmp_path / "kohya.safetensors", to="kohya", base=tiny.folder(variant)).path)
    merged, live = shared_model(variant), fresh_model(variant)
    before = denoised(merged)
    merged.swap([(file, 1.0)])
    try:
        expected = denoised(merged)
    finally:
        merged.swap([])
    assert float((expected - before).abs().max()) > 0.05
    on_unet(live, file)
    torch.testing.assert_close(denoised(live), expected, rtol=1e-3, atol=2e-4)


def test_start_from_a_peft_folder(tmp_path: Path) -> None:
    model = fresh_model()
    task = task_on(make_set(tmp_path / "set"), model=model)
    trained = attach_adapters(task.networks, task.config)
    steps_on(task, trained)
    saved = save_adapter(
        collect_adapters(task.networks),
        tmp_path / "out.safetensors",
        task.config.model_copy(update={"dialect": "peft"}),
        file_index(model),
        {},
    )
    assert (saved / "adapter_config.json").is_file()
    other = fresh_model()
    attach_adapters({"unet": other.denoiser}, plain(start_from=str(saved)), file_index(other))
    torch.testing.assert_close(denoised(other), denoised(model), rtol=1e-5, atol=1e-6)


def test_start_from_keeps_dropout_and_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    file = tiny.lora(tmp_path / "style.safetensors", "sd1.5", dialect="kohya")
    model = fresh_model()
    on_unet(model, file, dropout=0.25, hidden_dropout=0.5, rank_dropout=0.125)
    branches = [layer.branch(NAME) for layer in lora_layers(model.denoiser).values()]
    assert {(each.dropout, each.hidden_dropout, each.rank_dropout) for each in branches} == {(0.25, 0.5, 0.125)}
    index = file_index(shared_model())
    with pytest.raises(ConfigError, match="train_text_encoders"):  # the file's text encoder would be lost
        attach_adapters({"unet": fresh_model().denoiser}, plain(start_from=str(file)), index)
    with pytest.raises(ConfigError, match="brings its own modules"):
        rules = [{"pattern": "to_q", "rank": 2}]
        attach_adapters({"unet": fresh_model().denoiser}, plain(start_from=str(file), rules=rules), index)
    other = fresh_model()
    tensors = load_file(file)
    module = next(key for key in tensors if key.startswith("lora_unet") and key.endswith("to_out_0.lora_up.weight"))
    extra = {module.replace("lora_up.weight", "diff_b"): tensors[module][:, 0].contiguous()}
    save_file(tensors | extra, tmp_path / "biased.safetensors")
    with pytest.raises(TargetError, match=r"to_out.0 has values of its own"):
        on_unet(other, tmp_path / "biased.safetensors")
    other = fresh_model()
    rules = [{"pattern": "attn2.to_q", "learning_rate": 1e-3}]
    config = plain(start_from=str(file), rules=rules, train_text_encoders=True, cache_text=False)
    trained = attach_adapters({"unet": other.denoiser, "te1": other.networks["text_encoder"]}, config, index)
    assert {round(f, 6) for n, f in trained.multipliers.items() if "attn2.to_q" in n} == {10.0}
    eject(other.denoiser)


def test_a_network_missing_from_the_file_is_initialized(tmp_path: Path) -> None:
    data, model = make_set(tmp_path / "set"), fresh_model()
    task = task_on(data, model=model)
    steps_on(task, attach_adapters(task.networks, task.config))
    file = save_adapter(
        collect_adapters(task.networks), tmp_path / "unet.safetensors", task.config, file_index(model), {}
    )
    other = fresh_model()
    on_unet(other, file)
    assert lora_layers(other.networks["text_encoder"])
    torch.testing.assert_close(denoised(other), denoised(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["sdxl", "flux1-dev"])
def test_a_file_for_another_base_is_refused(variant: str, tmp_path: Path) -> None:
    file = tiny.lora(
        tmp_path / "style.safetensors", variant, dialect="diffusers" if variant == "flux1-dev" else "kohya"
    )
    model = fresh_model()
    with pytest.raises(TargetError):
        on_unet(model, file)
    assert not lora_layers(model.denoiser)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("sd1.5", {"dialect": "peft", "train_text_encoders": True, "cache_text": False}),  # a folder holds one network
        # kohya joins q, k and v, and products of products have no common factors
        ("flux1-dev", {"network": "loha", "dialect": "kohya"}),
    ],
)
def test_what_cannot_be_saved_is_refused_before_it_is_trained(variant: str, settings: dict[str, Any]) -> None:
    model = fresh_model(variant)
    with pytest.raises(ConfigError, match="dialect"):
        attach_adapters(
            {"unet": model.denoiser, "te1": model.networks["text_encoder"]}, plain(**settings), file_index(model)
        )
    other = fresh_model(variant)
    trained = attach_adapters({"unet": other.denoiser}, plain(targets="attention"), file_index(other))
    bare = fresh_model(variant)
    again = attach_adapters({"unet": bare.denoiser}, plain(targets="attention")).parameters
    assert all(torch.equal(parameter, again[name]) for name, parameter in trained.parameters.items()), (
        "looking changes nothing"
    )


@pytest.mark.parametrize("skipped", ["te1", "te2"])
def test_one_of_two_text_encoders_may_be_left_out(skipped: str, tmp_path: Path) -> None:
    rules = [{"pattern": rf"^{skipped}\.", "skip": True}]
    task = task_on(make_set(tmp_path / "set"), model=fresh_model("sdxl"), train_text_encoders=True, rules=rules)
    trainable = attach_adapters(task.networks, task.config)
    assert {name.partition(".")[0] for name in trainable.parameters} == {"unet", "te1", "te2"} - {skipped}
    task.loss(sample_inputs(task)).backward()
    entries = collect_adapters(task.networks).entries
    assert {key.partition(".")[0] for entry in entries for key in entry.keys} == {"unet", "te1", "te2"} - {skipped}
