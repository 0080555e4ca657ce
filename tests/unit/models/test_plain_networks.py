"""The networks that make images without their libraries: the same names, the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from inweave.models import embedded, vae
from inweave.models.bundled import component_config
from inweave.models.model import Model, load_model
from inweave.models.open import open_model
from inweave.models.sd.selection import CLASSES, is_covered, without_libraries
from inweave.models.sd.tokenizer import is_plain, read_tokenizer
from inweave.training.memory.checkpointing import apply_checkpointing

# without instructions for it, a processor takes a minute for an autoencoder in bfloat16
BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.full)


@pytest.fixture(scope="module", params=[torch.float32, BFLOAT16], ids=str)
def models(request: pytest.FixtureRequest) -> tuple[Model, Model]:
    """The embedded model with the classes of its libraries, and with its own."""
    return both_models(request.param)


def both_models(dtype: torch.dtype) -> tuple[Model, Model]:
    blueprint = open_model(embedded.NAME)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "vae_dtype": dtype}
    return load_model(blueprint, **options), load_model(without_libraries(blueprint), **options)


def _noise(*shape: int, seed: int, like: Model) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


@torch.no_grad()
def test_small_inputs_give_the_same_in_bfloat16() -> None:
    models = both_models(torch.bfloat16)
    latents, text = _noise(1, 8, 8, 4, seed=1, like=models[0]), _noise(1, 64, 192, seed=2, like=models[0])
    for call in (
        lambda model: model.denoiser(latents, torch.tensor(3), encoder_hidden_states=text, return_dict=False)[0],
        lambda model: model.vae.decode(latents[..., :2, :2], return_dict=False)[0],
    ):
        assert torch.equal(*map(call, models))


def test_every_network_is_exchanged(models: tuple[Model, Model]) -> None:
    library, plain = models
    for folder, network in plain.networks.items():
        assert type(network).__module__.startswith("inweave.models.sd"), folder
        assert type(network).__name__ == type(library.networks[folder]).__name__
    assert type(plain.tokenizer).__module__.startswith("inweave.models.sd")


def _layer(network: torch.nn.Module, name: str) -> bool:
    return isinstance(network.get_submodule(name), torch.nn.Linear | torch.nn.Conv2d)


def test_tensors_have_the_names_of_the_libraries(models: tuple[Model, Model]) -> None:
    for folder, network in models[0].networks.items():
        expected, tensors = network.state_dict(), models[1].networks[folder].state_dict()
        assert list(tensors) == list(expected), "saved states of a run are in this order"
        assert [n for n, _ in network.named_modules() if _layer(network, n)] == [
            n for n, _ in models[1].networks[folder].named_modules() if _layer(network, n)
        ]
        assert all(torch.equal(tensors[name], expected[name]) for name in expected), folder


@torch.no_grad()
@pytest.mark.sample(6)
@pytest.mark.parametrize(("height", "width", "batch"), [(16, 16, 2), (16, 16, 1), (24, 8, 3), (17, 13, 2), (11, 32, 1)])
@pytest.mark.parametrize("time", [0, 3, 999])
def test_the_denoiser_predicts_the_same(
    models: tuple[Model, Model], height: int, width: int, batch: int, time: int
) -> None:
    library, plain = models
    latents, text = _noise(batch, 8, height, width, seed=time, like=library), _noise(batch, 64, 192, seed=1, like=plain)
    expected, predicted = (
        model.denoiser(
            latents, torch.tensor(time), encoder_hidden_states=text, added_cond_kwargs=None, return_dict=False
        )[0]
        for model in models
    )
    assert torch.equal(predicted, expected)
    times = torch.arange(batch) * 100 + time % 100
    one, other = (model.denoiser(latents, times, text, return_dict=False)[0] for model in models)
    assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(128, 128), (72, 200), (136, 64)])
def test_the_autoencoder_gives_the_same(models: tuple[Model, Model], height: int, width: int) -> None:
    library, _ = models
    image = _noise(2, 3, height, width, seed=height, like=library)
    latents = _noise(2, 8, height // 8, width // 8, seed=width, like=library)
    expected, distribution = (model.vae.encode(image).latent_dist for model in models)
    for name in ("mean", "std"):
        assert torch.equal(getattr(distribution, name), getattr(expected, name))
    assert torch.equal(distribution.mode(), expected.mode())
    samples = [each.sample(torch.Generator().manual_seed(5)) for each in (expected, distribution)]
    assert torch.equal(*samples) and not torch.equal(samples[0], expected.mean)
    one, other = (model.vae.decode(latents, return_dict=False)[0] for model in models)
    assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.sample(1)
@pytest.mark.parametrize(("height", "width"), [pytest.param(40, 40, marks=pytest.mark.full), (16, 70), (33, 21)])
@pytest.mark.parametrize("side", [16, 12])
def test_tiles_are_decoded_and_joined_to_the_same(
    models: tuple[Model, Model], height: int, width: int, side: int
) -> None:
    """Exactly in float32, the precision of this autoencoder."""
    library, _ = models
    latents = _noise(1, 8, height, width, seed=height, like=library)
    images = []
    for model in models:
        whole = model.vae.decode(latents, return_dict=False)[0]
        with vae._tiled(model.vae, side, 8):
            images.append(model.vae.decode(latents, return_dict=False)[0])
        assert not torch.equal(images[-1], whole)
    assert torch.equal(*images)


def test_tiles_are_of_the_same_size_as_those_of_the_library(models: tuple[Model, Model]) -> None:
    expected, plain = (model.vae for model in models)
    for name in ("use_tiling", "tile_latent_min_size", "tile_sample_min_size"):
        assert getattr(plain, name) == getattr(expected, name)


@torch.no_grad()
@pytest.mark.parametrize(("batch", "length"), [(1, 32), (2, 32), (3, 7), (1, 1)])
def test_the_text_encoder_gives_the_same(models: tuple[Model, Model], batch: int, length: int) -> None:
    encoders = [model.networks["text_encoder"] for model in models]
    ids = torch.randint(0, 3070, (batch, length), generator=torch.Generator().manual_seed(length))
    ids[:, length // 2 :] = 3071  # the first of several ends is the text's
    expected, out = (encoder(ids, output_hidden_states=True) for encoder in encoders)
    assert torch.equal(out.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(out.pooler_output, expected.pooler_output)
    assert len(out.hidden_states) == len(expected.hidden_states) == 5
    assert all(map(torch.equal, out.hidden_states, expected.hidden_states))
    output = encoders[1](ids)
    assert torch.equal(output["last_hidden_state"], out.last_hidden_state) and output.get("hidden_states") is None


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
def test_gradients_are_the_same_with_gradient_checkpointing(models: tuple[Model, Model], mode: str) -> None:
    """Of the denoiser's inputs, and of the text encoder's table of tokens."""
    ids = torch.randint(0, 3070, (2, 32), generator=torch.Generator().manual_seed(0))
    gradients: list[tuple[torch.Tensor, ...]] = []
    for model in models:
        encoder: Any = model.networks["text_encoder"]
        apply_checkpointing({"unet": model.denoiser, "te1": encoder}, mode)
        table = encoder.get_input_embeddings().weight
        latents = _noise(2, 8, 16, 16, seed=3, like=model).requires_grad_()
        table.requires_grad_()
        try:
            text = encoder(ids).last_hidden_state
            loss = model.denoiser(latents, torch.tensor([3, 700]), text, return_dict=False)[0].float().square().mean()
            gradients.append(torch.autograd.grad(loss, (latents, table)))
        finally:
            table.requires_grad_(False)
    assert all(map(torch.equal, *gradients)) and all(bool(each.any()) for each in gradients[0])


def test_full_checkpointing_stores_as_little_as_the_library(models: tuple[Model, Model]) -> None:
    """Bytes that autograd keeps for the gradients of the denoiser."""
    stored = []
    for model in models:
        apply_checkpointing({"unet": model.denoiser}, "full")
        latents, text = (
            _noise(*shape, seed=1, like=model).requires_grad_() for shape in ((1, 8, 16, 16), (1, 32, 192))
        )
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.denoiser(latents, torch.tensor([3]), text, return_dict=False)[0].sum()
        stored.append(sum(storages.values()))
        del loss
    assert stored[1] == pytest.approx(stored[0], rel=0.02)


_WORDS = (
    "a red apple", "", " ", "  two  spaces\tand\nlines ", "ROBOT Face", "café naïve Ünïcödé e\u0301", "don't we'll I'm",
    "1234 5 years", "😀 🚀 emoji", "日本語のテキスト", "(weights:1.2), [brackets]", "<|startoftext|>",
    "x<|endoftext|>y", "under_score-dash", "\x00\x07 control", "ﬁ ligature", "a" * 300, "\u200bzero width",
    "мир", "…“quotes”",
)  # fmt: skip


def _texts() -> list[str]:
    generator = random.Random(0)
    letters = "".join(_WORDS)
    return [*_WORDS, *("".join(generator.choices(letters, k=generator.randrange(1, 60))) for _ in range(500))]


def test_the_tokenizer_gives_the_same_ids(models: tuple[Model, Model]) -> None:
    library, plain = (model.tokenizer for model in models)
    texts = _texts()
    for special in (False, True):
        options = {"add_special_tokens": special, "verbose": False}
        expected = [library(text, **options).input_ids for text in texts]
        assert [plain(text, **options).input_ids for text in texts] == expected
        assert plain(texts, **options, return_attention_mask=False).input_ids == expected
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "model_max_length"):
        assert getattr(plain, name) == getattr(library, name)
    assert plain.get_vocab() == library.get_vocab()


@pytest.mark.parametrize("variant", ["sd1.5", "sd2.1", "sdxl"])
def test_other_configurations_keep_their_library(variant: str) -> None:
    class_name, config = component_config(variant, "unet")
    assert not is_covered(class_name, config)


def test_a_setting_that_is_unknown_different_or_missing_keeps_the_library() -> None:
    for part in open_model(embedded.NAME).parts.values():
        config = {name: value for name, value in part.config.items() if not name.startswith("_")}
        kind = CLASSES[part.class_name]
        assert is_covered(part.class_name, config) and not is_covered(f"Other{part.class_name}", config)
        assert not is_covered(part.class_name, config | {"a_new_setting": 1})
        assert all(not is_covered(part.class_name, config | {name: "other"}) for name in kind.fixed)
        needed = config.keys() - kind.unused
        assert all(not is_covered(part.class_name, {n: v for n, v in config.items() if n != name}) for name in needed)


@pytest.mark.parametrize(
    ("folder", "setting"),
    [
        ("unet", {"attention_head_dim": [4, 4]}),
        ("unet", {"layers_per_block": [1, 1]}),
        ("unet", {"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"]}),
        ("unet", {"up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"]}),
        ("vae", {"down_block_types": ["AttnDownEncoderBlock2D"] * 4}),
        ("vae", {"up_block_types": ["AttnUpDecoderBlock2D"] * 4}),
        ("text_encoder", {"eos_token_id": 2}),
    ],
)
def test_a_value_that_is_computed_in_another_way_keeps_the_library(folder: str, setting: dict[str, Any]) -> None:
    part = open_model(embedded.NAME).parts[folder]
    assert is_covered(part.class_name, part.config) and not is_covered(part.class_name, {**part.config, **setting})


def test_a_tokenizer_with_other_settings_keeps_its_library(tmp_path: Path) -> None:
    folder = embedded.folder() / "tokenizer"
    assert is_plain(folder, "CLIPTokenizer") and not is_plain(folder, "T5TokenizerFast")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert is_plain(tmp_path, "CLIPTokenizer") and read_tokenizer(tmp_path).bos_token_id == 3070
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(settings.read_text("utf-8").replace('"do_lower_case": true', '"do_lower_case": false'), "utf-8")
    assert not is_plain(tmp_path, "CLIPTokenizer")
    (tmp_path / "tokenizer.json").unlink()
    assert not is_plain(tmp_path, "CLIPTokenizer")
