"""Fit the judge of `inweave bench embedded` on the sets that the model is trained on, and test it on the others.

subjects   what at least four sets draw, without signs, skin tones and "man ..." / "woman ..."
drawings   each unchanged, mirrored with its colors exchanged, as lines
test       the sets that nothing is fitted on: right among all subjects, and among five

packed/*.webp  ->  src/inweave/models/emoji/judge.safetensors
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file
from tools.embedded.captions import Emoji
from tools.embedded.pack import packed_file, unpack
from tools.embedded.places import add_work
from tools.embedded.render import HELD_OUT, TRAINED

from inweave.bench.bars import difference
from inweave.bench.judge import FILE, Floats, describe, trimmed, unit

GROUPS = ("face", "animal", "food", "travel", "activity", "object")
SETS_EACH, DIMENSIONS, SHRINKAGE = 4, 160, 0.25
Drawing = tuple[Emoji, Image.Image]


def is_subject(emoji: Emoji) -> bool:
    return emoji.group in GROUPS and emoji.weight >= 1 and not emoji.tone


def drawings(work: Path, name: str) -> list[Drawing]:
    """Return the subjects of a set on white."""
    images, emojis = unpack(packed_file(work, name))
    white = Image.new("RGBA", (images.shape[2], images.shape[1]), "white")
    return [
        (emoji, Image.alpha_composite(white, Image.fromarray(image)).convert("RGB"))
        for image, emoji in zip(images, emojis, strict=True)
        if is_subject(emoji)
    ]


def variants(colors: Floats, cover: Floats) -> Iterator[tuple[Floats, Floats]]:
    yield colors, cover
    yield colors[:, ::-1, [1, 2, 0]], cover[:, ::-1]
    down, right = np.gradient(colors, axis=(0, 1))
    lines = 1 - np.clip(np.hypot(down, right).max(-1, keepdims=True) * 3, 0, 1)
    yield np.repeat(lines, 3, -1).astype(np.float32), cover


def discriminant(rows: Floats, labels: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the mean and the matrix whose products have the covariance 1 within labels."""
    count = labels.max() + 1
    means = np.stack([rows[labels == label].mean(0) for label in range(count)])
    within_value = np.cov((rows - means[labels]).T)
    within_value = (1 - SHRINKAGE) * within_value + SHRINKAGE * np.trace(within_value) / len(within_value) * np.eye(
        len(within_value)
    )
    values, vectors = np.linalg.eigh(within_value)
    whitening = vectors / np.sqrt(values)
    mean = means.mean(0)
    *_, axes = np.linalg.svd((means - mean) @ whitening, full_matrices=False)
    return mean.astype(np.float32), (whitening @ axes[:DIMENSIONS].T).astype(np.float32)


def drawings_differ(sets: dict[str, list[Drawing]], codes: list[str]) -> float:
    """Return the mean difference of two sets' drawings of a subject, of 255."""
    by_code: dict[str, list[Image.Image]] = defaultdict(list)
    for own in sets.values():
        for emoji, image in own:
            by_code[emoji.code].append(image)
    return float(np.mean([difference(*pair) for code in codes[::6] for pair in combinations(by_code[code], 2)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    sets = {name: drawings(options.work, name) for name in TRAINED}
    visible = Counter(emoji.code for own in sets.values() for emoji, _ in own)
    names = {emoji.code: emoji.name for own in sets.values() for emoji, _ in own if visible[emoji.code] >= SETS_EACH}
    codes = sorted(names, key=names.__getitem__)
    number = {code: i for i, code in enumerate(codes)}
    rows, labels, own_rows = [], [], []
    for own in sets.values():
        for emoji, image in own:
            if emoji.code in number:
                own_rows.append(len(rows))
                for variant in variants(*trimmed(image)):
                    rows.append(describe(*variant))
                    labels.append(number[emoji.code])
    matrix_rows, all_labels = np.stack(rows), np.array(labels)
    print(
        f"{len(codes)} subjects, {len(own_rows)} drawings of {len(sets)} sets, {matrix_rows.shape[1]} numbers each",
        flush=True,
    )
    mean, matrix = discriminant(matrix_rows, all_labels)
    all_looks = unit((matrix_rows - mean) @ matrix)
    looks = unit(np.stack([all_looks[all_labels == label].mean(0) for label in range(len(codes))]))
    facts: dict[str, Any] = {"sets": list(TRAINED), "right": {}, "right_in_five": {}}
    knows: dict[str, set[str]] = defaultdict(set)
    for name in (*TRAINED, *HELD_OUT):
        tested = [(e, i) for e, i in (sets.get(name) or drawings(options.work, name)) if e.code in number]
        made = unit((np.stack([describe(*trimmed(image)) for _, image in tested]) - mean) @ matrix)
        order = np.argsort(-(made @ looks.T), axis=1)[:, :5]
        right = order == np.array([number[emoji.code] for emoji, _ in tested])[:, None]
        facts["right"][name] = round(float(right[:, 0].mean()), 4)
        facts["right_in_five"][name] = round(float(right.any(1).mean()), 4)
        for (emoji, _), is_right in zip(tested, right[:, 0], strict=True):
            if is_right:
                knows[name].add(emoji.code)
    drawn_by = {code: [name for name, own in sets.items() if any(e.code == code for e, _ in own)] for code in codes}
    facts["sure"] = [names[code] for code in codes if all(code in knows[name] for name in drawn_by[code])]
    for name in HELD_OUT:
        facts[f"right_in_{name}"] = [names[code] for code in codes if code in knows[name]]
    facts["drawings_differ"] = round(drawings_differ(sets, codes), 3)
    arrays = {"mean": mean, "matrix": matrix.astype(np.float16), "looks": looks.astype(np.float16)}
    metadata = {"subjects": json.dumps([names[code] for code in codes]), "facts": json.dumps(facts)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, options.out, metadata)
    print(json.dumps({"right": facts["right"], "right_in_five": facts["right_in_five"]}, indent=1))
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB; sure of {len(facts['sure'])} subjects; "
          f"two sets' drawings differ by {facts['drawings_differ']} of 255")  # fmt: skip


if __name__ == "__main__":
    main()
