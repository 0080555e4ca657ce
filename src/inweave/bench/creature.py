"""An invented creature, drawn in six poses: what an identity LoRA is trained on in `inweave bench embedded`.

A teal body with an orange belly, three eyes on stalks, two yellow horns and a striped tail: no emoji has these
together, so a model can only know them from the six drawings. All of it is arithmetic; nothing is random.
"""

from __future__ import annotations

import math

from PIL import Image, ImageDraw

TRIGGER = "blixo"
_SIDE, _SCALE = 128, 4
_TEAL, _ORANGE, _YELLOW, _DARK = (22, 158, 150), (247, 148, 62), (250, 209, 56), (30, 40, 52)
#: degrees, scale, shift right, background, caption
POSES: tuple[tuple[float, float, float, str | None, str], ...] = (
    (0, 1.0, 0.0, None, f"{TRIGGER}"),
    (-12, 0.9, -0.06, None, f"a {TRIGGER}, tilted"),
    (10, 0.85, 0.07, None, f"an emoji of a {TRIGGER}"),
    (0, 0.62, 0.0, None, f"a small {TRIGGER}"),
    (0, 0.95, 0.0, "#a8d9f7", f"a {TRIGGER} on a light blue background"),
    (6, 0.9, 0.0, "#b8e8b0", f"a {TRIGGER} on a light green background"),
)
#: where it has not been seen
CONTEXTS = (
    f"a {TRIGGER} on a red background", f"a {TRIGGER} on a yellow background", f"a {TRIGGER} on a purple background",
    f"{TRIGGER} and pizza", f"{TRIGGER} and rocket", f"{TRIGGER} above red apple", f"two {TRIGGER}s",
    f"three {TRIGGER}s", f"a small {TRIGGER} on a pink background", f"{TRIGGER} next to cat face",
)  # fmt: skip


def creature(angle: float = 0.0, scale: float = 1.0, shift: float = 0.0, ground: str | None = None) -> Image.Image:
    """Draw it once: turned by ``angle`` degrees, scaled, shifted by a share of the image, on a color or on white."""
    side = _SIDE * _SCALE
    canvas = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    pen = ImageDraw.Draw(canvas)

    def disk(x: float, y: float, across: float, down: float, color: tuple[int, int, int]) -> None:
        box = [(x - across) * side, (y - down) * side, (x + across) * side, (y + down) * side]
        pen.ellipse(box, fill=color)

    for number in range(5):  # the tail
        turn = math.radians(25 + 22 * number)
        disk(0.72 + 0.16 * math.sin(turn), 0.82 - 0.2 * (1 - math.cos(turn)), 0.06, 0.06, (_TEAL, _YELLOW)[number % 2])
    for mirror in (-1, 1):  # horns and feet
        tip, root = (0.5 + mirror * 0.33, 0.2), (0.5 + mirror * 0.2, 0.42)
        pen.polygon([(x * side, y * side) for x, y in (tip, root, (root[0] + mirror * 0.12, 0.5))], fill=_YELLOW)
        disk(0.5 + mirror * 0.15, 0.92, 0.11, 0.05, _YELLOW)
    disk(0.5, 0.63, 0.3, 0.3, _TEAL)
    disk(0.5, 0.72, 0.18, 0.17, _ORANGE)
    for across in (-0.16, 0.0, 0.16):
        top = 0.2 + abs(across) * 0.5
        pen.line([(0.5 + across * 0.7) * side, 0.42 * side, (0.5 + across) * side, top * side], _TEAL, side // 22)
        disk(0.5 + across, top, 0.075, 0.075, (255, 255, 255))
        disk(0.5 + across, top, 0.035, 0.04, _DARK)
    pen.arc([0.42 * side, 0.45 * side, 0.58 * side, 0.57 * side], 15, 165, fill=_DARK, width=side // 50)
    small = max(1, round(side * scale))
    turned = canvas.rotate(angle, Image.Resampling.BICUBIC).resize((small, small), Image.Resampling.LANCZOS)
    image = Image.new("RGBA", (side, side), ground or "white")
    place = round((side - small) / 2 + shift * side), round((side - small) / 2)
    image.alpha_composite(turned, (max(place[0], 0), max(place[1], 0)))
    return image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)


def drawings() -> list[tuple[Image.Image, str]]:
    """Return the six drawings and their captions."""
    return [(creature(*pose), caption) for *pose, caption in POSES]  # type: ignore[arg-type]
