"""Prompts that were encoded before are not encoded again, unless anything that their states depend on has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

import inweave
from inweave.generate import encoded
from inweave.generate.config import GenerateConfig
from inweave.generate.encoded import EncodedPrompts, encoded_prompts
from inweave.generate.pipeline import Pipeline
from tests.peers import tiny_models

CONFIG = GenerateConfig(prompt="a red apple", guidance=4.0)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    yield inweave.pipeline(tiny_models.folder("sd1.5"), device="cpu", dtype="fp32")


@pytest.fixture
def prompts(pipe: Pipeline) -> Iterator[EncodedPrompts]:
    pipe.swap([])
    own = encoded_prompts(pipe.model)
    own.hits = 0
    yield own
    pipe.swap([])


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.lora(tmp_path_factory.mktemp("loras") / "style.safetensors", "sd1.5", dialect="kohya")


def states(pipe: Pipeline, config: GenerateConfig = CONFIG) -> Tensor:
    return pipe._conditioning(pipe.prepare(config)).at(0, 1).inputs["encoder_hidden_states"]


def anew(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, config: GenerateConfig = CONFIG) -> Tensor:
    """Encode the prompts anew."""
    with monkeypatch.context() as patch:
        patch.setattr(EncodedPrompts, "get", lambda self, model, request, encode: encode())
        return states(pipe, config)


def test_a_prompt_is_encoded_once(pipe: Pipeline, prompts: EncodedPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    states(
        pipe, CONFIG.model_copy(update={"clip_skip": 2})
    )  # transformers adds hooks when it is asked for layers first
    first = states(pipe)
    assert states(pipe) is first and prompts.hits == 1
    others: list[dict[str, Any]] = [
        {"prompt": "a (red:1.2) apple"}, {"negative_prompt": "gray"}, {"guidance": 1.0}, {"clip_skip": 2},
        {"width": 128, "height": 64}, {"prompt": "a red apple AND a dog"},
    ]  # fmt: skip
    for change in others:
        config = GenerateConfig(**{**CONFIG.model_dump(exclude_unset=True), **change})
        hits = prompts.hits
        for _ in range(2):
            made, expected = states(pipe, config), anew(pipe, monkeypatch, config)
            assert torch.equal(made, expected), change
        assert prompts.hits == hits + 1, change
    assert states(pipe) is first


def test_loras_of_text_encoders_are_followed_and_others_keep_what_was_encoded(
    pipe: Pipeline, prompts: EncodedPrompts, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, seen = states(pipe), list[Tensor]()
    for te in (0.8, -0.5, 0.0, 0.8):
        pipe.swap([{"path": str(lora), "te": te, "unet": 1.0}])
        for _ in range(2):
            assert torch.equal(states(pipe), anew(pipe, monkeypatch))
        seen.append(states(pipe).clone())
    assert torch.equal(seen[0], seen[3]) and torch.equal(seen[2], base)
    assert not torch.equal(seen[0], base) and not torch.equal(seen[0], seen[1])
    pipe.swap([])
    assert torch.equal(states(pipe), base)
    before = prompts.hits
    for unet in (0.3, 0.9):
        pipe.swap([{"path": str(lora), "te": 0.0, "unet": unet}])
        states(pipe)
    assert prompts.hits == before + 2, "the encoders were not written"


def test_another_weaver_on_the_encoders_is_noticed(pipe: Pipeline, prompts: EncodedPrompts, lora: Path) -> None:
    base = states(pipe).clone()
    weaver = inweave.Weaver({"te": pipe.model.networks["text_encoder"]})
    weaver.apply([(weaver.plan(str(lora), strict=False), 0.8)])
    assert not torch.equal(states(pipe), base)
    weaver.apply([])
    assert torch.equal(states(pipe), base)


def _layer(encoder: Any) -> Any:
    return next(module for module in encoder.modules() if isinstance(module, torch.nn.Linear))


def _halve(encoder: Any) -> Callable[[], object]:
    _layer(encoder).weight.mul_(0.5)
    return lambda: _layer(encoder).weight.mul_(2)


def _replace(encoder: Any) -> Callable[[], object]:
    layer = _layer(encoder)
    own, layer.weight = layer.weight, torch.nn.Parameter(0.5 * layer.weight, requires_grad=False)
    return lambda: setattr(layer, "weight", own)


def _move(encoder: Any) -> Callable[[], object]:
    layer = _layer(encoder)
    own, layer.weight.data = layer.weight.data, 0.5 * layer.weight.data
    return lambda: setattr(layer.weight, "data", own)


def _hook(encoder: Any) -> Callable[[], object]:
    return _layer(encoder).register_forward_hook(lambda layer, into, output: 2 * output).remove


@pytest.mark.parametrize("change", [_halve, _replace, _move, _hook])
@torch.no_grad()
def test_any_change_of_an_encoder_is_followed(
    pipe: Pipeline,
    prompts: EncodedPrompts,
    change: Callable[[Any], Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = states(pipe).clone()
    undo = change(pipe.model.networks["text_encoder"])
    changed = states(pipe)
    assert not torch.equal(changed, base) and torch.equal(changed, anew(pipe, monkeypatch))
    undo()
    assert torch.equal(states(pipe), base)


def test_what_is_kept_is_bounded(pipe: Pipeline, prompts: EncodedPrompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "MOST", 3)
    for number in range(5):
        states(pipe, CONFIG.model_copy(update={"guidance": 2.0 + number}))
    assert len(prompts) == 3
    monkeypatch.setattr(encoded, "MOST_BYTES", prompts.bytes - 1)
    states(pipe, CONFIG.model_copy(update={"guidance": 9.0}))
    assert 0 < len(prompts) < 3
    monkeypatch.setattr(encoded, "MOST_BYTES", 0)
    states(pipe, CONFIG.model_copy(update={"guidance": 10.0}))
    assert len(prompts) == 0 and prompts.bytes == 0


def test_a_model_that_is_trained_keeps_nothing(prompts: EncodedPrompts) -> None:
    own = inweave.pipeline(tiny_models.folder("sd1.5"), device="cpu", dtype="fp32")
    request = own.prepare(CONFIG)
    own.model.release_weaver()
    for _ in range(2):
        own._conditioning(request)
    assert len(encoded_prompts(own.model)) == 0
