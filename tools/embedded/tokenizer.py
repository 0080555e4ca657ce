"""Learn the vocabulary: byte-pair merges of the captions, in the files of a CLIP tokenizer.

    vocabulary   256 bytes, the same 256 at the end of a word, the merges, <|startoftext|>, <|endoftext|>: 3,072 in all

Besides the captions it sees words that styles and compositions need, so that those are few tokens as well. The
tokens are the same in every run; merges that are equally frequent may change places, so a text encoder works only with
the vocabulary it was trained with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tools.embedded.captions import all_emoji, fixed_captions
from tools.embedded.networks import TOKENS
from tools.embedded.places import add_work
from transformers import CLIPTokenizer

SIZE = 3072
START, END = "<|startoftext|>", "<|endoftext|>"
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

EXTRA_WORDS = [
    "a",
    "an",
    "the",
    "of",
    "on",
    "in",
    "at",
    "with",
    "and",
    "or",
    "next",
    "to",
    "above",
    "below",
    "left",
    "right",
    "side",
    "by",
    "side",
    "small",
    "big",
    "large",
    "tiny",
    "two",
    "three",
    "four",
    "five",
    "many",
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "gray",
    "grey",
    "teal",
    "cyan",
    "magenta",
    "gold",
    "silver",
    "dark",
    "light",
    "bright",
    "pale",
    "colorful",
    "colourful",
    "background",
    "emoji",
    "icon",
    "sticker",
    "drawing",
    "picture",
    "image",
    "photo",
    "painting",
    "art",
    "style",
    "cartoon",
    "cute",
    "simple",
    "flat",
    "3d",
    "render",
    "line",
    "art",
    "outline",
    "ink",
    "sketch",
    "pixel",
    "art",
    "silhouette",
    "outlined",
    "shaded",
    "pastel",
    "cutout",
    "contrast",
    "bold",
    "classic",
    "firefox",
    "warm",
    "cool",
    "gradient",
    "next",
    "left",
    "right",
    "above",
    "below",
    "inside",
    "front",
    "behind",
    "small",
    "large",
    "tilted",
    "five",
    "six",
    "pixelated",
    "retro",
    "blob",
    "round",
    "glossy",
    "shiny",
    "soft",
    "matte",
    "sticker",
    "watercolor",
    "oil",
    "neon",
    "glowing",
    "monochrome",
    "minimal",
    "vector",
    "clay",
    "plastic",
    "wood",
    "metal",
    "paper",
    "apple",
    "apples",
    "cat",
    "cats",
    "dog",
    "dogs",
    "house",
    "houses",
    "car",
    "cars",
    "tree",
    "trees",
    "flower",
    "flowers",
    "bird",
    "birds",
    "fish",
    "face",
    "faces",
    "man",
    "woman",
    "person",
    "people",
    "animal",
    "animals",
    "food",
    "fruit",
    "vehicle",
    "building",
    "weather",
    "sky",
    "sun",
    "moon",
    "star",
    "stars",
    "heart",
    "hearts",
    "king",
    "queen",
    "robot",
    "dragon",
    "monster",
    "happy",
    "sad",
    "angry",
    "sleepy",
    "laughing",
    "crying",
    "smiling",
    "skin",
    "tone",
    "medium-light",
    "medium-dark",
    "hair",
    "beard",
    "wearing",
    "holding",
    "riding",
    "sks",
    "style",
    "my_style",
    "trigger",
]


def corpus(work: Path) -> list[str]:
    """Return every caption, every name four more times, every keyword, and the extra words."""
    lines: list[str] = []
    for emoji in all_emoji(work, tones=False):
        lines += [*fixed_captions(emoji), *[emoji.name] * 4, *emoji.tags]
    lines += EXTRA_WORDS * 12
    colors = ("red", "blue", "green", "yellow", "purple", "pink", "orange", "black", "white")
    return lines + [f"{color} {thing}" for color in colors for thing in ("background", "cat", "heart")] * 4


def learn_merges(lines: list[str]) -> list[tuple[str, str]]:
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=SIZE - 300, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return [(first, second) for first, second in json.loads(tokenizer.to_str())["model"]["merges"]]


def byte_letters() -> list[str]:
    """Return the printable letter of each byte, printable bytes first: CLIP's order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def vocabulary(merges: list[tuple[str, str]]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return all tokens in order, and the merges that fit."""
    letters = byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    used = merges[: SIZE - 2 - len(tokens)]
    return [*tokens, *(first + second for first, second in used), START, END], used


def write(folder: Path, tokens: list[str], merges: list[tuple[str, str]]) -> CLIPTokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").unlink(missing_ok=True)  # else the old one would be read back
    numbers = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(numbers, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    special = {"bos_token": START, "eos_token": END, "pad_token": END, "unk_token": END}
    settings = {
        **special,
        "model_max_length": TOKENS,
        "do_lower_case": True,
        "add_prefix_space": False,
        "errors": "replace",
        "tokenizer_class": "CLIPTokenizer",
    }
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)  # adds tokenizer.json, and more settings than anyone needs
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    work: Path = parser.parse_args().work
    lines = corpus(work)
    tokenizer = write(work / "tokenizer", *vocabulary(learn_merges(lines)))
    longest = max(len(tokenizer(line).input_ids) for line in lines)
    print(f"{len(tokenizer)} tokens; the longest of {len(lines)} lines is {longest} tokens")


if __name__ == "__main__":
    main()
