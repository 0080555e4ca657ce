"""Prompts become the tokens their tokenizer makes of them, in chunks, weighted only where there is a weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from inweave.models.encode import clip_tokens, encode_clip, encode_t5, t5_tokens, token_counts
from inweave.models.families.base import Conditioning, ConditioningRequest, Family
from inweave.models.model import Model, load_model
from tests.peers import tiny_models as tiny

SHORT = ["", "a red apple", "A Café — naïve, 4k!!  (not a weight)", "emoji 🍎 and 漢字"]
#: two that pad with their end mark or with "!"
CLIPS = [("sd1.5", "tokenizer"), ("sd2.1", "tokenizer")]


@cache
def model(variant: str) -> Model:
    with tiny.quick_tokenizers():
        return load_model(tiny.folder(variant))


def clip(variant: str = "sd1.5") -> Any:
    return model(variant).networks["text_encoder"]


def condition(model: Model, request: ConditioningRequest) -> Conditioning:
    return model.family.condition(model, request)


def padded(tokenizer: Any, text: str, length: int = 77) -> torch.Tensor:
    return tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def words(count: int) -> str:
    return " ".join(["cat"] * count)


@pytest.mark.parametrize(("variant", "part"), CLIPS)
@pytest.mark.parametrize("text", SHORT)
def test_short_prompts_are_the_tokenizer_s_own(text: str, variant: str, part: str) -> None:
    tokenizer = tiny.tokenizer(variant, part)
    tokens = clip_tokens(tokenizer, [(text, 1.0)] if text else [])
    assert torch.equal(tokens.ids, padded(tokenizer, text))
    assert torch.equal(tokens.weights, torch.ones(1, 77))


def test_weighted_segments_are_joined_to_one_text() -> None:
    tokenizer = tiny.tokenizer("sd1.5", "tokenizer")
    tokens = clip_tokens(tokenizer, [("a very", 1.0), ("red", 1.3), ("apple", 1.0)])
    assert torch.equal(tokens.ids, padded(tokenizer, "a very red apple"))
    assert tokens.weights[0, :6].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.3, 1.0, 1.0])


@pytest.mark.parametrize(("count", "chunks"), [(75, 1), (76, 2), (150, 2), (151, 3)])
def test_long_prompts_take_more_chunks(count: int, chunks: int) -> None:
    tokenizer = tiny.tokenizer("sd1.5", "tokenizer")
    tokens = clip_tokens(tokenizer, [(words(count), 1.0)])
    assert tokens.ids.shape == tokens.weights.shape == (chunks, 77)
    assert torch.equal(tokens.ids[0], padded(tokenizer, words(75))[0])
    assert torch.equal(tokens.ids[-1], padded(tokenizer, words(count - 75 * (chunks - 1)))[0])


def test_break_starts_a_chunk() -> None:
    tokenizer = tiny.tokenizer("sd2.1", "tokenizer")
    tokens = clip_tokens(tokenizer, [("a red apple", 1.0), ("BREAK", 1.0), ("a green pear", 1.2)])
    expected = [padded(tokenizer, "a red apple"), padded(tokenizer, "a green pear")]
    assert torch.equal(tokens.ids, torch.cat(expected))
    assert tokens.weights[1, 1:4].tolist() == pytest.approx([1.2] * 3)


def test_empty_chunks_are_added_on_request() -> None:
    tokenizer = tiny.tokenizer("sd1.5", "tokenizer")
    tokens = clip_tokens(tokenizer, [("cat", 1.0)], 3)
    assert torch.equal(tokens.ids, torch.cat([padded(tokenizer, "cat"), padded(tokenizer, ""), padded(tokenizer, "")]))
    assert len(clip_tokens(tokenizer, [(words(100), 1.0)], 1).ids) == 2


def test_chunks_are_encoded_separately_and_joined() -> None:
    tokenizer = tiny.tokenizer("sd1.5", "tokenizer")
    tokens = clip_tokens(tokenizer, [(words(80), 1.0)])
    hidden, pooled = encode_clip(clip(), tokens.ids[None], tokens.weights[None], layer=None, final_norm=True)
    assert hidden.shape == (1, 154, tiny.WIDTH)
    for number in range(2):
        single = clip()(tokens.ids[number : number + 1])
        part = hidden[:, number * 77 : (number + 1) * 77]
        torch.testing.assert_close(part, single.last_hidden_state, rtol=1e-5, atol=1e-5)
        if number == 0:
            torch.testing.assert_close(pooled, single.pooler_output, rtol=1e-5, atol=1e-5)


def test_weights_of_one_leave_bits_alone() -> None:
    tokenizer = tiny.tokenizer("sd1.5", "tokenizer")
    tokens = clip_tokens(tokenizer, [("a red", 1.0), ("apple", 1.0)])
    hidden, _ = encode_clip(clip(), tokens.ids[None], tokens.weights[None], layer=None, final_norm=True)
    assert torch.equal(hidden, clip()(padded(tokenizer, "a red apple")).last_hidden_state)


def test_a_weight_scales_its_tokens_and_keeps_the_mean_of_its_chunk() -> None:
    tokenizer = tiny.tokenizer("sd1.5", "tokenizer")
    tokens = clip_tokens(tokenizer, [("a red apple", 1.0), ("BREAK", 1.0), ("a", 1.0), ("green", 1.5), ("pear", 1.0)])
    plain, _ = encode_clip(clip(), tokens.ids[None], layer=None, final_norm=True)
    hidden, _ = encode_clip(clip(), tokens.ids[None], tokens.weights[None], layer=None, final_norm=True)
    assert torch.equal(hidden[:, :77], plain[:, :77])  # no weight there
    before, after = plain[:, 77:], hidden[:, 77:]
    torch.testing.assert_close(after.mean(), before.mean(), rtol=1e-4, atol=1e-6)
    ratio = (after / before)[0].median(1).values
    torch.testing.assert_close(ratio[2] / ratio[1], torch.tensor(1.5), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ratio[3:], ratio[1].expand(74), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_clip_skip_counts_from_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 is diffusers' clip_skip=1: the layer before the last, through the final norm."""
    pipe, own = tiny.pipeline("sd1.5"), model("sd1.5")
    if not hasattr(pipe.text_encoder, "text_model"):  # the level diffusers looks for and newer transformers lack
        monkeypatch.setitem(pipe.text_encoder.__dict__, "text_model", pipe.text_encoder)
    prompts = ([("a red apple", 1.0)], [("blurry", 1.0)])
    for ours, theirs in ((None, None), (1, None), (2, 1), (3, 2)):
        hidden = condition(own, ConditioningRequest(*prompts, 5.0, 64, 64, ours)).inputs["encoder_hidden_states"]
        positive, negative = pipe.encode_prompt("a red apple", "cpu", 1, True, "blurry", clip_skip=theirs)
        assert torch.equal(hidden[1:], positive), ours
        if theirs is None:  # diffusers skips layers of the prompt only
            assert torch.equal(hidden[:1], negative), ours


@torch.no_grad()
@pytest.mark.parametrize("variant", ["sdxl", "sd3-medium"])
def test_the_larger_models_use_the_penultimate_layer(variant: str) -> None:
    pipe, own = tiny.pipeline(variant), model(variant)
    prompts = ([("a red apple", 1.0)], [("blurry", 1.0)])
    names = ("encoder_hidden_states", "text_embeds" if variant == "sdxl" else "pooled_projections")
    for ours, theirs in ((None, None), (2, None), (3, 1)):
        inputs = condition(own, ConditioningRequest(*prompts, 5.0, 64, 64, ours)).inputs
        options: dict[str, Any] = {} if variant == "sdxl" else {"prompt_2": None, "prompt_3": None}
        expected = pipe.encode_prompt(
            prompt="a red apple",
            negative_prompt="blurry",
            do_classifier_free_guidance=True,
            clip_skip=theirs,
            **options,
        )
        for name, (positive, negative) in zip(names, (expected[:2], expected[2:]), strict=True):
            same = torch.equal(inputs[name][1:], positive)
            assert same, (name, ours)
            if theirs is None:
                assert torch.equal(inputs[name][:1], negative), (name, ours)


def test_prompt_and_negative_prompt_have_the_same_number_of_chunks() -> None:
    for positive, negative in ((words(80), "dog"), ("dog", words(160))):
        conditioning = condition(model("sd1.5"), ConditioningRequest([(positive, 1.0)], [(negative, 1.0)], 5.0, 64, 64))
        chunks = 2 if positive == words(80) else 3
        assert conditioning.inputs["encoder_hidden_states"].shape == (2, 77 * chunks, tiny.WIDTH)


def test_t5_reads_its_tokenizer_s_ids() -> None:
    own = model("flux1-dev")
    tokenizer, encoder = own.tokenizers["tokenizer_2"], own.networks["text_encoder_2"]
    text = "a red apple, on a table — 4k"
    tokens = t5_tokens(tokenizer, [(text, 1.0)], 32)
    assert torch.equal(tokens.ids, padded(tokenizer, text, 32))
    assert torch.equal(encode_t5(encoder, tokens.ids, tokens.weights), encoder(tokens.ids)[0])
    assert torch.equal(t5_tokens(tokenizer, [("a red apple,", 1.0), ("on a table — 4k", 1.0)], 32).ids, tokens.ids)
    assert tokens.needed == len(tokenizer(text).input_ids)
    assert torch.equal(t5_tokens(tokenizer, [(words(60), 1.0)], 16).ids, padded(tokenizer, words(60), 16))


def test_a_prompt_too_long_for_t5_is_reported() -> None:
    conditioning = condition(model("flux1-dev"), ConditioningRequest([(words(600), 1.0)], [], 3.5, 64, 64))
    assert any("were ignored" in warning for warning in conditioning.warnings)


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3.5-medium", "flux1-dev"])
def test_the_lengths_of_many_texts_are_those_of_each(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts are tokenized in one call, and the numbers are those of `tokenize`."""
    family = model(variant).family
    texts = ["a", "BREAK", " ", "BREAK a", *(words(n) for n in (74, 75, 76, 150, 151, 600))]
    one_by_one = Family.text_lengths(family, model(variant), texts, 150)
    calls = 0

    def counted(tokenizer: Any, texts: Sequence[str]) -> list[int]:
        nonlocal calls
        calls += 1
        return token_counts(tokenizer, texts)

    monkeypatch.setattr("inweave.models.encode.token_counts", counted)
    assert family.text_lengths(model(variant), texts, 150) == one_by_one
    assert calls == len(model(variant).tokenizers)
    assert {cut for _, cut in one_by_one} == {False, True}
