"""The grammar of adapter keys: closed tables of suffixes and prefixes.

    key    = prefix + module + "." + suffix
    suffix = the longest entry of SUFFIXES (or one of the few patterns below) that ends the key
    prefix = any run of wrappers, then at most one component:

        lora_unet_ lora_te1_ lycoris_ oft_unet_ ...   the module after it is flat: dots became underscores
        unet. transformer. text_encoder_2. ...        the module after it is dotted

A key is split without reference to other keys or to the model. Flat names are never converted back to dotted ones:
instead the model's names are flattened and looked up (`inweave.targets`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from inweave.adapter import ALGORITHMS, Ref
from inweave.formats.dialects import dialects
from inweave.formats.dialects.base import Dialect

#: suffix -> (role, family of dialects); those of the algorithms are added by `learn_suffixes`
SUFFIXES: dict[str, tuple[str, str]] = {
    "___.alpha": ("alpha", "hcp"),
    "alpha": ("alpha", ""),
    "scale": ("scale", ""),
    "dora_scale": ("dora_scale", ""),
    "lora_magnitude_vector": ("magnitude", "peft"),
    "lora_magnitude_vector.weight": ("magnitude", "peft"),
    "magnitude": ("magnitude", ""),
    "reshape_weight": ("reshape_weight", ""),
    "bias_indices": ("bias_indices", "lycoris"),
    "bias_values": ("bias_values", "lycoris"),
    "bias_size": ("bias_size", "lycoris"),
    "q_layer.weight": ("tlora_q", "lycoris"),
    "p_layer.weight": ("tlora_p", "lycoris"),
    "lambda_layer": ("tlora_lambda", "lycoris"),
}

#: suffixes that may carry an adapter's name before their last segment (`lora_A.default.weight`) or after it
NAMED = {"lora_magnitude_vector": "magnitude", "modules_to_save": "plain"}
NAMED_LAST: dict[str, str] = {}
_learned: set[str] = set()


def learn_suffixes() -> None:
    """Add the suffixes of algorithms that were registered since the last call."""
    if len(_learned) == len(ALGORITHMS):
        return
    for kind, algorithm in ALGORITHMS.items():
        for family, table in algorithm.suffixes.items() if kind not in _learned else ():
            SUFFIXES.update({suffix: (role, family) for suffix, role in table.items()})
            NAMED_LAST.update({suffix: role for suffix, role in table.items() if suffix in algorithm.named_suffixes})
            if family == "peft":
                ends = {s.removesuffix(".weight"): role for s, role in table.items() if s.endswith(".weight")}
                NAMED.update({name: role for name, role in ends.items() if "." not in name})
        _learned.add(kind)


learn_suffixes()

#: `a1.weight` may be GLoRA's or candle-lora's, `x.weight` may end a longer pattern
_SHARED_SPELLING = ("g_a1", "g_a2", "g_b1", "g_b2", "plain_weight", "plain_bias")

_FLATTENED = re.compile(r"^(.+)_(lora_down|lora_up|lora_mid)\.weight$")
_PROCESSOR = re.compile(r"^(.*?)(?:\.processor)?\.([a-z_]+)_lora$")
_CANDLE = re.compile(r"^(?:(.*)\.)?(a|b|m|magnitude)(\d+)\.weight$")
_CANDLE_DOTLESS = re.compile(r"^((?:.*\.)?(?:traced_)?lora_[a-z0-9_]+?)(a|b|m|magnitude)(\d+)\.weight$")
_CANDLE_HOME = re.compile(r"(?:^|\.)((?:traced_)?lora_(\w+?))$")
_LIST = re.compile(r"^(unet|text_encoder):(\d+):(up|down)$")
_SAM = re.compile(r"^w_([ab])_\d+$")

#: old attention processors write the text encoder's projections under the UNet's leaf names
_TEXT_LEAVES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key, split. ``name`` is a PEFT adapter's name left in the key, ``index`` a list position."""

    raw: str
    module: str
    role: str
    family: str
    name: str | None = None
    index: int | None = None


def split(key: str) -> Key | None:
    """Split one key; return None if it ends with no suffix of the grammar."""
    segments = key.split(".")
    for count in (4, 3, 2, 1) if "___" in segments else (3, 2, 1):
        meaning = SUFFIXES.get(".".join(segments[-count:])) if len(segments) > count else None
        if meaning is None:
            continue
        if meaning[0] in _SHARED_SPELLING:
            return _split_pattern(key, segments) or Key(key, ".".join(segments[:-count]), *meaning)
        return Key(key, ".".join(segments[:-count]), *meaning)
    return _split_pattern(key, segments)


def _split_pattern(key: str, segments: list[str]) -> Key | None:
    if listed := _LIST.match(key):
        return Key(key, listed[1], listed[3], "cloneofsimo", index=int(listed[2]))
    if sam := _SAM.match(key):
        return Key(key, "", f"sam_{sam[1]}", "sam")
    if candle := _CANDLE.match(key) or _CANDLE_DOTLESS.match(key):
        role = {"a": "candle_a", "b": "candle_b"}.get(candle[2], "candle_m")
        return Key(key, candle[1] or "", role, "candle", index=int(candle[3]))
    if len(segments) > 3 and segments[-3] in NAMED and segments[-1] in ("weight", "bias"):
        role = NAMED[segments[-3]]
        if role == "plain":
            role = f"plain_{segments[-1]}"
        elif segments[-1] == "bias":
            role = "up_bias"
        return Key(key, ".".join(segments[:-3]), role, "peft", name=segments[-2])
    if len(segments) > 2 and segments[-2] in NAMED_LAST:
        return Key(key, ".".join(segments[:-2]), NAMED_LAST[segments[-2]], "peft", name=segments[-1])
    if len(segments) > 2 and segments[-2] == "oft_blocks" and is_number(segments[-1]):
        return Key(key, ".".join(segments[:-2]), "oft_blocks", "kohya", index=int(segments[-1]))
    if len(segments) > 3 and segments[-1] == "weight" and segments[-2] in ("down", "up"):
        return _split_processor(key, ".".join(segments[:-2]), segments[-2])
    if flattened := _FLATTENED.match(key):
        role = {"lora_down": "down", "lora_up": "up", "lora_mid": "mid"}[flattened[2]]
        return Key(key, flattened[1], role, "kohya")
    return None


def _split_processor(key: str, module: str, role: str) -> Key | None:
    """Split `...attn1.processor.to_q_lora.down.weight` and XLabs' `...processor.qkv_lora1.down.weight`."""
    if re.search(r"\.(qkv|proj)_lora[12]?$", module):
        return Key(key, module, role, "xlabs")
    match = _PROCESSOR.match(module)
    if not match:
        return None
    parent, leaf = match[1], match[2]
    if parent.endswith("self_attn") and leaf in _TEXT_LEAVES:
        leaf = _TEXT_LEAVES[leaf]
    elif leaf == "to_out":
        leaf = "to_out.0"
    return Key(key, f"{parent}.{leaf}", role, "processor")


#: prefixes that do not belong to a dialect: the two experts of Wan 2.2, and a wrapper
_OTHER_PREFIXES = (("high_noise_model.", "unet"), ("low_noise_model.", "unet2"), ("module.", ""))


class _Prefixes(NamedTuple):
    """The prefixes of all dialects: a pattern that matches the longest one, and its component and dialect."""

    flat: re.Pattern[str]
    dotted: re.Pattern[str]
    meaning: dict[str, tuple[str, str]]


@cache
def _prefixes_of(table: tuple[Dialect, ...]) -> _Prefixes:
    flat = {prefix: (component, each.name) for each in table for prefix, component in each.flat_prefixes}
    dotted = {prefix: (component, each.name) for each in table for prefix, component in each.dotted_prefixes}
    dotted |= {prefix: (component, "") for prefix, component in _OTHER_PREFIXES}
    return _Prefixes(_longest(flat), _longest(dotted), flat | dotted)


def _longest(prefixes: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest prefix of a text."""
    return re.compile("|".join(re.escape(prefix) for prefix in sorted(prefixes, key=len, reverse=True)))


#: names that torch.compile, FSDP and activation checkpointing insert anywhere
_WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?:\.|$)")
_FLAT_WRAPPERS = re.compile(r"(^|_)_?(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)_")
_OTHER_ENCODER = re.compile(r"^text_encoders\.\w+\.transformer\.")


def unwrapped(module: str) -> str:
    """Return a dotted name without the wrapper modules of torch.compile, FSDP and activation checkpointing."""
    return _WRAPPERS.sub("", module).removesuffix(".") if "_mod" in module else module


def locate(module: str) -> tuple[Ref, str]:
    """Strip wrappers and the component from a module's name; return (Ref, the prefix's dialect or "")."""
    prefixes = _prefixes_of(dialects())
    module = unwrapped(module)
    if (flat := prefixes.flat.match(module)) and len(module) > flat.end():
        component, dialect = prefixes.meaning[flat[0]]
        name = module[flat.end() :].lstrip("_").replace(".", "_")
        return Ref(component, _FLAT_WRAPPERS.sub(r"\1", name), flat=True), dialect
    component, dialect = "", ""
    while True:
        if other := _OTHER_ENCODER.match(module):
            known = prefixes.meaning.get(other[0], ("te", "comfy"))
            module, component, dialect = module[other.end() :], known[0], "comfy"
            continue
        wrapper = prefixes.dotted.match(module)
        if wrapper is None:
            break
        named_component, named_dialect = prefixes.meaning[wrapper[0]]
        if named_component and component.startswith("te"):
            break  # a text encoder's own module may be called `transformer`
        if component != "unet2":  # modules inside the second denoiser belong to it
            component = named_component or component
        module = module[wrapper.end() :]
        dialect = dialect if dialect == "peft" else named_dialect or dialect
    if module.startswith("sformer_blocks."):  # 16 characters cut where `transformer.` has 12
        module, component = "tran" + module, "unet"
    return Ref(component, module), dialect


def is_number(text: str) -> bool:
    """Return whether a text is 1 to 6 ASCII digits; `isdigit` alone accepts characters that `int` does not."""
    return text.isascii() and text.isdigit() and len(text) <= 6


def candle_home(path: str, many: bool) -> Ref:
    """Return the module of a candle-lora path, or only its struct if that has ``many`` ids."""
    match = _CANDLE_HOME.search(path)
    parent, leaf = (path[: match.start()], match[2]) if match else (path, "")
    parent = parent.strip(".")
    if leaf in ("qkv", "proj", "fc1", "fc2", "head", "query_key_value", "dense") and not many:
        return Ref("", f"{parent}.{leaf}" if parent else leaf)
    if leaf in ("llama", "llama_csa", "llama_block", "falcon") or many or not parent:
        return Ref("", parent, below=True)
    return Ref("", parent)


def is_candle_path(path: str) -> bool:
    return _CANDLE_HOME.search(path) is not None or path == ""
