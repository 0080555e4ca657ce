"""The process that opens what strangers send: pictures and adapter files.

A file that makes a decoder crash, or takes all memory, ends this process and nothing else: the call fails, and the next
one gets a new process. It knows no torch, and it may not use more than ``MEMORY`` bytes.

    -> settings {folders}             those of the library: links that lead out of them are not followed
    -> call {name, ...} + contents    <- answer {...} + contents | error {code, message}
"""

from __future__ import annotations

import io
import resource
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inweave.errors import FormatError, InweaveError, Problem, RequestError, TargetError
from inweave.files.confinement import confine
from inweave.serve.engine.rpc_loop import answer_calls
from inweave.serve.engine.wire import Message
from inweave.serve.jobs.failures import failure_of, public

MEMORY = 4 * 1024**3
MAX_RECORD_PIXELS = 4096 * 4096
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
#: the longer side is at most this many times the shorter one: a line of pixels is no picture, and a large canvas to paint
MAX_RATIO = 16


def check_picture(data: dict[str, Any], content: bytes) -> Message:
    """A picture, decoded, upright, and encoded anew as PNG without any metadata."""
    from PIL import ImageOps

    from inweave.files.images import open_image_bytes

    label = data["label"]
    with open_image_bytes(content, label, error=RequestError, pixels=data["pixels"], formats=FORMATS) as image:
        short, long = sorted(image.size)
        if long > MAX_RATIO * short:
            raise RequestError(
                Problem(label, f"{image.width}x{image.height} is longer than {MAX_RATIO} times its other side")
            )
        try:
            image.load()
            upright = ImageOps.exif_transpose(image)
            alpha = upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info
            plain = eight_bits(upright).convert("RGBA" if alpha else "RGB")
        except Exception:  # whatever a decoder raises; its message may hold addresses
            raise RequestError(Problem(label, "not a picture that can be read: it is cut short or broken")) from None
    plain.info.clear()  # of the source
    target = io.BytesIO()
    plain.save(target, format="PNG", compress_level=1)
    return Message("answer", {"width": plain.width, "height": plain.height}, (target.getvalue(),))


def eight_bits(image: Any) -> Any:
    """A picture of 16 bits a pixel by its upper eight; Pillow's own conversion cuts every value off at 255."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value / 256).convert("L")


def make_thumbnail(data: dict[str, Any], content: bytes) -> Message:
    """A small copy of a picture."""
    from PIL import Image

    with Image.open(data["path"], formats=("PNG",)) as image:
        small = image.convert("RGBA" if image.mode in ("RGBA", "LA", "PA") else "RGB")
    small.thumbnail((data["side"], data["side"]))
    target = io.BytesIO()
    small.save(target, format="WEBP", quality=80)
    return Message("answer", {"width": small.width, "height": small.height}, (target.getvalue(),))


def check_record(data: dict[str, Any], content: bytes) -> Message:
    """The settings written into a picture."""
    from inweave.files.images import open_image_bytes

    with open_image_bytes(content, "image", error=RequestError, formats=FORMATS) as image:
        try:
            if image.format == "PNG" and image.width * image.height <= MAX_RECORD_PIXELS:
                image.load()  # texts may follow the pixels
        except Exception:
            raise RequestError(Problem("image", "not a picture that can be read: it is cut short or broken")) from None
        texts = {str(name): value for name, value in image.info.items() if isinstance(value, str)}
    return Message("answer", {"texts": texts})


def check_settings(data: dict[str, Any], content: bytes) -> Message:
    """What made a picture, as far as it says so: by inweave, AUTOMATIC1111, ComfyUI or InvokeAI."""
    from inweave.files.images import open_image_bytes
    from inweave.generate.record import settings_of

    with open_image_bytes(content, "picture", error=RequestError, formats=FORMATS) as image:
        return Message("answer", {"settings": settings_of(image, "picture").as_dict()})


def check_lora(data: dict[str, Any], content: bytes) -> Message:
    """Whether an adapter file fits a base: the verdict of `inweave check`."""
    from inweave.exchange.check import check
    from inweave.targets.bases import find

    base = find(data["base"]) if data.get("known") else data["base"]
    if base is None:
        raise RequestError(f"no base model is called {data['base']}")
    result = check(Path(data["path"]), base, values=data.get("values", "none"))
    verdict: dict[str, Any] = result.as_dict()
    verdict["base"]["given"] = public(verdict["base"]["given"])
    if data.get("placements"):
        verdict["placements"] = [placement.as_dict() for placement in result.placements]
    return Message("answer", {"verdict": verdict})


def convert_lora(data: dict[str, Any], content: bytes) -> Message:
    """An adapter file in another dialect, written where the caller says."""
    from inweave.exchange.convert import save
    from inweave.exchange.load import load
    from inweave.targets.bases import known_index

    path, label, target = Path(data["path"]), data["label"], Path(data["target"])
    written = target / "adapter" if data["to"] == "peft" else target / "adapter.safetensors"
    index = known_index(data["base"]) if data["base"] is not None else None
    try:
        conversion = save(load(path), written, dialect=data["to"], base=index, drop=data["drop"])
    except (FormatError, TargetError) as error:
        raise type(error)(str(error).replace(str(path), label)) from None
    if written.is_dir():
        folder, written = written, target / "adapter.zip"
        with zipfile.ZipFile(written, "x", zipfile.ZIP_STORED) as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, file.name)
                file.unlink()
        folder.rmdir()
    report = conversion.as_dict()
    del report["path"]
    return Message("answer", {**report, "file": written.name, "bytes": written.stat().st_size})


def check_adapter(data: dict[str, Any], content: bytes) -> Message:
    """Whether a file is an adapter whose numbers are all finite."""
    from inweave.exchange.check import scan_values
    from inweave.exchange.load import load

    path, label = Path(data["path"]), data["label"]
    try:
        adapter = load(path)
    except InweaveError as error:
        raise FormatError(str(error).replace(str(path), label)) from None
    if not adapter.entries:
        reasons = [problem.reason for problem in adapter.problems] or ["it holds no adapter"]
        raise FormatError(f"{label}: {reasons[0]}")
    nonfinite, _ = scan_values(adapter, "full")
    if nonfinite:
        raise FormatError(f"{label}: {len(nonfinite)} tensors hold NaN or infinity, such as {nonfinite[0]['key']}")
    return Message("answer", {"tensors": len(adapter.tensors)})


CALLS: dict[str, Callable[[dict[str, Any], bytes], Message]] = {
    "picture": check_picture,
    "thumbnail": make_thumbnail,
    "record": check_record,
    "settings": check_settings,
    "lora": check_lora,
    "adapter": check_adapter,
    "convert": convert_lora,
}


def answer(message: Message) -> Message:
    """The answer to one call; our own errors travel with their code."""
    try:
        return CALLS[message.data["name"]](message.data, message.blobs[0] if message.blobs else b"")
    except Exception as error:
        if not isinstance(error, InweaveError):
            traceback.print_exc(file=sys.stderr)
        return Message("error", failure_of(error).as_record())


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answer_calls(lambda settings: confine(*map(Path, settings.get("folders", ()))), answer)


if __name__ == "__main__":
    main()
