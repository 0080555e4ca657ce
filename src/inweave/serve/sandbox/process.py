"""The process that opens untrusted files: images and adapter files.

A file that makes a decoder crash, or takes all memory, ends this process and nothing else: the call fails, and the next
one gets a new process. It does not import torch, and it may not use more than ``MEMORY`` bytes. Its settings are the
``folders`` of the library, whose links that lead out of them are not followed, and other ``private`` folders.
"""

from __future__ import annotations

import io
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inweave.errors import FormatError, InweaveError, Problem, RequestError, TargetError
from inweave.files.confinement import confine
from inweave.serve.engine.rpc_loop import Data, answer_calls
from inweave.serve.jobs.private_paths import PATHS, public

MEMORY = 4 * 1024**3
MAX_RECORD_PIXELS = 4096 * 4096
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
#: those that every browser shows
GALLERY_FORMATS = ("PNG", "JPEG", "WEBP")
EXIF_ORIENTATION = 0x0112
#: the longest side over the shortest: a line of pixels is not a useful image, and expands to a large canvas
MAX_RATIO = 16


def check_image(data: Data) -> Data:
    """Return an image, decoded, upright, and encoded again as PNG without any metadata."""
    from PIL import ImageOps

    from inweave.files.images import open_image_bytes

    label = data["label"]
    with open_image_bytes(data["content"], label, error=RequestError, pixels=data["pixels"], formats=FORMATS) as image:
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
        except Exception:  # decoders raise anything, and their messages may hold addresses
            raise RequestError(Problem(label, "not an image that can be read: it is cut short or broken")) from None
    plain.info.clear()  # of the source
    target = io.BytesIO()
    plain.save(target, format="PNG", compress_level=1)
    return {"content": target.getvalue()}


def eight_bits(image: Any) -> Any:
    """Return the upper eight bits of a 16-bit image; Pillow's own conversion clips every value at 255."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value / 256).convert("L")


def make_thumbnail(data: Data) -> Data:
    """Return a small copy of an image, which was checked before."""
    from PIL import Image

    with Image.open(data["path"], formats=("PNG",)) as image:
        return {"content": _small(image, data["side"])}


def make_thumbnail_of(data: Data) -> Data:
    """Return a small copy of the bytes of an image, upright."""
    from PIL import ImageOps

    from inweave.files.images import open_image_bytes

    label = data["label"]
    with open_image_bytes(data["content"], label, error=RequestError, formats=GALLERY_FORMATS) as image:
        try:
            image.draft("RGB", (2 * data["side"], 2 * data["side"]))  # a JPEG is decoded at a fraction of its size
            return {"content": _small(eight_bits(ImageOps.exif_transpose(image)), data["side"])}
        except Exception:
            raise RequestError(Problem(label, "not an image that can be read: it is cut short or broken")) from None


def _small(image: Any, side: int) -> bytes:
    small = image.convert("RGBA" if image.mode in ("RGBA", "LA", "PA") else "RGB")
    small.thumbnail((side, side))
    target = io.BytesIO()
    small.save(target, format="WEBP", quality=80)
    return target.getvalue()


def read_facts(data: Data) -> Data:
    """Return the format, the upright size and the settings of an image, decoded to its last pixel."""
    from inweave.files.images import open_image_bytes
    from inweave.generate.record import settings_of

    label = data["label"]
    with open_image_bytes(data["content"], label, error=RequestError, formats=GALLERY_FORMATS) as image:
        try:
            image.load()
            turned = image.getexif().get(EXIF_ORIENTATION) in (5, 6, 7, 8)
        except Exception:
            raise RequestError(Problem(label, "not an image that can be read: it is cut short or broken")) from None
        size = image.size[::-1] if turned else image.size
        try:
            settings = settings_of(image, label).as_dict()
        except InweaveError:  # most images have none
            settings = None
        return {"format": image.format, "width": size[0], "height": size[1], "settings": settings}


def check_record(data: Data) -> Data:
    """Return the texts written into an image file."""
    from inweave.files.images import open_image_bytes

    with open_image_bytes(data["content"], "image", error=RequestError, formats=FORMATS) as image:
        try:
            if image.format == "PNG" and image.width * image.height <= MAX_RECORD_PIXELS:
                image.load()  # texts may follow the pixels
        except Exception:
            raise RequestError(Problem("image", "not an image that can be read: it is cut short or broken")) from None
        texts = {str(name): value for name, value in image.info.items() if isinstance(value, str)}
    return {"texts": texts}


def check_settings(data: Data) -> Data:
    """Return the settings recorded in an image by inweave, AUTOMATIC1111, ComfyUI or InvokeAI."""
    from inweave.files.images import open_image_bytes
    from inweave.generate.record import settings_of

    with open_image_bytes(data["content"], "image", error=RequestError, formats=FORMATS) as image:
        return {"settings": settings_of(image, "image").as_dict()}


def check_lora(data: Data) -> Data:
    """Return whether an adapter file fits a base: the verdict of `inweave check`."""
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
    return {"verdict": verdict}


def convert_lora(data: Data) -> Data:
    """Write an adapter file in another dialect into the caller's folder."""
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
    return {**report, "file": written.name, "bytes": written.stat().st_size}


def check_adapter(data: Data) -> Data:
    """Raise FormatError unless a file is an adapter whose numbers are all finite."""
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
    return {"tensors": len(adapter.tensors)}


CALLS: dict[str, Callable[[Data], Data]] = {
    "image": check_image,
    "thumbnail": make_thumbnail,
    "thumbnail_of": make_thumbnail_of,
    "image_facts": read_facts,
    "record": check_record,
    "settings": check_settings,
    "lora": check_lora,
    "adapter": check_adapter,
    "convert": convert_lora,
}


def begin(settings: Data) -> None:
    """Confine this process to the library, and name the folders whose paths clients must not see."""
    confine(*map(Path, settings["folders"]))
    PATHS.add((*settings["folders"], *settings["private"]))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answer_calls(CALLS, begin=begin)


if __name__ == "__main__":
    main()
