"""network_module and network_args in an import: the modules that kohya's scripts and LyCORIS adapt, and their ranks.

LyCORIS takes conv_dim and conv_alpha from network_dim and network_alpha where they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.network_args import (
    DORA_BYPASS,
    DORA_NORM,
    LYCORIS_DROPOUT,
    NO_CHANGE,
    TUCKER,
    NetworkArgs,
    dropout_of_lycoris,
    parse_network,
    put_algorithm,
    put_arguments,
    put_lora_plus,
    read_argument,
    refuse_dropped_norms,
)
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, parse_bool, parse_int, parse_scalar
from inweave.training.importers.kohya.blocks import NAMES as BLOCK_NAMES
from inweave.training.importers.kohya.blocks import block_rules
from inweave.training.importers.targets import BLOCKS, FLOW, LYCORIS_PRESETS, kohya_targets, lycoris_targets

_NO_CORE = "only convolutions of LoCon, LoHa and LoKr have a Tucker core"
_WHY = {
    "rank_dropout": "only that of networks.lora, and of LyCORIS without bypass_mode, is known",
    "module_dropout": "only that of LyCORIS and of networks.lora is known",
    "train_norm": "no LayerNorm or GroupNorm of this model has weights",
    "use_scalar": "an adapter has no scalar of its own",
    "decompose_both": "with full_matrix, LoKr has a rank of its smaller factor only", **dict.fromkeys(TUCKER, _NO_CORE),
    "train_t5xxl": "T5 is not trained", "rank_dropout_scale": "what rank_dropout leaves is not scaled",
    "wd_on_output": "DoRA has one magnitude per output", "exclude_patterns": "modules are left out by rules",
    "include_patterns": "modules are chosen by targets",
}  # fmt: skip
#: arguments that are read together with others -> our setting
_MAPPED = {
    "algo": "network", "dora_wd": "network", "conv_dim": "conv_rank", "conv_alpha": "conv_alpha", "preset": "targets",
    "train_blocks": "targets", "split_qkv": "targets", "train_double_block_indices": "targets",
    "train_single_block_indices": "targets", "exclude_mod": "targets", "wd_on_output": "network",
    **dict.fromkeys(BLOCK_NAMES, "rules"),
}  # fmt: skip


_MOST_BLOCKS = 1000  # FLUX.1 has 38


def import_network(out: Translation) -> None:
    """Set algorithm, modules, ranks of convolutions and options."""
    if (network := parse_network(out)) is None:
        return
    put_algorithm(out, network, _kind)
    _put_targets(out, network)
    put_lora_plus(out, network)
    if dropout := dropout_of_lycoris(out, network):
        out.refuse(dropout[0], f"{for_message(dropout[1])}: {LYCORIS_DROPOUT}", "dropout")
    put_arguments(out, network, _argument)


def _kind(out: Translation, network: NetworkArgs) -> str:
    kind = network.algorithm
    if kind in ("lora", "locon"):
        presets = LYCORIS_PRESETS.get(network.preset, (True, True))
        wide = presets[0] if network.is_lycoris else bool(network.conv_rank)
        kind = "locon" if wide and out.family not in FLOW else "lora"
    if network.decomposes and kind in ("lora", "locon"):
        if network.bypasses:
            out.refuse("network_args.dora_wd", DORA_BYPASS)
        out.unsupported("network_args.dora_wd", DORA_NORM)
        return "dora"
    if network.decomposes:
        out.refuse("network_args.dora_wd", f"{kind} has no weight decomposition here")
    return kind


def _put_targets(out: Translation, network: NetworkArgs) -> None:
    """Set the modules, the rank of convolutions, and the rules of blocks."""
    kind, arguments = out.fields.get("network", "lora"), network.arguments
    if "targets" in out.fields:
        return
    wide = False
    if not network.is_lycoris:
        wide = bool(network.conv_rank)
        blocks = str(arguments.get("train_blocks", "all")).lower()
        targets = kohya_targets(out.family, wide, modulation=is_off(arguments.get("exclude_mod", "true")))
        if out.family == "flux":
            try:
                targets = [targets[0].replace(BLOCKS, _flux_blocks(arguments, blocks))]
            except ValueError as error:
                out.problems.append(f"network_args.{error}")
        out.fields["targets"] = targets
        if out.family in ("flux", "flux2", "sd3") and not parse_bool(arguments.get("split_qkv", "false")):
            why = "kohya gives the fused projection q, k, v one adapter; here each has its own"
            out.unsupported("network_module", why)
    elif network.preset in LYCORIS_PRESETS:
        wide = LYCORIS_PRESETS[network.preset][0] and out.family not in FLOW
        out.fields["targets"] = lycoris_targets(out.family, network.preset)
        if not LYCORIS_PRESETS[network.preset][1]:
            out.fields["train_text_encoders"] = False
    else:
        out.refuse("network_args.preset", f"{for_message(arguments.get('preset'))} is a preset file of LyCORIS")
    out.mapping.setdefault("network_module", "targets")
    if wide and kind != "lora":
        rank, alpha = out.get("network_dim", 4), out.get("network_alpha", 1.0)
        out.fields.setdefault("conv_rank", parse_scalar(arguments.get("conv_dim") or rank) or parse_scalar(rank))
        conv_alpha = arguments.get("conv_alpha")
        first = conv_alpha if network.is_lycoris or conv_alpha else 1.0
        out.fields.setdefault("conv_alpha", parse_scalar(first or alpha) or parse_scalar(alpha))
    refuse_dropped_norms(out, "network_args.train_norm")
    try:
        block_rules(out, arguments, wide)
    except ValueError as error:
        out.problems.append(f"network_args.{error}")


def _flux_blocks(arguments: Mapping[str, Any], blocks: str) -> str:
    """Return the pattern of the blocks of FLUX.1 that are trained: of one kind, or those with some numbers."""
    parts = []
    for kind, folder in (("double", "transformer_blocks"), ("single", "single_transformer_blocks")):
        name = f"train_{kind}_block_indices"
        numbers = _block_numbers(name, str(arguments.get(name, "all")).strip().lower())
        if numbers and blocks in ("all", kind):
            parts.append(rf"{folder}\.{numbers}\..+")
    return "|".join(parts) or "(?!)"  # text encoders alone


def _block_numbers(name: str, text: str) -> str:
    """Return the pattern of the numbers in "all", "none" or "0,3,8-12"; empty for none."""
    if text in ("all", "none", ""):
        return r"\d+" if text == "all" else ""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        start, end = parse_int(first.strip()), parse_int((last or first).strip())
        if not 0 <= start <= end < _MOST_BLOCKS:
            raise ValueError(f"{name}: expected all, none or numbers such as 0,3,8-12, got {for_message(text)}")
        numbers += range(start, end + 1)
    return f"({'|'.join(map(str, dict.fromkeys(numbers)))})"


def _argument(out: Translation, network: NetworkArgs, name: str, value: Any) -> None:
    theirs = f"network_args.{name}"
    if name == "wd_on_output" and not parse_bool(value):
        out.refuse(theirs, f"{for_message(value)}: {_WHY[name]}")
    elif name in ("conv_dim", "conv_alpha", "preset", "train_blocks", "split_qkv") or (
        name.endswith("_block_indices") and out.family == "flux" and not network.is_lycoris
    ):
        out.mapping[theirs] = _MAPPED[name]
    elif name in _MAPPED:
        out.mapping.setdefault(theirs, _MAPPED[name])
    elif name == "factor" and network.algorithm != "lokr":
        out.note(theirs, NO_CHANGE)
    elif name == "full_matrix" and network.algorithm == "lokr" and parse_bool(value):
        out.fields["rank"] = 2**20  # more than any factor has: both stay whole
        out.mapping[theirs] = "rank"
    elif name in TUCKER and not LYCORIS_PRESETS.get(network.preset, (True,))[0]:
        out.note(theirs, "no convolution is trained")
    elif name == "train_norm" and out.family in FLOW and parse_bool(value):
        out.refuse(theirs, f"{for_message(value)}: {_WHY[name]}")
    elif read_argument(out, network, name, value):
        return
    elif is_off(parse_scalar(value)) or parse_scalar(value) == "all":
        out.unset.append(theirs)
    else:
        out.refuse(theirs, f"{for_message(value)}: {_WHY.get(name, 'is not supported')}")
