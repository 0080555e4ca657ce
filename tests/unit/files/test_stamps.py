"""Every cache that is keyed by a file: one that was rewritten in place, with its size and time kept, is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inweave.files.stamps import ABSENT, path_stamp
from tests.support import lora_pair, write


def rewrite(path: Path, seed: int) -> None:
    """Replace the tensors of a LoRA in place, and set its time back."""
    status = path.stat()
    new = write(path.with_name("new"), lora_pair("lora_unet_x", 8, 8, seed=seed))
    with path.open("r+b") as file:
        file.write(new.read_bytes())
    new.unlink()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.safetensors", lora_pair("lora_unet_x", 8, 8, seed=1))


def test_a_stamp_is_that_of_the_file(file: Path) -> None:
    before = path_stamp(file)
    assert before == path_stamp(file) and path_stamp(file.with_name("none")) == ABSENT
    rewrite(file, 2)
    assert path_stamp(file) != before


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_stamp_of_a_folder_or_an_index_is_that_of_its_files_too(file: Path, name: str) -> None:
    place = file.parent / name
    if name:
        place.write_text("{}")
    before = path_stamp(place)
    rewrite(file, 2)
    assert path_stamp(place) != before


def test_hashes_and_scaled_adapters_are_read_again(file: Path) -> None:
    from inweave.exchange.lookup import hashes_of
    from inweave.generate.config import LoraChoice
    from inweave.generate.find import adapter_of

    def now() -> tuple[object, bytes]:
        adapter = adapter_of(LoraChoice(path=str(file), alpha=2.0), file)
        assert not isinstance(adapter, Path)
        return hashes_of(file), b"".join(bytes(adapter.tensors[name].data) for name in sorted(adapter.tensors))

    first = now()
    rewrite(file, 2)
    second = now()
    assert first[0] != second[0] and first[1] != second[1] and now() == second


def test_a_source_refuses_a_base_that_was_rewritten(file: Path) -> None:
    pytest.importorskip("torch")
    from inweave.errors import FormatError
    from inweave.weights.source import FileSource

    source = FileSource(file)
    source.check_unchanged()
    rewrite(file, 2)
    with pytest.raises(FormatError, match="changed on disk"):
        source.check_unchanged()


def test_a_peft_folder_is_merged_as_it_is_now(tmp_path: Path) -> None:
    """A folder's own time does not change with the files in it."""
    torch = pytest.importorskip("torch")
    import inweave

    net = torch.nn.Sequential(torch.nn.Linear(8, 8))
    folders = []
    for number in range(2):
        torch.manual_seed(number)
        model = inweave.inject(torch.nn.Sequential(torch.nn.Linear(8, 8)), rank=2, targets=["0"])
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
        inweave.save(inweave.collect(model), folder := tmp_path / str(number), dialect="peft")
        folders.append(folder)
    weaver = inweave.Weaver(net)
    weaver.apply([(folders[1], 1.0)])
    second = net[0].weight.clone()
    weaver.apply([(folders[0], 1.0)])
    assert not torch.equal(net[0].weight, second)
    with (folders[0] / "adapter_model.safetensors").open("r+b") as target:
        target.write((folders[1] / "adapter_model.safetensors").read_bytes())
    weaver.apply([])
    weaver.apply([(folders[0], 1.0)])
    assert torch.equal(net[0].weight, second)
