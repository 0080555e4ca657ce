"""Captions by a local image-to-text model of transformers: real BLIP and GIT networks with random weights."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from inweave.errors import ConfigError, FormatError, MissingError
from inweave.models.captioner import INSTRUCTION, Captioner, ensure_captioner
from inweave.serve.app import create_app
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[DEC]",
    "[ENC]",
    "a",
    "red",
    "green",
    "apple",
    "on",
    "the",
    "table",
]


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny BLIP with its processor, as save_pretrained does."""
    import torch
    from transformers import (  # type: ignore[attr-defined]
        BertTokenizerFast,
        BlipConfig,
        BlipForConditionalGeneration,
        BlipProcessor,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    folder = tmp_path_factory.mktemp("blip")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        **small, "vocab_size": len(WORDS), "encoder_hidden_size": 16, "max_position_embeddings": 128,
        "bos_token_id": 5, "pad_token_id": 0, "eos_token_id": 3, "sep_token_id": 3, "projection_dim": 8,
    }  # fmt: skip
    vision = {**small, "image_size": 32, "patch_size": 16, "projection_dim": 8}
    config = BlipConfig(text_config=text, vision_config=vision, projection_dim=8)
    BlipForConditionalGeneration(config).save_pretrained(folder)
    BlipProcessor(BlipImageProcessorPil(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder)
    return folder


def png(color: str) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 48), color).save(content, format="PNG")
    return content.getvalue()


async def _suggestions(settings: ServeSettings) -> list[httpx.Response]:
    service = Service.open(settings)
    app = create_app(settings, service=service)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:7870") as client:
        features = (await client.get("/v1/capabilities")).json()["features"]
        assert ("captions" in features) == (settings.captioner is not None)
        dataset = (await client.post("/v1/datasets", json={"name": "apples"})).json()["id"]
        assert (await client.put(f"/v1/datasets/{dataset}/pictures/one.png", content=png("red"))).status_code == 200
        address = f"/v1/datasets/{dataset}/pictures/one.png/caption"
        answers = [
            await client.post(address, json={}),
            await client.post(address, json={"instruction": "a red"}),
            await client.post(address.replace("one", "nosuch"), json={}),
            await client.post(address, json={"url": "x"}),
        ]
        described = (await client.get(f"/v1/datasets/{dataset}")).json()["pictures"]
        assert [each["caption"] for each in described] == [""], "a suggestion is not stored"
        await service.datasets.close()
        return answers


def test_a_worker_suggests_captions_by_the_model_it_was_given(blip: Path, tmp_path: Path) -> None:
    plain, begun, unknown, wrong = asyncio.run(
        _suggestions(ServeSettings(data=tmp_path / "data", captioner=blip))
    )  # fmt: skip
    image = Image.open(io.BytesIO(png("red")))
    captioner = Captioner(blip)
    assert plain.status_code == 200, plain.text
    assert plain.json() == {"name": "one.png", "caption": captioner(image)} and captioner(image)
    assert begun.json()["caption"] == captioner(image, "a red") and "a red" in begun.json()["caption"]
    assert (unknown.status_code, wrong.status_code) == (404, 400)


def test_a_worker_without_a_model_says_how_to_name_one(tmp_path: Path) -> None:
    answer, *_ = asyncio.run(_suggestions(ServeSettings(data=tmp_path / "data")))
    assert answer.status_code == 400 and "--captioner FOLDER" in answer.text


def test_folders_that_are_no_image_to_text_models_are_refused_at_once(blip: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="nosuch: not a folder"):
        ensure_captioner(tmp_path / "nosuch")
    with pytest.raises(FormatError, match=r"no config\.json"):
        ensure_captioner(tmp_path)
    for path in blip.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(FormatError, match=r"no \.safetensors"):
        ensure_captioner(tmp_path)
    with pytest.raises(ConfigError, match=r"captioner.*no \.safetensors"):
        ServeSettings(captioner=tmp_path)
    (tmp_path / "model.safetensors").write_bytes((blip / "model.safetensors").read_bytes())
    config = json.loads((blip / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(FormatError, match="cannot load it as an image-to-text model"):
        Captioner(tmp_path)


def test_a_model_with_a_chat_template_gets_the_instruction_as_a_message(blip: Path) -> None:
    captioner = Captioner(blip)
    seen: list[Any] = []

    def template(messages: object, **options: object) -> object:
        seen.append(messages)
        return captioner._processor(images=image, text="a red", return_tensors="pt")

    image = Image.new("RGB", (64, 48), "red")
    captioner._processor.apply_chat_template = template
    captioner._chat = True
    caption, _ = captioner(image), captioner(image, "Name it.")
    assert "a red" not in caption, "the question is not part of the caption"
    texts = [message["content"][1]["text"] for (message,) in seen]
    assert texts == [INSTRUCTION, "Name it."]
