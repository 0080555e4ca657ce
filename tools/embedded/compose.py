"""Images composed of sprites: recoloring, backgrounds, small ones, pairs and counts.

over(p, b)      p_rgb + (1 - p_alpha) * b, in [-1, 1]: the networks' input
recolor(p, c)  shades of one color by luminance y, stretched so that the sprite's mean is 1/2:
                black .. c for the darker half, c .. white for the lighter half
arrange(kind)   full, small, pair (side by side), stack (one above the other), front (the first covers part of the
                second), two to six
grounds(...)    one color, two colors in a gradient, stripes, dots
"""

from __future__ import annotations

import random

import torch
from torch.nn import functional

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.13, 0.13), "orange": (0.96, 0.52, 0.10), "yellow": (0.98, 0.82, 0.15), "green": (0.20, 0.66, 0.25),
    "blue": (0.13, 0.40, 0.88), "purple": (0.54, 0.22, 0.76), "pink": (0.97, 0.50, 0.70), "brown": (0.50, 0.31, 0.18),
    "gray": (0.55, 0.55, 0.57), "teal": (0.08, 0.60, 0.60),
}  # fmt: skip
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    **COLORS, "black": (0.08, 0.08, 0.09), "light blue": (0.66, 0.85, 0.97), "light green": (0.72, 0.91, 0.69),
}  # fmt: skip
WHITE = (1.0, 1.0, 1.0)
_LUMINANCE = (0.299, 0.587, 0.114)


def over(sprites: torch.Tensor, backgrounds: torch.Tensor) -> torch.Tensor:
    """Return RGB in [-1, 1] of premultiplied ``sprites`` on backgrounds (n, 3), (1, 3) for all, or (n, 3, h, w)."""
    behind = backgrounds[:, :, None, None] if backgrounds.dim() == 2 else backgrounds
    return (sprites[:, :3] + (1 - sprites[:, 3:]) * behind) * 2 - 1


def on_white(sprites: torch.Tensor) -> torch.Tensor:
    return over(sprites.float(), torch.ones(1, 3, device=sprites.device))


def recolor(sprites: torch.Tensor, colors: torch.Tensor) -> torch.Tensor:
    """Return each sprite in shades of its color (n, 3); light and dark parts stay light and dark."""
    alpha = sprites[:, 3:]
    rgb = sprites[:, :3] / alpha.clamp_min(1e-4)
    light = (rgb * rgb.new_tensor(_LUMINANCE)[None, :, None, None]).sum(1, keepdim=True)
    mean = (light * alpha).sum((2, 3), keepdim=True) / alpha.sum((2, 3), keepdim=True).clamp_min(1)
    mean = mean.clamp(0.15, 0.9)
    upper = 0.5 + 0.5 * (light - mean) / (1 - mean).clamp_min(0.1)
    tone = torch.where(light < mean, 0.5 * light / mean, upper).clamp(0, 1)
    color = colors[:, :, None, None]
    shades = color * (0.15 + 1.7 * tone)
    tints = color + (1 - color) * (2 * tone - 1) * 0.9
    return torch.cat([torch.where(tone < 0.5, shades, tints).clamp(0, 1) * alpha, alpha], 1)


def recolor_some(sprites: torch.Tensor, names: list[str | None]) -> torch.Tensor:
    """Recolor sprite i with the color ``names[i]``, or leave it unchanged for None."""
    chosen = [i for i, name in enumerate(names) if name]
    if chosen:
        targets = sprites.new_tensor([COLORS[names[i] or ""] for i in chosen])
        sprites[chosen] = recolor(sprites[chosen], targets)
    return sprites


def background_colors(names: list[str | None], device: torch.device) -> torch.Tensor:
    return torch.tensor([BACKGROUNDS[name] if name else WHITE for name in names], device=device)


PATTERNS = ("gradient", "striped", "dotted")


def grounds(names: list[str | None], patterns: list[str | None], side: int, device: torch.device) -> torch.Tensor:
    """Return backgrounds (n, 3, side, side): the color, nearer to white in a part of a pattern."""
    colors = background_colors(names, device)[:, :, None, None]
    lighter = colors + (1 - colors) * 0.6
    across = torch.linspace(0, 1, side, device=device)
    down, right = across[:, None], across[None, :]
    dots = ((down * 8) % 1 - 0.5).square() + ((right * 8) % 1 - 0.5).square()
    shares = {
        "gradient": down.expand(side, side),
        "striped": (((down + right) * 6) % 1 < 0.5).float(),
        "dotted": (dots < 0.05).float(),
    }
    share = torch.stack([shares[each] if each else torch.zeros(side, side, device=device) for each in patterns])
    return colors + (lighter - colors) * share[:, None]


def shrink(sprites: torch.Tensor, size: int) -> torch.Tensor:
    smaller = functional.interpolate(sprites, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
    return smaller.clamp(0, 1)


def paste(canvas: torch.Tensor, sprites: torch.Tensor, x: int, y: int) -> None:
    size = sprites.shape[-1]
    under = canvas[..., y : y + size, x : x + size]
    canvas[..., y : y + size, x : x + size] = sprites + under * (1 - sprites[:, 3:])


def arrange(kind: str, first: torch.Tensor, second: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Place sprites (n, 4, s, s) on an empty canvas of the same size; ``second`` is used by pair and stack."""
    if kind == "full":
        return first
    unit = first.shape[-1] / 128

    def px(value: float) -> int:
        return round(value * unit)

    def jitter() -> int:
        return px(rng.randint(-2, 2))

    canvas = torch.zeros_like(first)
    if kind == "small":
        paste(canvas, shrink(first, px(64)), px(32) + jitter(), px(32) + jitter())
    elif kind == "pair":
        paste(canvas, shrink(first, px(60)), px(2) + abs(jitter()), px(34) + jitter())
        paste(canvas, shrink(second, px(60)), px(66) - abs(jitter()), px(34) + jitter())
    elif kind == "stack":
        paste(canvas, shrink(first, px(60)), px(34) + jitter(), px(2) + abs(jitter()))
        paste(canvas, shrink(second, px(60)), px(34) + jitter(), px(66) - abs(jitter()))
    elif kind == "front":
        paste(canvas, shrink(second, px(78)), px(46) + jitter(), px(4) + abs(jitter()))
        paste(canvas, shrink(first, px(74)), px(4) + abs(jitter()), px(50) + jitter())
    elif kind in ("five", "six"):
        grid = [(x, y) for y in (22, 66) for x in (3, 45, 87)]
        for x, y in grid[: 5 if kind == "five" else 6]:
            paste(canvas, shrink(first, px(38)), px(x + (21 if kind == "five" and y == 66 else 0)), px(y))
    elif kind == "two":
        for x in (3, 65):
            paste(canvas, shrink(first, px(60)), px(x), px(34) + jitter())
    else:
        spots = {"three": ((35, 4), (4, 65), (66, 65)), "four": ((4, 4), (4, 66), (66, 4), (66, 66))}[kind]
        smaller = shrink(first, px(58))
        for x, y in spots:
            paste(canvas, smaller, px(x), px(y))
    return canvas
