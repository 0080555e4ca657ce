"""The process that captions images with the model of `--captioner`, and the calls into it.

caption {image, instruction}    -> {caption}

It is started by the first call, answers one at a time, and ends after ``IDLE_SECONDS`` without calls, which frees the
memory of the model.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inweave.errors import BusyError, RequestError
from inweave.serve.engine.child_process import CallProcess
from inweave.serve.engine.rpc_loop import Data, answer_calls, collect_less
from inweave.serve.engine.wire import WireError
from inweave.serve.jobs.private_paths import PATHS, public
from inweave.serve.settings import ServeSettings

if TYPE_CHECKING:
    from inweave.models.captioner import Captioner

IDLE_SECONDS = 120.0
#: for one image; the first one loads the model
SECONDS = 600.0
MAX_WAITING = 8


class CaptionClient:
    """One process for the captions of a worker; ``private``: folders whose paths clients must not see."""

    def __init__(self, folder: Path, device: str, private: tuple[str, ...] = ()) -> None:
        settings = {"folder": str(folder.expanduser()), "device": device, "private": [*private, str(folder)]}
        self._process = CallProcess("inweave.serve.planner.captions", settings)
        self._turn = asyncio.Lock()
        self._calls = 0
        self._end: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, settings: ServeSettings, private: tuple[str, ...]) -> CaptionClient | None:
        """Return the client for the settings of a worker; None without a captioner."""
        folder = settings.captioner
        return None if folder is None else cls(folder, settings.captioner_device, private)

    async def caption(self, image: Path, instruction: str) -> str:
        """Return a caption of an image file."""
        if self._calls >= MAX_WAITING:
            raise BusyError("many images wait for captions; ask again in a moment")
        self._calls += 1
        if self._end is not None:
            self._end.cancel()
        try:
            async with self._turn:
                answer = await self._process.call("caption", {"image": str(image), "instruction": instruction}, SECONDS)
            return str(answer["caption"])
        except TimeoutError:
            raise RequestError(f"captioning {image.name} took longer than {SECONDS:g} s") from None
        except WireError:
            raise RequestError(
                f"captioning {image.name} ended its process; the log of the worker may say why"
            ) from None
        finally:
            self._calls -= 1
            self._end = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._release)

    def _release(self) -> None:
        self._closing = asyncio.ensure_future(self.close())

    async def close(self) -> None:
        """End the process once it has answered."""
        if self._end is not None:
            self._end.cancel()
        async with self._turn:
            await self._process.stop()


class _Host:
    """The process's side: the model, loaded by the first call."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._captioner: Captioner | None = None

    def begin(self, settings: Data) -> None:
        """Take the settings."""
        self._settings = settings
        PATHS.add(settings["private"])

    def caption(self, call: Data) -> Data:
        """Return a caption of an image."""
        from inweave.models.captioner import Captioner, caption_of

        if self._captioner is None:
            self._captioner = Captioner(self._settings["folder"], self._settings["device"])
        return {"caption": caption_of(self._captioner, Path(call["image"]), call["instruction"])}


def _without_folders(value: Any) -> Any:
    if isinstance(value, str):
        return public(value)
    return {name: _without_folders(each) for name, each in value.items()} if isinstance(value, dict) else value


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # parts that a configuration names by an id are not downloaded either
    host = _Host()
    collect_less()
    answer_calls({"caption": host.caption}, begin=host.begin, redact=lambda call, answer: _without_folders(answer))


if __name__ == "__main__":
    main()
