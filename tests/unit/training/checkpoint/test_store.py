"""Checkpoints: whole or not there, read back bit for bit, and never the last good one lost."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inweave.errors import ConfigError, FormatError
from inweave.training.checkpoint import store as checkpoint
from inweave.training.checkpoint.store import (
    State,
    checkpoints,
    load_named,
    load_newest,
    load_state,
    lock,
    recover,
    save_state,
)


def state(step: int, fill: float = 0.0) -> State:
    generator = torch.Generator().manual_seed(step)
    flat = torch.randn(512, generator=generator) + fill
    tensors = {
        "values.a": flat[:6].view(2, 3),  # views of one buffer, as a run has them
        "values.b": flat[64:70],
        "optimizer.codes": torch.randint(256, (32,), generator=generator, dtype=torch.uint8),
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "special": torch.tensor([float("nan"), -0.0, float("inf")]),
        "count": torch.tensor(step),
    }
    return State(step, tensors, {"config": {"rank": 4, "name": "ö"}, "data": "x"})


def bits(state: State) -> dict[str, bytes]:
    return {
        name: value.contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, value in state.tensors.items()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_bit_comes_back(tmp_path: Path) -> None:
    path = save_state(tmp_path, state(7), keep=1)
    restored = load_state(path)
    assert path.name == "step-000007" and restored.step == 7 and bits(restored) == bits(state(7))
    assert {name: value.dtype for name, value in restored.tensors.items()} == {
        n: v.dtype for n, v in state(7).tensors.items()
    }
    assert restored.facts["config"] == {"rank": 4, "name": "ö"} and names(tmp_path) == ["step-000007"]


def test_keep_last_keeps_the_newest_and_none_keeps_all(tmp_path: Path) -> None:
    for step in (1, 2, 30, 4):
        save_state(tmp_path, state(step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000030", "step-000004"]
    for step in range(50, 56):
        save_state(tmp_path, state(step), keep=0)
    assert len(checkpoints(tmp_path)) == 8


def test_the_newest_checkpoint_stays_even_if_others_claim_to_be_newer(tmp_path: Path) -> None:
    save_state(tmp_path, state(5), keep=1)
    (tmp_path / "step-000005" / "state.safetensors").write_bytes(b"")
    save_state(tmp_path, state(3), keep=1)
    newest, notices = load_newest(tmp_path)
    assert newest is not None and newest.step == 3 and "step-000005" in notices[0]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save_state(tmp_path, state(3), keep=1)
    path = save_state(tmp_path, state(3, fill=1.0), keep=1)
    assert bits(load_state(path)) == bits(state(3, fill=1.0)) and names(tmp_path) == ["step-000003"]


def cut(path: Path) -> None:
    file = path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def flipped(path: Path) -> None:
    file = path / "state.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def changed(**facts: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": cut,
    "a bit flipped": flipped,
    "no tensors": lambda path: (path / "state.safetensors").unlink(),
    "empty tensors": lambda path: (path / "state.safetensors").write_bytes(b""),
    "cut facts": lambda path: (path / "state.json").write_text('{"step": 3, "ver'),
    "no facts": lambda path: (path / "state.json").unlink(),
    "a list": lambda path: (path / "state.json").write_text("[3]"),
    "deep": lambda path: (path / "state.json").write_text("[" * 100_000),
    "another version": changed(version=99),
    "no step": changed(step=None),
    "another's tensors": lambda path: shutil.copy(
        path.parent / "step-000002" / "state.safetensors", path / "state.safetensors"
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(damage: Callable[[Path], None], tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_state(tmp_path, state(step), keep=3)
    damage(tmp_path / "step-000003")
    newest, notices = load_newest(tmp_path)
    assert newest is not None and newest.step == 2 and bits(newest) == bits(state(2))
    assert all("step-000003" in text for text in notices)
    with pytest.raises(FormatError, match="step-000003"):
        load_named(tmp_path / "step-000003")
    save_state(
        tmp_path, state(3), keep=1
    )  # the run comes by again: what was damaged is good now, and may replace the rest
    again, notices = load_newest(tmp_path)
    assert again is not None and bits(again) == bits(state(3)) and not notices
    assert names(tmp_path) == ["step-000003"]


def test_without_an_intact_checkpoint_all_are_named(tmp_path: Path) -> None:
    assert load_newest(tmp_path) == (None, []) and load_newest(tmp_path / "none") == (None, [])
    for step in (1, 2):
        save_state(tmp_path, state(step), keep=2)
        cut(tmp_path / f"step-00000{step}")
    with pytest.raises(FormatError, match=r"no checkpoint can be read:\n.*step-000002.*\n.*step-000001"):
        load_newest(tmp_path)


class Died(BaseException):
    """Ends the process in the middle of something."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """From now on the n-th thing that touches the disk is the last."""

    def after(count: int) -> None:
        left = itertools.count(count, -1)

        def wrapped(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def touched(*arguments: Any, **options: Any) -> Any:
                if next(left) <= 0:
                    if name == "save_file":
                        Path(arguments[1]).write_bytes(b"\x10\0\0\0\0\0\0\0half a head")
                    raise Died
                return work(*arguments, **options)

            return touched

        monkeypatch.setattr(checkpoint, "_flush", wrapped("_flush", checkpoint._flush))
        monkeypatch.setattr(checkpoint, "save_file", wrapped("save_file", save_file))
        monkeypatch.setattr(Path, "rename", wrapped("rename", Path.rename))
        monkeypatch.setattr(Path, "write_text", wrapped("write_text", Path.write_text))
        monkeypatch.setattr(shutil, "rmtree", wrapped("rmtree", shutil.rmtree))

    yield after


@pytest.mark.parametrize("again", [False, True], ids=["new", "in the place of another"])
def test_a_crash_at_any_moment_leaves_the_previous_checkpoint_or_the_new_one(
    again: bool, tmp_path: Path, dying: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with one checkpoint kept, and where the new one replaces the only one there is."""
    outcomes = set()
    for count in range(30):
        folder = tmp_path / str(count)
        before, after = state(5), state(5, fill=1.0) if again else state(6)
        save_state(folder, before, keep=1)
        with monkeypatch.context():
            dying(count)
            try:
                save_state(folder, after, keep=1)
                died = False
            except Died:
                died = True
            monkeypatch.undo()
        recover(folder)
        newest, notices = load_newest(folder)
        assert newest is not None and not notices and bits(newest) in (bits(before), bits(after))
        assert all(name.startswith("step-") for name in names(folder)), "nothing is left behind"
        save_state(folder, state(7), keep=1)
        assert names(folder) == ["step-000007"]
        outcomes.add(bits(newest) == bits(after))
        if not died:
            break
    assert count >= 8 and outcomes == {False, True}


def test_leftovers_of_other_kinds_go_and_nothing_else_does(tmp_path: Path) -> None:
    save_state(tmp_path, state(1), keep=1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / ".step-000001.part")
    (tmp_path / ".step-000002.part").mkdir()
    (tmp_path / ".step-000003.12345").mkdir()
    (tmp_path / "notes").mkdir()
    recover(tmp_path)
    assert names(tmp_path) == ["notes", "step-000001"]
    recover(tmp_path / "none")


def test_a_write_error_is_reported_and_the_previous_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path, state(1), keep=1)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(FormatError, match=r"step-000002: the checkpoint could not be written: No space left"):
        save_state(tmp_path, state(2), keep=1)
    assert names(tmp_path) == ["step-000001"] and load_state(tmp_path / "step-000001").step == 1


def test_the_lock_belongs_to_one_process_and_ends_with_it(tmp_path: Path) -> None:
    lock_file = lock(tmp_path / "s")
    with pytest.raises(ConfigError, match="another process"):
        lock(tmp_path / "s")
    lock_file.close()
    lock(tmp_path / "s").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: .* cannot be written to"):
        lock(tmp_path / "file" / "s")
