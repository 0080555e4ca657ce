"""Encoded once: by content and settings, shared between runs, whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from PIL import Image
from safetensors.torch import save_file

from inweave.errors import FormatError
from inweave.files.writing import write_atomic
from inweave.training.data import cache as caching
from inweave.training.data.cache import TensorCache, cache_key
from tests.unit.training.image_sets import (
    CAPTIONS,
    color_image,
    fresh_model,
    make_set,
    same,
    sample_inputs,
    shared_model,
    task_on,
)


def two() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def never() -> dict[str, torch.Tensor]:
    raise AssertionError("made again")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# the store


def test_made_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    first = TensorCache(tmp_path)
    value = first.get({"x": 1}, two)
    assert same(first.get({"x": 1}, never), value) and (first.misses, first.hits) == (1, 1)
    later = TensorCache(tmp_path)
    result = later.get({"x": 1}, never)
    assert same(result, two()) and result["b"].dtype == torch.bfloat16
    assert (later.misses, later.hits) == (0, 1)
    assert len(files(tmp_path)) == 1


def test_keys_are_facts() -> None:
    assert cache_key({"a": 1, "b": (2, 3)}) == cache_key({"b": [2, 3], "a": 1})
    assert len({cache_key({"a": value}) for value in (1, 2, "1", None, [1], "\udcff")}) == 6


def test_without_a_folder_it_stays_in_memory() -> None:
    store = TensorCache(None, memory=0)
    store.get(1, two), store.get(2, two)
    store.get(1, never), store.get(2, never)


@pytest.mark.parametrize("left", [0, 4, 100, -1])
def test_a_truncated_file_is_rebuilt(tmp_path: Path, left: int) -> None:
    TensorCache(tmp_path).get("x", two)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    again = TensorCache(tmp_path)
    assert same(again.get("x", two), two()) and again.misses == 1
    assert file.read_bytes() == whole
    assert same(TensorCache(tmp_path).get("x", never), two())


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write_atomic

    def interrupted(path: Path, chunks: list[bytes], **options: Any) -> None:
        def half() -> Iterator[bytes]:
            yield chunks[0][:50]
            raise KeyboardInterrupt

        real(path, half(), **options)

    monkeypatch.setattr(caching, "write_atomic", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TensorCache(tmp_path).get("x", two)
    assert files(tmp_path) == []
    monkeypatch.undo()
    assert same(TensorCache(tmp_path).get("x", two), two())


@pytest.mark.parametrize("damage", ["other tensors", "a bit"])
def test_a_changed_cache_entry_is_rebuilt(damage: str, tmp_path: Path) -> None:
    TensorCache(tmp_path).get("x", two)
    (path,) = tmp_path.rglob("*.safetensors")
    if damage == "a bit":
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    else:
        save_file({"strange": torch.ones(3)}, path)
    again = TensorCache(tmp_path)
    assert same(again.get("x", two), two()) and again.misses == 1
    assert TensorCache(tmp_path).get("x", two).keys() == two().keys()


def test_exchanged_files_are_encoded_again_and_the_log_says_so(tmp_path: Path) -> None:
    """Each is whole, of the same names and shapes."""
    store = TensorCache(tmp_path)
    store.get("x", two), store.get("y", lambda: {name: tensor + 1 for name, tensor in two().items()})
    one, other = files(tmp_path)
    one.rename(tmp_path / "x"), other.rename(one), (tmp_path / "x").rename(other)
    again = TensorCache(tmp_path)
    assert same(again.get("x", two), two()) and again.misses == 1
    (note,) = again.new_notes()
    assert "1 file with the key of other contents, encoded again" in note and ".safetensors" in note
    assert again.new_notes() == []
    assert same(TensorCache(tmp_path).get("x", never), two())


def test_a_file_without_a_key_is_encoded_again(tmp_path: Path) -> None:
    """Also one whose checksum is that of its tensors, as earlier versions wrote them."""
    TensorCache(tmp_path).get("x", two)
    (path,) = files(tmp_path)
    save_file(two(), path, {"sum": str(caching.tensor_checksum(two()))})
    again = TensorCache(tmp_path)
    assert same(again.get("x", two), two()) and again.misses == 1
    (note,) = again.new_notes()
    assert "1 file without a key, encoded again" in note


def test_the_cache_of_an_earlier_version_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "0f").mkdir()
    store = TensorCache(tmp_path)
    assert store.new_notes() == [], "nothing was looked for"
    store.get("x", two), store.get("y", two)
    (note,) = store.new_notes()
    assert "earlier version" in note and "can be deleted" in note and store.new_notes() == []
    later = TensorCache(tmp_path)
    later.get("z", two)
    assert later.new_notes() == []


@pytest.mark.parametrize("contents", [b"", b"<html>", b"PK\x03\x04" * 9, b"\x02" + b"\0" * 7 + b"{}", b"\xff" * 64])
def test_foreign_files_are_encoded_again(contents: bytes, tmp_path: Path) -> None:
    TensorCache(tmp_path).get("x", two)
    (path,) = files(tmp_path)
    path.write_bytes(contents)
    again = TensorCache(tmp_path)
    assert same(again.get("x", two), two()) and len(again.new_notes()) == 1
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FormatError, match="it is a named pipe; it is a cache file"):
        TensorCache(tmp_path).get("x", two)


def test_types_that_torch_lacks_are_encoded_again(tmp_path: Path) -> None:
    """A valid file of another program in the place of a cache file."""
    TensorCache(tmp_path).get("x", two)
    (path,) = files(tmp_path)
    for dtype, size in (("F4", 4), ("F6_E2M3", 6), ("F8_E8M0", 8), ("C64", 64), ("BOOL", 8)):
        header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
        again = TensorCache(tmp_path)
        assert same(again.get("x", two), two()) and len(again.new_notes()) == 1, dtype


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FormatError, match="cache_dir"):
        TensorCache(tmp_path / "taken").get("x", two)


def test_memory_has_a_limit_where_files_have_it_all(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in two().values())
    store = TensorCache(tmp_path, memory=3 * size)
    for number in range(10):
        store.get(number, two)
    assert len(store._memory) == 3 and store._bytes == 3 * size
    store.get(7, never)
    store.get(10, two)  # 8 was used longest ago now
    hits, place = store.hits, store._place
    store._place = lambda name: None  # type: ignore[method-assign]
    for number in (7, 9, 10):
        store.get(number, never)
    assert store.hits == hits + 3 and len(store._memory) == 3
    store._place = place  # type: ignore[method-assign]
    assert same(store.get(0, never), two())


# what is encoded


@contextmanager
def amount(model: Any) -> Iterator[dict[str, int]]:
    """How often each network is called."""
    calls = {"vae": 0, "text_encoder": 0}

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    handles = [
        model.vae.encoder.register_forward_hook(count("vae")),
        model.networks["text_encoder"].register_forward_hook(count("text_encoder")),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def test_every_image_and_text_is_encoded_once(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    with amount(shared_model()) as calls:
        task = task_on(data, cache_at=tmp_path / "cache")
        task.prepare()
        assert calls == {"vae": 2, "text_encoder": 3}, "two images; two captions and the empty one"
        first = [sample_inputs(task, step) for step in range(5)]
        other = task_on(data, cache_at=tmp_path / "cache")  # the next run
        other.prepare()
        assert all(same(sample_inputs(other, step), first[step]) for step in range(5))
        assert calls == {"vae": 2, "text_encoder": 3}
    assert other.cache.misses == 0
    assert not same(first[0], first[1])


def test_without_caching_every_step_encodes(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    with amount(shared_model()) as calls:
        task = task_on(data, cache_at=tmp_path / "cache", cache_latents=False, cache_text=False)
        task.prepare()
        assert calls == {"vae": 0, "text_encoder": 0}
        loose = [sample_inputs(task, step) for step in range(2)]
        assert calls == {"vae": 4, "text_encoder": 4}
    assert not (tmp_path / "cache").exists()
    cached = task_on(data)
    assert all(same(sample_inputs(cached, step), loose[step]) for step in range(2))


def test_progress_is_reported(tmp_path: Path) -> None:
    message: list[tuple[str, int, int]] = []
    task_on(make_set(tmp_path / "set")).prepare(lambda *each: message.append(each))
    assert [number for _, number, _ in message] == [1, 2, 3, 4, 5] and {total for *_, total in message} == {5}
    assert [text for text, *_ in message] == ["encoding images"] * 2 + ["encoding captions"] * 3


def made_by(folder: Path, cache_at: Path, model: Any = None, **fields: Any) -> int:
    task = task_on(folder, model=model, cache_at=cache_at, **fields)
    task.prepare()
    return task.cache.misses


def test_what_determines_the_result_makes_a_new_key(tmp_path: Path) -> None:
    data, store = make_set(tmp_path / "set", size=(96, 64)), tmp_path / "cache"
    assert made_by(data, store) == 5
    assert made_by(data, store) == 0
    assert made_by(data, store, seed=7, rank=8, learning_rate=1e-3, noise_offset=0.1, batch_size=1) == 0
    assert made_by(data, store, flip=True) == 2, "the mirrored ones"
    assert made_by(data, store, resolution=32) == 2
    assert made_by(data, store, crop="random", buckets=False) >= 4
    assert made_by(data, store, clip_skip=2) == 3
    assert made_by(data, store, trigger="weave") == 2
    assert made_by(data, store) == 0, "nothing was replaced"


def test_a_changed_image_or_caption_is_encoded_again_and_a_renamed_one_is_not(tmp_path: Path) -> None:
    data, store = make_set(tmp_path / "set"), tmp_path / "cache"
    assert made_by(data, store) == 5
    for ending in (".png", ".txt"):
        (data / f"a{ending}").rename(data / f"z{ending}")
    shutil.move(data, tmp_path / "moved")
    data = tmp_path / "moved"
    assert made_by(data, store) == 0
    color_image(9).save(data / "z.png")
    assert made_by(data, store) == 1
    (data / "z.txt").write_text("another caption")
    assert made_by(data, store) == 1


@pytest.mark.parametrize(("network", "calls_made"), [("vae", 2), ("text_encoder", 3)])
def test_other_weights_make_other_keys(network: str, calls_made: int, tmp_path: Path) -> None:
    """One number of millions is enough, wherever it is."""
    data, store, model = make_set(tmp_path / "set"), tmp_path / "cache", fresh_model()
    assert made_by(data, store, model) == 5
    weight = max(model.networks[network].parameters(), key=lambda parameter: parameter.numel())
    with torch.no_grad():
        weight.view(-1)[weight.numel() // 2 + 1] += 0.001
    assert made_by(data, store, model) == calls_made
    row = weight.view(-1)
    with torch.no_grad():  # the same numbers in another order
        row[[5, 6]] = row[[6, 5]]
    assert made_by(data, store, model) == calls_made


def test_a_truncated_cache_file_is_rebuilt_with_the_same_values(tmp_path: Path) -> None:
    data, store = make_set(tmp_path / "set"), tmp_path / "cache"
    task = task_on(data, cache_at=store)
    task.prepare()
    before = sample_inputs(task)
    for path in files(store):
        path.write_bytes(path.read_bytes()[:-8])
    again = task_on(data, cache_at=store)
    again.prepare()
    assert again.cache.misses == 5 and same(sample_inputs(again), before)


def test_any_two_files_may_be_exchanged(tmp_path: Path) -> None:
    """Latents of two images, a text's encoding in the place of latents: training sees what it saw before."""
    data, store = make_set(tmp_path / "set"), tmp_path / "cache"
    task = task_on(data, cache_at=store)
    task.prepare()
    before = sample_inputs(task)
    paths = files(store)
    contents = [path.read_bytes() for path in paths]
    for path, raw in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(raw)
    again = task_on(data, cache_at=store)
    again.prepare()
    assert again.cache.misses == 5 and same(sample_inputs(again), before)
    (note,) = again.new_notes()
    assert note.startswith("cache: 5 files with the key of other contents")


# captions, flips and crops together with the cache


def texts_of(task: Any, steps: int = 40) -> list[bytes]:
    return [
        row.numpy().tobytes()
        for step in range(steps)
        for row in sample_inputs(task, step)["text.encoder_hidden_states"]
    ]


def test_shuffled_captions_are_cached_variants(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {"a": "one, two, three, four, five, six"})
    fields: dict[str, Any] = {"shuffle_tags": True, "keep_tokens": 2, "caption_variants": 4, "batch_size": 1}
    with amount(shared_model()) as calls:
        task = task_on(data, **fields)
        task.prepare()
        assert len(task.captions[0]) == 4 and calls["text_encoder"] == 5
        embeddings = {
            sample_inputs(task, step, (0,))["text.encoder_hidden_states"].numpy().tobytes() for step in range(40)
        }
        assert calls["text_encoder"] == 5, "no step encodes"
    assert len(embeddings) == 4, "every variant is used"
    assert all(text.startswith("one, two, ") for text in task.captions[0])
    assert {tuple(sorted(text.split(", "))) for text in task.captions[0]} == {
        ("five", "four", "one", "six", "three", "two")
    }


def test_dropped_captions_are_the_empty_one(tmp_path: Path) -> None:
    task = task_on(make_set(tmp_path / "set"), caption_dropout=0.5)
    empty = task._text("")["encoder_hidden_states"].numpy().tobytes()
    texts = texts_of(task)
    share = texts.count(empty) / len(texts)
    assert 0.3 < share < 0.7 and len(set(texts)) == 3
    every = texts_of(task_on(make_set(tmp_path / "set"), caption_dropout=1.0), 3)
    assert set(every) == {empty}
    assert empty not in texts_of(task_on(make_set(tmp_path / "set")), 10)


def test_flips_are_cached_and_mirror_the_image(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {"a": CAPTIONS["a"]})
    task = task_on(data, flip=True, batch_size=1)
    with amount(shared_model()) as calls:
        task.prepare()
        assert calls["vae"] == 2
        sizes = {sample_inputs(task, step, (0,))["sizes"].numpy().tobytes() for step in range(20)}
        latents = {task._latents(0, flip, 0)["mean"].numpy().tobytes() for flip in (False, True)}
        assert calls["vae"] == 2 and len(latents) == 2 and len(sizes) == 1
    mirrored = color_image(0).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    mirrored.save(data / "a.png")
    other = task_on(data)
    assert torch.equal(other._latents(0, False, 0)["mean"], task._latents(0, True, 0)["mean"])


def test_random_crops_are_a_few_cached_places(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {"a": CAPTIONS["a"]}, size=(160, 64))
    task = task_on(data, crop="random", flip=True, buckets=False, batch_size=1)
    with amount(shared_model()) as calls:
        task.prepare()
        encoded = calls["vae"]
        facts = [sample_inputs(task, step, (0,))["sizes"][0] for step in range(60)]
        assert calls["vae"] == encoded
    lefts = {int(each[3]) for each in facts}
    assert 2 <= len(lefts) <= 8 and all(0 <= left <= 96 for left in lefts)
    assert {(int(each[0]), int(each[1]), int(each[4]), int(each[5])) for each in facts} == {(64, 160, 64, 64)}
    for crop in range(1, 5):  # the crop of a mirrored image is amount from its other side
        plain, mirrored = (int(task._latents(0, flip, crop)["sizes"][3]) for flip in (False, True))
        assert plain + mirrored == 160 - 64
