"""Upscalers: small networks that enlarge an image, read from safetensors files.

    ESRGAN, Real-ESRGAN   conv ─► N x RRDB ─► conv (+) ─► [nearest x2 ─► conv]* ─► conv ─► conv
    compact (SRVGGNet)    [conv ─► PReLU]* ─► conv ─► pixel shuffle, (+) the image by nearest

    RRDB(x) = x + 0.2 D3(D2(D1(x)))        D(x) = x + 0.2 conv5([x, c1, c2, c3, c4]),  ci = lrelu(conv_i([x, c1, ...]))

Everything follows from the tensors: blocks, channels, scale. Three spellings of ESRGAN's names are in use, and both are
found wrapped in `params` or `params_ema`. An input of 12 or 48 channels is the image unshuffled by 2 or 4.

An image is enlarged tile by tile, so that memory follows a tile: each is computed with `CONTEXT` pixels around it that
are cut off again. Files of pickles (.pth) are refused; `spandrel` and `safetensors` convert them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from inweave.errors import FormatError
from inweave.files.paths import printable_path
from inweave.weights.source import FileSource

TILE, CONTEXT = 192, 16
MAX_BYTES = 512 * 1024 * 1024
_SLOPE = 0.2
#: name in any spelling -> BasicSR's
_NAMES = (
    (re.compile(r"^model\.1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0\."), r"body.\1.rdb\2.conv\3."),
    (re.compile(r"^RRDB_trunk\.(\d+)\.RDB(\d)\.conv(\d)\."), r"body.\1.rdb\2.conv\3."),
    (re.compile(r"^model\.0\."), "conv_first."),
    (re.compile(r"^trunk_conv\."), "conv_body."),
    (re.compile(r"^upconv(\d)\."), r"conv_up\1."),
    (re.compile(r"^HRconv\."), "conv_hr."),
)
_SEQUENCE = re.compile(r"^model\.(\d+)\.(weight|bias)$")
_WRAPPERS = ("params_ema.", "params.", "module.")


class Upscaler:
    """A network that enlarges images by ``scale``."""

    def __init__(self, name: str, network: nn.Module, scale: int) -> None:
        self.name, self.network, self.scale = name, network.eval(), scale

    @torch.no_grad()
    def __call__(self, image: Tensor, *, tile: int = TILE, step: Callable[[int, int], object] | None = None) -> Tensor:
        """Return an image (1, 3, height, width) in 0..1, enlarged; ``step`` is called with (tiles done, tiles)."""
        weight = next(self.network.parameters())
        height, width = image.shape[-2:]
        result = torch.empty(1, 3, height * self.scale, width * self.scale)
        boxes = [(top, left) for top in range(0, height, tile) for left in range(0, width, tile)]
        for number, (top, left) in enumerate(boxes):
            bottom, right = min(top + tile, height), min(left + tile, width)
            above, before = max(0, top - CONTEXT), max(0, left - CONTEXT)
            part = image[..., above : bottom + CONTEXT, before : right + CONTEXT].to(weight.device, weight.dtype)
            large = self.network(part).float().cpu()
            down, across = (top - above) * self.scale, (left - before) * self.scale
            high, wide = (bottom - top) * self.scale, (right - left) * self.scale
            result[..., top * self.scale : bottom * self.scale, left * self.scale : right * self.scale] = large[
                ..., down : down + high, across : across + wide
            ]
            if step is not None:
                step(number + 1, len(boxes))
        return result.clamp_(0, 1)


def open_upscaler(path: Path, device: torch.device | str = "cpu") -> Upscaler:
    """Read an upscaler; raise FormatError unless every tensor of the file has its place in a known network."""
    label = printable_path(path)
    if path.suffix.lower() in (".pth", ".pt", ".ckpt", ".bin"):
        raise FormatError(
            f"{label}: a pickle, which can run code and is not read; pass the upscaler as .safetensors "
            "(convert files that you trust with spandrel, on a machine that may run their code)"
        )
    source = FileSource(path)
    if sum(4 * math.prod(source.spec(name).shape) for name in source.names()) > MAX_BYTES:
        raise FormatError(f"{label}: too large for an upscaler; ESRGAN networks have 17 million numbers")
    tensors = _plain_names({name: source.get(name, dtype=torch.float32, owned=True) for name in source.names()})
    with torch.device("meta"):  # a file may claim networks of any size
        made = _esrgan(tensors) or _compact(tensors)
    if made is None:
        sample = ", ".join(sorted(tensors)[:3])
        raise FormatError(f"{label}: no ESRGAN or compact (SRVGGNet) upscaler; its tensors are {sample}, ...")
    network, scale = made
    try:
        network.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise FormatError(f"{label}: its tensors do not make an upscaler: {reason[:300]}") from None
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise FormatError(f"{label}: holds numbers that are not finite")
    return Upscaler(path.stem, network.to(device), scale)


def _plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by BasicSR's names."""
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    plain: dict[str, Tensor] = {}
    ends = sorted({int(match[1]) for name in tensors if (match := _SEQUENCE.match(name)) and int(match[1]) > 1})
    labels = [*(f"conv_up{number + 1}" for number in range(len(ends) - 2)), "conv_hr", "conv_last"]
    after_body = dict(zip(ends, labels, strict=False)) if len(ends) >= 2 else {}
    blocks = [int(match[1]) for name in tensors if (match := re.match(r"model\.1\.sub\.(\d+)\.", name))]
    for name, tensor in tensors.items():
        match = _SEQUENCE.match(name)
        if match and int(match[1]) in after_body:
            plain[f"{after_body[int(match[1])]}.{match[2]}"] = tensor
            continue
        if blocks and (last := re.match(rf"model\.1\.sub\.{max(blocks)}\.(weight|bias)$", name)):
            plain[f"conv_body.{last[1]}"] = tensor
            continue
        for pattern, replacement in _NAMES:
            if pattern.match(name):
                name = pattern.sub(replacement, name)
                break
        plain[name] = tensor
    return plain


def _esrgan(tensors: Mapping[str, Tensor]) -> tuple[nn.Module, int] | None:
    """Return ESRGAN's network without its weights, and its scale."""
    first, last = tensors.get("conv_first.weight"), tensors.get("conv_last.weight")
    growth = tensors.get("body.0.rdb1.conv1.weight")
    if first is None or last is None or growth is None or first.dim() != 4 or last.shape[0] != 3:
        return None
    unshuffle = {3: 1, 12: 2, 48: 4}.get(first.shape[1])
    blocks = {int(match[1]) for name in tensors if (match := re.match(r"body\.(\d+)\.", name))}
    ups = sum(f"conv_up{number}.weight" in tensors for number in (1, 2, 3))
    if unshuffle is None or len(blocks) > 64 or blocks != set(range(len(blocks))):
        return None
    scale = 2**ups // unshuffle
    return (_Rrdb(unshuffle, first.shape[0], growth.shape[0], len(blocks), ups), scale) if scale >= 1 else None


class _Rrdb(nn.Module):
    def __init__(self, unshuffle: int, channels: int, growth: int, blocks: int, ups: int) -> None:
        super().__init__()
        self.unshuffle, self.ups = unshuffle, ups
        self.conv_first = _conv(3 * unshuffle**2, channels)
        self.body = nn.ModuleList(_Block(channels, growth) for _ in range(blocks))
        self.conv_body = _conv(channels, channels)
        for number in range(ups):
            self.add_module(f"conv_up{number + 1}", _conv(channels, channels))
        self.conv_hr, self.conv_last = _conv(channels, channels), _conv(channels, 3)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        if self.unshuffle > 1:
            more = (-width % self.unshuffle, -height % self.unshuffle)
            image = functional.pixel_unshuffle(
                functional.pad(image, (0, more[0], 0, more[1]), "replicate"), self.unshuffle
            )
        first = self.conv_first(image)
        hidden = first
        for block in self.body:
            hidden = block(hidden)
        hidden = first + self.conv_body(hidden)
        for number in range(self.ups):
            hidden = functional.interpolate(hidden, scale_factor=2, mode="nearest")
            hidden = _lrelu(self.get_submodule(f"conv_up{number + 1}")(hidden))
        result: Tensor = self.conv_last(_lrelu(self.conv_hr(hidden)))
        scale = 2**self.ups // self.unshuffle
        return result[..., : height * scale, : width * scale]


class _Block(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = (_Dense(channels, growth) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.rdb3(self.rdb2(self.rdb1(hidden)))
        return hidden + _SLOPE * result


class _Dense(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        for number in range(5):
            self.add_module(f"conv{number + 1}", _conv(channels + number * growth, channels if number == 4 else growth))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = [hidden]
        for conv in list(self.children())[:4]:
            parts.append(_lrelu(conv(torch.cat(parts, 1))))
        result: Tensor = self.get_submodule("conv5")(torch.cat(parts, 1))
        return hidden + _SLOPE * result


def _compact(tensors: Mapping[str, Tensor]) -> tuple[nn.Module, int] | None:
    """Return the compact network without its weights, and its scale."""
    numbers = sorted({int(match[1]) for name in tensors if (match := re.match(r"body\.(\d+)\.weight$", name))})
    if len(numbers) < 3 or numbers != list(range(len(numbers))) or len(numbers) > 200:
        return None
    first, last = tensors["body.0.weight"], tensors[f"body.{numbers[-1]}.weight"]
    scale = {3 * each * each: each for each in range(1, 9)}.get(last.shape[0])
    if first.dim() != 4 or last.dim() != 4 or first.shape[1] != 3 or scale is None:
        return None
    return _Compact(first.shape[0], len(numbers), scale), scale


class _Compact(nn.Module):
    def __init__(self, channels: int, layers: int, scale: int) -> None:
        super().__init__()
        self.scale = scale

        def made() -> Iterator[nn.Module]:
            yield _conv(3, channels)
            for number in range(1, layers - 1):
                yield nn.PReLU(channels) if number % 2 else _conv(channels, channels)
            yield _conv(channels, 3 * scale**2)

        self.body = nn.ModuleList(made())

    def forward(self, image: Tensor) -> Tensor:
        hidden = image
        for layer in self.body:
            hidden = layer(hidden)
        large = functional.interpolate(image, scale_factor=self.scale, mode="nearest")
        return functional.pixel_shuffle(hidden, self.scale) + large


def _conv(channels: int, out: int) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1)


def _lrelu(hidden: Tensor) -> Tensor:
    return functional.leaky_relu(hidden, _SLOPE)
