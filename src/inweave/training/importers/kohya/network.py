"""network_module and network_args of kohya's scripts: the algorithm, its options and the modules it adapts.

    networks.lora, lora_flux, lora_sd3   LoRA; with conv_dim LoCon
    lycoris.kohya                        algo = locon | lora, loha, lokr; dora_wd; preset = full | attn-mlp | ...

Other modules and algorithms (iA3, OFT, GLoRA, DyLoRA, full) train something that cannot be expressed here, and are
refused. LyCORIS takes conv_dim and conv_alpha from network_dim and network_alpha where they are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.importers.kohya.blocks import NAMES as BLOCK_NAMES
from inweave.training.importers.kohya.blocks import block_rules
from inweave.training.importers.targets import FLOW, LYCORIS_PRESETS, kohya_targets, lycoris_targets
from inweave.training.importers.translate import Translation, choice
from inweave.training.importers.values import is_off, normalize_name, parse_bool, parse_pairs, parse_scalar

_ALGORITHMS = {"lora": "lora", "locon": "locon", "loha": "loha", "lokr": "lokr"}
_PRESETS = {"full": "all", "attnmlp": "attention-mlp", "unettransformeronly": "attention-mlp", "attnonly": "attention"}
_MODULES = ("networks.lora", "networks.loha", "networks.lokr", "lycoris")
#: modules of the same beginning that are other algorithms
_OTHERS = ("networks.lora_fa", "networks.lora_hunyuan", "networks.lora_lumina", "networks.lora_anima")
#: options of an algorithm that is not used, and of how it computes
_HARMLESS = frozenset({
    "verbose", "bypass_mode", "block_size", "constraint", "constrain", "unit", "train_on_input", "dora_oft", "loraplus_groups",
    "rescaled", "disable_conv_cp",
})  # fmt: skip
#: options of LoKr that the other algorithms do not read
_LOKR_ONLY = ("factor", "full_matrix", "decompose_both", "unbalanced_factorization")
_CONVOLUTIONS_ONLY = ("use_tucker", "use_cp", "use_conv_cp")
_LORA_PLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
_LYCORIS_DROPOUT = "LyCORIS drops the adapter's outputs, or nothing, by its version and bypass_mode"
_WHY = {
    "rank_dropout": "LyCORIS drops outputs, or ranks of a whole batch, by its version and bypass_mode",
    "module_dropout": "the adapter of a module is never skipped",
    "train_norm": "normalization layers are not adapted", "use_scalar": "an adapter has no scalar of its own",
    "decompose_both": "LoKr factorizes its larger factor only", "use_tucker": "convolutions have no Tucker core",
    "use_cp": "convolutions have no Tucker core", "use_conv_cp": "convolutions have no Tucker core", "train_t5xxl": "T5 is not trained",
    "rank_dropout_scale": "ranks are scaled by 1 / (1 - rank_dropout)", "wd_on_output": "DoRA has one magnitude per output",
    "exclude_patterns": "modules are left out by rules", "include_patterns": "modules are chosen by targets",
}  # fmt: skip


def network(out: Translation, settings: Mapping[str, Any]) -> None:
    """Read both settings together, after all others."""
    if not settings.get("network_module") and not settings.get("network_args") and not out.exact:
        return
    value = settings.get("network_module")
    module = value[:100] if isinstance(value, str) else for_message(value) if value else ""
    try:
        arguments = parse_pairs(settings.get("network_args") or [])
    except ValueError as error:
        out.problems.append(f"network_args: {error}")
        return
    lycoris = is_lycoris(module, arguments)
    conv = parse_scalar(arguments.get("conv_dim", 0))
    own = normalize_name(module.rpartition(".")[2]) if module in ("networks.loha", "networks.lokr") else ""
    algorithm = normalize_name(arguments.get("algo", own or ("locon" if conv or lycoris else "lora")))
    if "network_module" in settings:
        out.mapping["network_module"] = "network"
    preset = normalize_name(arguments.get("preset", "full"))
    if algorithm not in _ALGORITHMS:
        out.refuse(
            "network_args.algo",
            f"{for_message(arguments['algo'])} is not supported, only lora, locon, loha, lokr",
            "network",
        )
    elif module and (not module.startswith(_MODULES) or module.startswith(_OTHERS)):
        out.refuse("network_module", f"{for_message(module)} is not supported", "network")
    else:
        kind = _ALGORITHMS[algorithm]
        kind = "locon" if kind == "lora" and conv else kind
        if out.exact and kind in ("lora", "locon"):
            wide = LYCORIS_PRESETS.get(preset, (True, True))[0] if lycoris else bool(conv)
            kind = "locon" if wide and out.family not in FLOW else "lora"
        if parse_bool(arguments.get("dora_wd", "false")):
            if kind in ("lora", "locon"):
                kind = "dora"
            elif out.exact:
                out.refuse("network_args.dora_wd", f"{kind} has no weight decomposition here")
        out.put("network_args.algo" if "algo" in arguments else "network_module", "network", kind)
    if out.exact:
        _exact_network(out, settings, arguments, preset, lycoris)
    elif not lycoris and module and "targets" not in settings:
        out.put("network_module.targets", "targets", "attention-mlp")
    _lora_plus(out, arguments)
    _dropouts(out, settings, arguments, lycoris)
    for name, argument in arguments.items():
        try:
            _network_arg(out, name, argument, algorithm, preset, lycoris)
        except ValueError as error:
            out.problems.append(f"network_args.{name}: {error}")


def _exact_network(
    out: Translation, settings: Mapping[str, Any], arguments: Mapping[str, Any], preset: str, lycoris: bool
) -> None:
    """The modules, the convolutions' rank, and the rules of blocks."""
    kind = out.fields.get("network", "lora")
    conv = parse_scalar(arguments.get("conv_dim", 0))
    if "targets" in out.fields:
        return
    if not lycoris:
        wide = bool(conv)
        blocks = str(arguments.get("train_blocks", "all")).lower()
        targets = kohya_targets(out.family, wide, modulation=is_off(arguments.get("exclude_mod", "true")))
        if blocks in ("single", "double") and out.family == "flux":
            part = r"single_transformer_blocks\.\d+\..+" if blocks == "single" else r"transformer_blocks\.\d+\..+"
            targets = [
                targets[0].replace(
                    r"((single_)?transformer_blocks|layers|noise_refiner|context_refiner)\.\d+\..+", part
                )
            ]
        out.fields["targets"] = targets
        if out.family in ("flux", "sd3") and not parse_bool(arguments.get("split_qkv", "false")):
            out.unsupported(
                "network_module", "kohya gives the fused projection q, k, v one adapter; here each has its own"
            )
    elif preset in LYCORIS_PRESETS:
        wide = LYCORIS_PRESETS[preset][0] and out.family not in FLOW
        out.fields["targets"] = lycoris_targets(out.family, preset)
        if not LYCORIS_PRESETS[preset][1]:
            out.fields["train_text_encoders"] = False
    else:
        wide = False
        out.refuse("network_args.preset", f"{for_message(arguments.get('preset'))} is a preset file of LyCORIS")
    out.mapping.setdefault("network_module", "targets")
    if wide and kind != "lora":
        rank, alpha = settings.get("network_dim", 4), settings.get("network_alpha", 1.0)
        out.fields.setdefault("conv_rank", parse_scalar(arguments.get("conv_dim") or rank) or parse_scalar(rank))
        first = arguments.get("conv_alpha") if lycoris or arguments.get("conv_alpha") else 1.0
        out.fields.setdefault("conv_alpha", parse_scalar(first or alpha) or parse_scalar(alpha))
    try:
        block_rules(out, arguments, settings, wide)
    except ValueError as error:
        out.problems.append(f"network_args.{error}")


def _lora_plus(out: Translation, arguments: Mapping[str, Any]) -> None:
    """One ratio for all; the denoiser and the text encoders may have their own there, and none where it is not set."""
    common, *own = (parse_scalar(arguments.get(name, 0)) or None for name in _LORA_PLUS)
    ratios = {"denoiser": own[0] or common, "text encoders": own[1] or common}
    if not out.fields.get("train_text_encoders"):
        ratios.pop("text encoders")
    name = next((each for each in _LORA_PLUS if not is_off(arguments.get(each))), "")
    if name and len({*ratios.values()}) > 1:
        listed = ", ".join(f"{ratio or 1} of the {part}" for part, ratio in ratios.items())
        out.refuse(f"network_args.{name}", f"{listed}: all networks share one ratio")
    elif name and any(ratios.values()):
        out.put(f"network_args.{name}", "loraplus_lr_ratio", ratios["denoiser"])


def is_lycoris(module: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the network is one of LyCORIS', and not of kohya's own."""
    return (isinstance(module, str) and module.startswith("lycoris")) or "algo" in arguments


def _dropouts(out: Translation, settings: Mapping[str, Any], arguments: Mapping[str, Any], lycoris: bool) -> None:
    """kohya's own networks drop what is between two factors; they do not read the argument that LyCORIS calls dropout."""
    theirs = "network_args.dropout" if "dropout" in arguments else "network_dropout"
    value = parse_scalar(arguments["dropout"] if "dropout" in arguments else settings.get("network_dropout") or 0)
    if lycoris and "network_dropout" in settings:
        out.fields.pop("hidden_dropout", None)
        out.mapping.pop("network_dropout", None)
    if not lycoris and "dropout" in arguments:
        out.note(theirs, "is not read by this network_module; network_dropout is")
    elif lycoris and not value and theirs in ("network_args.dropout", *settings):
        out.unset.append(theirs)
    elif lycoris and value and out.exact:
        out.refuse(theirs, f"{for_message(value)}: {_LYCORIS_DROPOUT}", "dropout")
    elif lycoris and value:
        out.unsupported(theirs, f"{_LYCORIS_DROPOUT}; set dropout or hidden_dropout")


def _network_arg(out: Translation, name: str, value: Any, algorithm: str, preset: str, lycoris: bool) -> None:
    theirs = f"network_args.{name}"
    if name == "algo" or (name == "dora_wd" and (algorithm in ("lora", "locon") or out.exact)):
        out.mapping.setdefault(theirs, "network")
    elif name in ("conv_dim", "conv_alpha") and out.exact:
        out.mapping[theirs] = "conv_rank" if name == "conv_dim" else "conv_alpha"
    elif name == "dropout":
        return  # `_dropouts` reads it
    elif name == "rank_dropout" and not lycoris and algorithm in ("lora", "locon") and parse_scalar(value):
        out.put(theirs, "rank_dropout", parse_scalar(value))
    elif name in ("conv_dim", "conv_alpha", "factor", "rs_lora"):
        ours = {"conv_dim": "conv_rank", "rs_lora": "rslora", "factor": "lokr_factor"}.get(name, name)
        if name == "factor" and algorithm != "lokr" and out.exact:
            out.note(theirs, "does not change what is trained")
        elif parse_scalar(value) and (name != "factor" or algorithm == "lokr"):
            out.put(theirs, ours, parse_scalar(value))
        else:
            out.unset.append(theirs)
    elif name == "preset":
        if out.exact:
            out.mapping[theirs] = "targets"
        else:
            choice("targets", _PRESETS)(out, theirs, value, {})
    elif name in ("network_reg_dims", "network_reg_lrs"):
        _regex_rules(out, theirs, name, value)
    elif name in _LORA_PLUS:
        out.mapping.setdefault(theirs, "loraplus_lr_ratio")  # `_lora_plus` reads them together
    elif name in _HARMLESS or (name in _LOKR_ONLY and algorithm != "lokr"):
        out.note(theirs, "does not change what is trained")
    elif name == "wd_on_output" and out.exact and not parse_bool(value):
        out.refuse(theirs, f"{for_message(value)}: {_WHY[name]}")
    elif name in ("wd_on_output", "exclude_mod") and out.exact:
        out.mapping.setdefault(theirs, "network" if name == "wd_on_output" else "targets")
    elif name == "full_matrix" and parse_bool(value) and out.exact:
        out.fields["rank"] = 2**20  # more than any factor has: both stay whole
        out.mapping[theirs] = "rank"
    elif out.exact and name in BLOCK_NAMES:
        out.mapping.setdefault(theirs, "rules")
    elif name in _CONVOLUTIONS_ONLY and out.exact and not LYCORIS_PRESETS.get(preset, (True,))[0]:
        out.note(theirs, "no convolution is trained")
    elif name in ("train_blocks", "split_qkv") and out.exact:
        out.mapping[theirs] = "targets"
    elif is_off(parse_scalar(value)) or parse_scalar(value) == "all":
        out.unset.append(theirs)
    elif out.exact:
        out.refuse(theirs, f"{for_message(value)}: {_WHY.get(name, 'is not supported')}")
    else:
        why = "use rules, with skip for what is left out" if "block" in name else "is not supported for this network"
        out.unsupported(theirs, why)


def _regex_rules(out: Translation, theirs: str, name: str, value: Any) -> None:
    ours = "rank" if name == "network_reg_dims" else "learning_rate"
    rules = {rule["pattern"]: dict(rule) for rule in out.fields.get("rules", ())}
    for each in str(value).split(","):
        pattern, _, argument = each.strip().rpartition("=")
        if not pattern:
            raise ValueError(f"expected pattern=number, got {for_message(each)}")
        rules.setdefault(pattern, {"pattern": pattern})[ours] = parse_scalar(argument)
    out.fields["rules"] = list(rules.values())
    out.mapping[theirs] = "rules"
    out.note(theirs, "its patterns are searched in dotted module names")
