"""A library of thousands of files: the first scan reads headers, the next one nothing; moved files keep their ids."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from inweave.library import Library
from tests.support import figure, sized, write_sparse


def tensors(number: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Write a LoRA of four modules as a sparse file: hundreds of megabytes of weights that take no disk space."""
    rank, into = 1 + number % 8, 2**24
    return {
        f"lora_unet_down_blocks_{block}_attentions_0_proj_in.{half}.weight": ("F32", shape)
        for block in range(4)
        for half, shape in (("lora_down", (rank, into)), ("lora_up", (256, rank)))
    }


def test_ten_thousand_files(tmp_path: Path) -> None:
    count, folders = sized(120, 10_000), sized(4, 40)
    root = tmp_path / "loras"
    for folder in range(folders):
        (root / f"folder-{folder}").mkdir(parents=True)
    for number in range(count):
        write_sparse(
            root / f"folder-{number % folders}" / f"lora-{number}.safetensors", tensors(number), {"n": str(number)}
        )
    apparent = sum(path.stat().st_size for path in root.rglob("*.safetensors"))
    library = Library(tmp_path / "library.sqlite3", [root])
    before_scan = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = library.scan()
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_scan) / 1024
    assert (first.files, first.new) == (count, count)
    before = {entry.name: entry.id for entry in library.entries()}
    again = library.scan()
    assert (again.files, again.new, again.changed, again.moved, again.gone) == (count, 0, 0, 0, 0)
    (root / "folder-0").rename(root / "renamed")
    for path in sorted((root / "folder-1").iterdir()):
        path.rename(root / "folder-2" / path.name)
    moved = library.scan()
    expected = sum(number % folders < 2 for number in range(count))
    assert (moved.moved, moved.new) == (expected, 0)
    assert {entry.name: entry.id for entry in library.entries()} == before
    started = time.perf_counter()
    assert library.find(f"lora-{count // 2}").id == before[f"lora-{count // 2}"]
    looked_up = time.perf_counter() - started
    figure(
        f"{count} files of {apparent / 2**30:.1f} GiB together: first scan {first.seconds:.1f} s "
        f"({first.seconds / count * 1000:.1f} ms a file, {resident:.0f} MiB more memory), "
        f"rescan {again.seconds:.2f} s, {expected} moved files keep their ids in {moved.seconds:.1f} s, "
        f"a name is found in {looked_up * 1000:.1f} ms"
    )
    if sized(0, 1):
        assert again.seconds < 2
        assert resident < 256, "weights were read"
    library.close()
