"""Drawing styles computed from sprites, and changes of place; all on the device, for batches of premultiplied RGBA.

    outline      lines where the drawing changes, on white           silhouette   one dark color
    flat         few levels of each color, smoothed                  shaded       lit from above left, a soft edge
    pixel        16, 24 or 32 cells                                  paper        cut out: white border, shadow
    watercolor   wavering edges, pale, darker where the paint ends   pastel       nearer to white
    gray         without color

`STYLES` maps a style to the words that captions use for it; the words of the sets are in `SET_WORDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_LUMINANCE = (0.299, 0.587, 0.114)


def _light(sprites: Tensor) -> Tensor:
    weights = sprites.new_tensor(_LUMINANCE)[None, :, None, None]
    return (sprites[:, :3] * weights).sum(1, keepdim=True)


def _joined(color: Tensor, alpha: Tensor) -> Tensor:
    return torch.cat([color.clamp(0, 1) * alpha, alpha], 1)


def _straight(sprites: Tensor) -> tuple[Tensor, Tensor]:
    alpha = sprites[:, 3:]
    return (sprites[:, :3] / alpha.clamp_min(1e-3)).clamp(0, 1), alpha


def blur(planes: Tensor, size: int) -> Tensor:
    """Blur by a box of an odd ``size``, twice."""
    for _ in range(2):
        planes = functional.avg_pool2d(planes, size, 1, size // 2, count_include_pad=False)
    return planes


def outline(sprites: Tensor, draw: torch.Generator) -> Tensor:
    visible = torch.cat([sprites[:, :3] + 1 - sprites[:, 3:], sprites[:, 3:]], 1)
    slope = functional.max_pool2d(visible, 3, 1, 1) + functional.max_pool2d(-visible, 3, 1, 1)
    lines = ((blur(slope.amax(1, keepdim=True), 3) - 0.12) * 6).clamp(0, 1)
    inside = ((sprites[:, 3:] - 0.5) * 8 + 0.5).clamp(0, 1)
    alpha = torch.maximum(inside, lines)
    return _joined((1 - lines).expand(-1, 3, -1, -1) * 0.98 + 0.02, alpha)


def silhouette(sprites: Tensor, draw: torch.Generator) -> Tensor:
    alpha = ((sprites[:, 3:] - 0.35) * 3).clamp(0, 1)
    return _joined(torch.full_like(sprites[:, :3], 0.08), alpha)


def flat(sprites: Tensor, draw: torch.Generator) -> Tensor:
    color, alpha = _straight(sprites)
    smooth = blur(color * alpha, 5) / blur(alpha, 5).clamp_min(1e-3)
    return _joined((smooth * 6).round() / 6, ((alpha - 0.3) * 3).clamp(0, 1))


def shaded(sprites: Tensor, draw: torch.Generator) -> Tensor:
    color, alpha = _straight(sprites)
    side = sprites.shape[-1]
    height = blur(blur(alpha, side // 16 * 2 + 1), side // 16 * 2 + 1)
    along = functional.pad(height, (1, 1, 1, 1), mode="replicate")
    slope = (along[..., 1:-1, 2:] - along[..., 1:-1, :-2]) + (along[..., 2:, 1:-1] - along[..., :-2, 1:-1])
    light = (slope * side / 10).clamp(-1, 1)
    return _joined(torch.where(light > 0, color + (1 - color) * 0.45 * light, color * (1 + 0.55 * light)), alpha)


def pixel(sprites: Tensor, draw: torch.Generator) -> Tensor:
    cells = (16, 24, 32)[int(torch.randint(3, (1,), generator=draw, device=draw.device))]
    cells = min(cells, sprites.shape[-1] // 2)
    color, alpha = _straight(functional.interpolate(sprites, size=(cells, cells), mode="area"))
    hard = (alpha > 0.45).to(alpha.dtype)
    return functional.interpolate(_joined((color * 8).round() / 8, hard), size=sprites.shape[-2:], mode="nearest")


def paper(sprites: Tensor, draw: torch.Generator) -> Tensor:
    color, alpha = _straight(flat(sprites, draw))
    wide = max(1, sprites.shape[-1] // 42)
    border = functional.max_pool2d(alpha, 2 * wide + 1, 1, wide)
    shadow = 0.4 * blur(torch.roll(border, (wide, wide), (2, 3)), 2 * wide + 1)
    cut = color * alpha + (1 - alpha) * 0.99
    covered = torch.maximum(border, shadow)
    return torch.cat([cut.clamp(0, 1) * border + (1 - border) * shadow * 0.15, covered], 1)


def watercolor(sprites: Tensor, draw: torch.Generator) -> Tensor:
    count, _, side, _ = sprites.shape
    device = sprites.device

    def noise(cells: int, channels: int) -> Tensor:
        small = torch.randn(count, channels, cells, cells, generator=draw, device=device)
        return functional.interpolate(small, size=(side, side), mode="bicubic", align_corners=False)

    still = functional.affine_grid(
        torch.eye(2, 3, device=device).expand(count, 2, 3), [count, 4, side, side], align_corners=False
    )
    moved = still + noise(14, 2).permute(0, 2, 3, 1) * 0.018
    color, alpha = _straight(functional.grid_sample(sprites.float(), moved, align_corners=False))
    color = blur(color * alpha, 3) / blur(alpha, 3).clamp_min(1e-3)
    edge = (alpha - blur(alpha, side // 20 * 2 + 1)).clamp(0, 1)
    wash = (0.72 + 0.12 * noise(10, 1) + 0.05 * noise(32, 1)).clamp(0.35, 1)
    paint = color + (1 - color) * (1 - wash) - 0.35 * edge
    return _joined(paint, alpha)


def pastel(sprites: Tensor, draw: torch.Generator) -> Tensor:
    color, alpha = _straight(sprites)
    return _joined(0.45 * color + 0.55 * (0.85 + 0.15 * color), alpha)


def gray(sprites: Tensor, draw: torch.Generator) -> Tensor:
    return torch.cat([_light(sprites).expand(-1, 3, -1, -1), sprites[:, 3:]], 1)


Filter = Callable[[Tensor, torch.Generator], Tensor]
FILTERS: dict[str, Filter] = {
    "outline": outline, "silhouette": silhouette, "flat": flat, "shaded": shaded, "pixel": pixel, "paper": paper,
    "watercolor": watercolor, "pastel": pastel, "gray": gray,
}  # fmt: skip
#: what captions call a style: each is put after the subject, or before it where it has no comma
STYLES: dict[str, tuple[str, ...]] = {
    "outline": ("outline drawing", "line art", "outlined"),
    "silhouette": ("silhouette", "black silhouette"),
    "flat": ("flat colors", "minimal"),
    "shaded": ("shaded", "glossy"),
    "pixel": ("pixel art", "pixelated"),
    "paper": ("paper cutout", "sticker"),
    "watercolor": ("watercolor", "watercolor painting"),
    "pastel": ("pastel", "pale colors"),
    "gray": ("black and white", "monochrome"),
}
#: the sets, by what is to be seen of them
SET_WORDS: dict[str, tuple[str, ...]] = {
    "noto": ("classic emoji", "cartoon"),
    "blob": ("blob emoji", "blob style"),
    "ink": ("high contrast", "ink"),
    "flat": ("flat emoji", "flat style"),
    "fx": ("firefox emoji", "soft style"),
    "twemoji": ("bold emoji", "vector"),
    "3d": ("3d render", "3d"),
}


def moved(sprites: Tensor, draw: torch.Generator, share: float = 0.4) -> Tensor:
    """Turn, scale and shift a share of the sprites a little; mirror none, since letters and flags have a side."""
    count, device = len(sprites), sprites.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=draw, device=device) * (high - low) + low

    is_moved = (uniform(0, 1) < share).float()
    angle = is_moved * uniform(-1, 1) * torch.where(uniform(0, 1) < 0.4, math.radians(14), 0.0)
    scale = 1 + is_moved * uniform(0.0, 0.22)  # of the grid: the sprite becomes smaller
    room = (scale - 1).clamp_min(0.02) * is_moved
    return turned(sprites, angle, scale, uniform(-1, 1) * room, uniform(-1, 1) * room)


def turned(sprites: Tensor, angle: Tensor, scale: Tensor, right: Tensor, down: Tensor) -> Tensor:
    """Return sprites under one affine map each; ``scale`` is that of the grid."""
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    rows = [torch.stack([cosine, -sine, right], 1), torch.stack([sine, cosine, down], 1)]
    grid = functional.affine_grid(torch.stack(rows, 1), list(sprites.shape), align_corners=False)
    return functional.grid_sample(sprites.float(), grid, align_corners=False)
