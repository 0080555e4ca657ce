"""What is read: a maker of damaged inputs and the road that they take, for every reader there is.

The seeds are good inputs (a test proves that each of them is read), so that damage reaches what lies behind the first
check.
"""

from __future__ import annotations

import io
import json
import random
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from inweave.files.images import FORMATS, read_image
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.prompt import parse, weighted_pieces
from inweave.generate.record import read_record
from inweave.models import embedded
from inweave.models.open import open_model
from inweave.training.config.dataset_toml import Subset
from inweave.training.config.schema import TrainConfig
from inweave.training.data.captions import caption_variants
from inweave.training.data.metadata import read_metadata
from inweave.training.data.reader import read_dataset
from inweave.training.data.texts import read_texts
from inweave.training.importers.detect import import_config
from inweave.training.output.sample_prompts import read_line
from tests.fuzz import mutate
from tests.fuzz.harness import Reader

# -- prompts, captions, strengths

PROMPTS = (
    "a red apple",
    "a (red:1.3) apple, [blurry], ((sharp)) <lora:pixel:0.8> <lora:ink:0.5:1> BREAK \\(escaped\\) a:b, (x:1.2), [[y]]",
    "portrait of a woman, (detailed face:1.2), (masterpiece), AND a dog :0.5", "{a|b|{c|d}} cat", "",
)  # fmt: skip
CAPTIONS = (
    "a cat, sitting ||| on a mat, red, {blue|green|{dark|light} gray} wall ||| photo", "[trigger] a;;;b, c, d",
    "one, two, three, {x|y}",
)  # fmt: skip
SAMPLES = (*PROMPTS, "a cat --n bad --w 512 --h 512 --d 7 --s 20 --l 7.5")
STRENGTHS = (
    "pixel:0.8",
    "a.safetensors:te=0.5,unet=1",
    "pixel:0.8:0.2",
    "C:\\a.safetensors:1",
    "a:unet=0.8,down_blocks.1=0.5",
)


def read_prompt(value: str, folder: Path) -> None:
    parse(value)
    weighted_pieces(value)
    GenerateConfig(prompt=value, negative_prompt=value)


def read_caption(value: str, folder: Path) -> None:
    caption_variants(value, Subset(shuffle_tags=True, tag_dropout=0.2, keep_tokens=1), count=3, trigger="sks")
    caption_variants(value, Subset(), count=2)


def read_sample_line(value: str, folder: Path) -> None:
    read_line(value)


def read_strength(value: str, folder: Path) -> None:
    LoraChoice.parse(value).strengths()


# -- settings of a request

REQUEST: dict[str, Any] = {
    "prompt": "a cat", "negative_prompt": "x", "seed": 7, "steps": 20, "guidance": 7.5, "width": 512, "height": 512,
    "sampler": "euler", "schedule": "karras", "clip_skip": 1, "count": 2,
    "loras": [{"name": "pixel", "te": 1.0, "unet": 0.5}, "ink:0.5"], "strength": 0.5,
}  # fmt: skip


def read_request(value: Any, folder: Path) -> None:
    if isinstance(value, dict):
        GenerateConfig.model_validate(value)
    GenerateConfig.model_validate_json(json.dumps(value))


# -- PNG text

RECORD: dict[str, Any] = {
    "config": REQUEST, "model": {"name": "inweave/emoji", "hash": "0123456789"}, "inputs": {},
    "loras": [{"name": "pixel", "te": 1.0, "unet": 1.0, "sha256": "0" * 64, "autov3": "0" * 12, "in_prompt": False}],
}  # fmt: skip
PARAMETERS = (
    "a cat <lora:pixel:1>\nNegative prompt: blurry\nSteps: 20, Sampler: Euler a, Schedule type: Karras, CFG scale: 7, "
    "Seed: 42, Size: 512x512, Model hash: 0123456789, Model: base, VAE: x.pt, Clip skip: 2, "
    'Lora hashes: "pixel: 012345678901", Version: v1.9.3',
    "a dog\nSteps: 30, Sampler: DPM++ 2M Karras, CFG scale: 5.5, Seed: 1, Size: 768x512, Hires upscale: 2, "
    "Denoising strength: 0.5",
)
_PIXELS = zlib.compress(b"\0" * 13)


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    head = (4).to_bytes(4) + (1).to_bytes(4) + bytes([8, 2, 0, 0, 0])
    parts = [(b"IHDR", head), *chunks, (b"IDAT", _PIXELS), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4) + kind + data + zlib.crc32(data, zlib.crc32(kind)).to_bytes(4) for kind, data in parts
    )


def make_png(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        key, value = b"inweave", json.dumps(mutate.document(rng, RECORD))
        value = mutate.text(rng, [value]) if rng.random() < 0.2 else value
    else:
        key, value = b"parameters", mutate.text(rng, PARAMETERS)
    raw = value.encode("utf-8", "replace")
    form = rng.randrange(4)
    if form == 0:
        chunk = (b"tEXt", key + b"\0" + raw)
    elif form == 1:
        chunk = (b"zTXt", key + b"\0\0" + zlib.compress(raw))
    else:
        chunk = (b"iTXt", key + (b"\0\1\0\0\0" + zlib.compress(raw) if form == 2 else b"\0\0\0\0\0" + raw))
    whole = png(chunk)
    return mutate.damaged(rng, whole) if rng.random() < 0.2 else whole


def read_png(value: bytes, folder: Path) -> None:
    (folder / "a.png").write_bytes(value)
    record = read_record(folder / "a.png")
    GenerateConfig.model_validate(record["config"])


# -- images


@cache
def images() -> tuple[bytes, ...]:
    from PIL import Image

    result = []
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in FORMATS:
        for mode in ("RGB", "L"):
            buffer = io.BytesIO()
            options = {} if name in ("BMP", "TIFF") else {"exif": exif}
            Image.effect_noise((24, 16), 60).convert(mode).save(buffer, format=name, **options)
            result.append(buffer.getvalue())
    return tuple(result)


def make_image(rng: random.Random) -> bytes:
    return mutate.damaged(rng, rng.choice(images()))


def read_picture(value: bytes, folder: Path) -> None:
    (folder / "a.png").write_bytes(value)
    read_image(folder / "a.png", pixels=2**20)


# -- configurations of training: our own TOML, and what other trainers write

SETTINGS: dict[str, Any] = {
    "model": "inweave/emoji", "dataset": "inweave/pixel", "output": "out", "name": "x", "trigger": "sks",
    "network": "lora", "rank": 8, "alpha": 4, "targets": ["to_q", "to_k"], "steps": 100, "learning_rate": 1e-4,
    "batch_size": 2, "optimizer": "adamw", "seed": 3, "lr_scheduler": "cosine", "lr_warmup_steps": 10,
    "precision": "bf16", "resolution": 512, "sample_prompts": ["a cat"], "save_every": 10, "dialect": "kohya",
}  # fmt: skip
KOHYA: dict[str, Any] = {
    "pretrained_model_name_or_path": "base.safetensors", "train_data_dir": "imgs", "output_dir": "out",
    "output_name": "x", "network_module": "networks.lora", "network_dim": 16, "network_alpha": 8,
    "network_args": ["conv_dim=4", "algo=lora"], "max_train_steps": 1000, "learning_rate": 0.0001, "unet_lr": 1e-4,
    "text_encoder_lr": 5e-5, "lr_scheduler": "cosine", "optimizer_type": "AdamW8bit",
    "optimizer_args": ["weight_decay=0.1"], "train_batch_size": 2, "resolution": "512,512", "seed": 1,
    "mixed_precision": "bf16", "caption_extension": ".txt", "enable_bucket": True, "min_snr_gamma": 5, "clip_skip": 2,
}  # fmt: skip
ONETRAINER: dict[str, Any] = {
    "__version": 6, "training_method": "LORA", "model_type": "STABLE_DIFFUSION_15",
    "base_model_name": "base.safetensors", "lora_rank": 16, "lora_alpha": 1.0, "learning_rate": 0.0003, "epochs": 10,
    "batch_size": 1, "resolution": "512", "optimizer": {"optimizer": "ADAMW"},
    "unet": {"train": True, "learning_rate": None}, "text_encoder": {"train": False}, "output_dtype": "FLOAT_16",
    "train_dtype": "BFLOAT_16",
    "concepts": [{"name": "a", "path": "imgs", "text": {"prompt_source": "sample"},
            "image": {"enable_crop_jitter": True}}],
}  # fmt: skip
AI_TOOLKIT: dict[str, Any] = {
    "job": "extension",
    "config": {"name": "x", "process": [{
        "type": "sd_trainer", "training_folder": "output", "network": {"type": "lora", "linear": 16,
            "linear_alpha": 16},
        "save": {"dtype": "float16",
            "save_every": 250}, "datasets": [{"folder_path": "imgs", "caption_ext": "txt", "resolution": [512, 768]}],
        "train": {"batch_size": 1, "steps": 2000, "lr": 1e-4, "optimizer": "adamw8bit", "noise_scheduler": "flowmatch",
            "dtype": "bf16"},
        "model": {"name_or_path": "black-forest-labs/FLUX.1-dev", "is_flux": True, "quantize": True},
        "sample": {"prompts": ["a cat"], "steps": 20},
    }]},
}  # fmt: skip


def toml(value: Any) -> str:
    """As TOML as it gets: what has no form there is left as JSON, which is damage too."""
    if not isinstance(value, dict):
        return json.dumps(value)
    rows = [f"{json.dumps(str(name))} = {json.dumps(each)}" for name, each in value.items()]
    return "\n".join(rows)


def make_toml(rng: random.Random) -> str:
    value = toml(mutate.document(rng, SETTINGS))
    return mutate.text(rng, [value]) if rng.random() < 0.5 else value


def read_toml(value: str, folder: Path) -> None:
    (folder / "a.toml").write_bytes(value.encode("utf-8", "replace"))
    TrainConfig.load(folder / "a.toml")


def make_import(rng: random.Random) -> tuple[str, str]:
    seed = rng.choice((KOHYA, ONETRAINER, AI_TOOLKIT))
    document = mutate.document(rng, seed)
    if seed is KOHYA and rng.random() < 0.7:
        name, text = "a.toml", toml(document)
    elif seed is ONETRAINER:
        name, text = "a.json", json.dumps(document)
    else:
        name, text = "a.yaml", json.dumps(document, indent=1)  # JSON is YAML
    return name, mutate.text(rng, [text]) if rng.random() < 0.4 else text


def read_import(value: tuple[str, str], folder: Path) -> None:
    name, text = value
    (folder / name).write_bytes(text.encode("utf-8", "replace"))
    import_config(folder / name).config.to_toml()


# -- datasets

METADATA = ({"file_name": "a.png", "text": "a cat"}, {"file_name": "b.png", "caption": ["a dog", "b"]})
DATASET: dict[str, Any] = {
    "general": {"caption_extension": ".txt", "shuffle_caption": True, "keep_tokens": 1},
    "datasets": [{"resolution": 64, "batch_size": 1, "enable_bucket": True,
            "subsets": [{"image_dir": "imgs", "num_repeats": 2, "class_tokens": "x"}]}],
}  # fmt: skip


def make_metadata(rng: random.Random) -> str:
    rows = "\n".join(json.dumps(mutate.document(rng, row)) for row in METADATA)
    return mutate.text(rng, [rows]) if rng.random() < 0.4 else rows


def with_images(folder: Path) -> Path:
    target = folder / "imgs"
    if not target.exists():
        target.mkdir()
        for name in ("a.png", "b.png"):
            (target / name).write_bytes(png())
        (target / "a.txt").write_text("a cat")
    return target


def read_rows(value: str, folder: Path) -> None:
    (folder / "metadata.jsonl").write_bytes(value.encode("utf-8", "replace"))
    read_metadata(folder / "metadata.jsonl")


def read_listed(value: str, folder: Path) -> None:
    target = with_images(folder)
    (target / "metadata.jsonl").write_bytes(value.encode("utf-8", "replace"))
    read_dataset(target)


def dataset_toml(document: Any) -> str:
    rows: list[str] = []
    if isinstance(document, dict):
        for name, value in document.items():
            if name == "general" and isinstance(value, dict):
                rows += ["[general]", toml(value)]
            elif name == "datasets" and isinstance(value, list):
                for each in value:
                    subsets = each.get("subsets", []) if isinstance(each, dict) else []
                    plain = (
                        {key: item for key, item in each.items() if key != "subsets"}
                        if isinstance(each, dict)
                        else each
                    )
                    rows += ["[[datasets]]", toml(plain)]
                    for subset in subsets if isinstance(subsets, list) else [subsets]:
                        rows += ["[[datasets.subsets]]", toml(subset)]
            else:
                rows.insert(0, toml({name: value}))
    return "\n".join(rows)


def make_dataset_toml(rng: random.Random) -> str:
    text = dataset_toml(mutate.document(rng, DATASET))
    return mutate.text(rng, [text]) if rng.random() < 0.4 else text


def read_dataset_toml(value: str, folder: Path) -> None:
    with_images(folder)
    (folder / "set.toml").write_bytes(value.encode("utf-8", "replace"))
    read_dataset(folder / "set.toml")


def make_texts(rng: random.Random) -> str:
    rows = [{"text": "the cat sat"}, {"prompt": "a", "completion": "b"}]
    text = "\n".join(json.dumps(mutate.document(rng, row)) for row in rows)
    return mutate.text(rng, [text]) if rng.random() < 0.4 else text


def read_text_rows(value: str, folder: Path) -> None:
    for name in ("a.jsonl", "a.txt"):
        (folder / name).write_bytes(value.encode("utf-8", "replace"))
        read_texts(folder / name)


# -- model folders


@cache
def model_files() -> dict[str, Any]:
    """The documents of the embedded model."""
    return {
        str(path.relative_to(embedded.folder())): json.loads(path.read_text("utf-8"))
        for path in sorted(embedded.folder().rglob("*.json"))
        if not {"styles", "loras", "tokenizer"} & set(path.parts) and path.name in ("model_index.json", "config.json",
            "scheduler_config.json")
    }  # fmt: skip


def make_model(rng: random.Random) -> dict[str, str]:
    name = rng.choice(list(model_files()))
    text = json.dumps(mutate.document(rng, model_files()[name]))
    return {name: mutate.text(rng, [text]) if rng.random() < 0.2 else text}


def read_model(value: dict[str, str], folder: Path) -> None:
    """The folder with one document replaced; everything else are links to the embedded model."""
    for path in _linked(folder):
        name = str(path.relative_to(folder))
        if name in model_files():
            path.unlink(missing_ok=True)
            path.write_text(value.get(name) or json.dumps(model_files()[name]), "utf-8", "replace")
    open_model(folder)


def _linked(folder: Path) -> Iterator[Path]:
    for path in sorted(embedded.folder().rglob("*")):
        if path.is_file() and not {"styles", "loras"} & set(path.parts):
            target = folder / path.relative_to(embedded.folder())
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)
            yield target


GOOD_ROWS = "\n".join(map(json.dumps, METADATA))

READERS = (
    Reader("prompt", PROMPTS[1], lambda rng: mutate.text(rng, PROMPTS), read_prompt, 8),
    Reader("caption", CAPTIONS[0], lambda rng: mutate.text(rng, CAPTIONS), read_caption, 6, refuses=False),
    Reader("sample line", SAMPLES[-1], lambda rng: mutate.text(rng, SAMPLES), read_sample_line, 4),
    Reader("strength", STRENGTHS[0], lambda rng: mutate.text(rng, STRENGTHS), read_strength, 6),
    Reader("request", REQUEST, lambda rng: mutate.document(rng, REQUEST), read_request, 5),
    Reader("png text", png((b"tEXt", b"parameters\0" + PARAMETERS[1].encode())), make_png, read_png, 8),
    Reader("image", images()[0], make_image, read_picture, 8, allowance=32 * 2**20),
    Reader("training toml", toml(SETTINGS), make_toml, read_toml, 6),
    Reader("import", ("a.toml", toml(KOHYA)), make_import, read_import, 6),
    Reader("metadata", GOOD_ROWS, make_metadata, read_rows, 5, refuses=False),
    Reader("listed dataset", GOOD_ROWS, make_metadata, read_listed, 2),
    Reader("dataset toml", dataset_toml(DATASET), make_dataset_toml, read_dataset_toml, 2),
    Reader("texts", '{"text": "a"}', make_texts, read_text_rows, 4),
    Reader("model folder", {}, make_model, read_model, 1, allowance=32 * 2**20),
)
