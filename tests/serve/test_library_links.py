"""A worker serves no file that was swapped for a link out of the library."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from inweave.errors import FormatError
from inweave.serve.service import Service
from tests.opened_files import opened_files
from tests.serve.test_hostile_loras import client_of, service

__all__ = ["service"]


def test_a_worker_serves_no_file_that_was_swapped_for_a_link(service: Service, tmp_path: Path) -> None:
    library = service.library.folders[0]
    image = library / "mine.preview.png"
    image.unlink()
    image.write_bytes(b"image")
    service.library.scan()
    entry = service.library.find("mine")
    secret = (tmp_path / "outside" / "secret.safetensors").read_bytes()

    async def answers() -> list[tuple[int, bytes]]:
        async with client_of(service) as client:
            paths = [
                f"/v1/loras/{reference}{part}" for reference in ("mine", entry.id) for part in ("/file", "/preview")
            ]
            return [(answer.status_code, answer.content) for answer in [await client.get(path) for path in paths]]

    before = asyncio.run(answers())
    assert [code for code, _ in before] == [200] * 4 and before[1][1] == b"image"
    assert before[0][1] == (library / "mine.safetensors").read_bytes()
    image.unlink()
    image.symlink_to(tmp_path / "outside" / "secret.safetensors")
    assert [code for code, _ in asyncio.run(answers())] == [200, 404, 200, 404]
    (library / "mine.safetensors").unlink()
    (library / "mine.safetensors").symlink_to(tmp_path / "outside" / "secret.safetensors")
    with opened_files() as paths:
        after = asyncio.run(answers())
    assert [code for code, _ in after] == [404] * 4 and all(secret not in content for _, content in after)
    assert not [path for path in paths if "secret" in os.path.realpath(path)]


def test_processes_that_read_for_a_worker_follow_no_link_out_of_the_library(service: Service, tmp_path: Path) -> None:
    """The name was checked before the call, but may lead elsewhere by then."""
    library = service.library.folders[0]

    async def ask() -> str:
        try:
            await service._sandbox.adapter(str(library / "mine.safetensors"), "LoRA x")
            with pytest.raises(FormatError) as refused:
                await service._sandbox.adapter(str(library / "out.safetensors"), "LoRA x")
        finally:
            await service._sandbox.close()
        return str(refused.value)

    message = asyncio.run(ask())
    assert "leads out of the library" in message and str(tmp_path) not in message
