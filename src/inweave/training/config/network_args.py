"""network_module and network_args of kohya's scripts, which together name an algorithm and its options.

    networks.lora, lora_flux, lora_sd3   LoRA; with conv_dim LoCon
    lycoris.kohya                        algo = locon | lora, loha, lokr; dora_wd; preset = full | attn-mlp | ...

Other modules and algorithms (iA3, OFT, GLoRA, DyLoRA, full) cannot be expressed here, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from inweave.checked import for_message
from inweave.training.config import row
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, names, normalize_name, parse_bool, parse_pairs, parse_scalar

_ALGORITHMS = ("lora", "locon", "loha", "lokr")
_PRESETS = {"full": "all", "attnmlp": "attention-mlp", "unettransformeronly": "attention-mlp", "attnonly": "attention"}
_MODULES = ("networks.lora", "networks.loha", "networks.lokr", "lycoris")
#: modules of the same beginning that are other algorithms
_OTHERS = ("networks.lora_fa", "networks.lora_hunyuan", "networks.lora_lumina", "networks.lora_anima")
#: options of algorithms that are not used, or of how they compute
_HARMLESS = names(
    "verbose bypass_mode block_size constraint constrain unit train_on_input dora_oft loraplus_groups rescaled "
    "disable_conv_cp"
)
#: options of LoKr that the other algorithms do not read
_LOKR_ONLY = ("factor", "full_matrix", "decompose_both", "unbalanced_factorization")
#: names of a Tucker core, and the networks that have one
TUCKER: Final = ("use_tucker", "use_cp", "use_conv_cp")
_CORES = ("locon", "loha", "lokr")
_LORA_PLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
LYCORIS_DROPOUT: Final = "LyCORIS drops the adapter's outputs, or nothing, by its version and bypass_mode"
DORA_NORM: Final = "LyCORIS trains through the norm of a changed weight; here it is constant, as in PEFT"
DORA_BYPASS: Final = "with bypass_mode LyCORIS leaves the magnitudes of dora_wd out of what it trains"
LOKR_BYPASS: Final = "with bypass_mode LyCORIS ignores it for LoKr"
NO_CHANGE: Final = "does not change what is trained"


@dataclass(frozen=True, slots=True)
class NetworkArgs:
    """A network module with its arguments; names are without case and punctuation."""

    module: str
    arguments: Mapping[str, Any]

    @property
    def is_lycoris(self) -> bool:
        """Whether the network is one of LyCORIS', and not of kohya's own."""
        return self.module.startswith("lycoris") or "algo" in self.arguments

    @property
    def conv_rank(self) -> Any:
        """Rank of convolutions; 0 if they are not adapted."""
        return parse_scalar(self.arguments.get("conv_dim", 0))

    @property
    def algorithm(self) -> str:
        """The algorithm that is named or implied, known here or not."""
        own = (
            normalize_name(self.module.rpartition(".")[2]) if self.module in ("networks.loha", "networks.lokr") else ""
        )
        return normalize_name(
            self.arguments.get("algo", own or ("locon" if self.conv_rank or self.is_lycoris else "lora"))
        )

    @property
    def preset(self) -> str:
        """LyCORIS' preset of modules."""
        return normalize_name(self.arguments.get("preset", "full"))

    @property
    def decomposes(self) -> bool:
        """Whether weights are decomposed (DoRA)."""
        return parse_bool(self.arguments.get("dora_wd", "false"))

    @property
    def bypasses(self) -> bool:
        """Whether LyCORIS adds outputs instead of weights, and so drops ranks instead of outputs."""
        return parse_bool(self.arguments.get("bypass_mode") or "false")

    @property
    def keeps_whole(self) -> bool:
        """Whether the larger factor of LoKr is whole at any rank."""
        return parse_bool(self.arguments.get("full_matrix") or "false")


def parse_network(out: Translation) -> NetworkArgs | None:
    """Return the network; None if its arguments cannot be parsed, which is a problem."""
    value = out.get("network_module")
    module = value[:100] if isinstance(value, str) else for_message(value) if value else ""
    try:
        network = NetworkArgs(module, parse_pairs(out.get("network_args") or []))
    except ValueError as error:
        out.problems.append(f"network_args: {error}")
        return None
    if "network_module" in out.settings:
        out.mapping["network_module"] = "network"
    return network


def put_algorithm(out: Translation, network: NetworkArgs, kind_of: Callable[[Translation, NetworkArgs], str]) -> None:
    """Set our algorithm, as ``kind_of`` names it; refuse others."""
    if network.algorithm not in _ALGORITHMS:
        name = for_message(network.arguments["algo"])
        out.refuse("network_args.algo", f"{name} is not supported, only lora, locon, loha, lokr", "network")
    elif network.module and (not network.module.startswith(_MODULES) or network.module.startswith(_OTHERS)):
        out.refuse("network_module", f"{for_message(network.module)} is not supported", "network")
    else:
        kind = kind_of(out, network)
        out.put("network_args.algo" if "algo" in network.arguments else "network_module", "network", kind)


def put_arguments(
    out: Translation, network: NetworkArgs, read: Callable[[Translation, NetworkArgs, str, Any], None]
) -> None:
    """Translate every argument with ``read``."""
    for name, argument in network.arguments.items():
        try:
            read(out, network, name, argument)
        except ValueError as error:
            out.problems.append(f"network_args.{name}: {error}")


def read_network(out: Translation) -> None:
    """Set algorithm, modules and options where kohya's names are used for ours."""
    if not out.get("network_module") and not out.get("network_args"):
        return
    if (network := parse_network(out)) is None:
        return
    put_algorithm(out, network, _kind)
    if not network.is_lycoris and network.module and "targets" not in out.settings:
        out.put("network_module.targets", "targets", "attention-mlp")
    put_lora_plus(out, network)
    if dropout := dropout_of_lycoris(out, network):
        out.unsupported(dropout[0], f"{LYCORIS_DROPOUT}; set dropout or hidden_dropout")
    put_arguments(out, network, _argument)


def _kind(out: Translation, network: NetworkArgs) -> str:
    kind = "locon" if network.algorithm == "lora" and network.conv_rank else network.algorithm
    return "dora" if network.decomposes and kind in ("lora", "locon") else kind


def put_lora_plus(out: Translation, network: NetworkArgs) -> None:
    """Set LoRA+'s ratio; kohya's denoiser and text encoders may have their own, all networks share one here."""
    common, *own = (parse_scalar(network.arguments.get(name, 0)) or None for name in _LORA_PLUS)
    ratios = {"denoiser": own[0] or common, "text encoders": own[1] or common}
    if not out.fields.get("train_text_encoders"):
        ratios.pop("text encoders")
    name = next((each for each in _LORA_PLUS if not is_off(network.arguments.get(each))), "")
    if name and len({*ratios.values()}) > 1:
        listed = ", ".join(f"{ratio or 1} of the {part}" for part, ratio in ratios.items())
        out.refuse(f"network_args.{name}", f"{listed}: all networks share one ratio")
    elif name and any(ratios.values()):
        out.put(f"network_args.{name}", "loraplus_lr_ratio", ratios["denoiser"])


def dropout_of_lycoris(out: Translation, network: NetworkArgs) -> tuple[str, Any] | None:
    """Return LyCORIS' dropout, with its name; kohya's own networks have network_dropout, between two factors."""
    own = "dropout" in network.arguments
    theirs = "network_args.dropout" if own else "network_dropout"
    value = parse_scalar(network.arguments["dropout"] if own else out.get("network_dropout") or 0)
    if network.is_lycoris and "network_dropout" in out.settings:
        out.fields.pop("hidden_dropout", None)
        out.mapping.pop("network_dropout", None)
    if not network.is_lycoris and own:
        out.note(theirs, "is not read by this network_module; network_dropout is")
    elif network.is_lycoris and not value and theirs in ("network_args.dropout", *out.settings):
        out.unset.append(theirs)
    return (theirs, value) if network.is_lycoris and value else None


def refuse_dropped_norms(out: Translation, theirs: str) -> None:
    """Refuse a run of LyCORIS that drops differences of norms: those here always act."""
    names = ("module_dropout", "rank_dropout", "output_dropout")
    dropouts = [name for name in names if out.fields.get(name)]
    if out.fields.get("train_norm") and dropouts:
        out.refuse(theirs, f"with {' and '.join(dropouts)}, LyCORIS drops the differences of norms too")


def read_argument(out: Translation, network: NetworkArgs, name: str, value: Any) -> bool:
    """Translate an argument that means the same in a configuration and in an import; return whether it is one."""
    theirs, scalar = f"network_args.{name}", parse_scalar(value)
    pair = network.algorithm in ("lora", "locon")
    if name == "rank_dropout" and network.is_lycoris and network.algorithm == "lokr" and network.bypasses and scalar:
        out.note(theirs, LOKR_BYPASS)
    elif name == "rank_dropout" and network.is_lycoris != pair and not network.decomposes and scalar:
        out.put(theirs, "rank_dropout", scalar)
    elif name == "rank_dropout" and network.is_lycoris and pair and scalar and not network.bypasses:
        out.put(theirs, "output_dropout", scalar)
    elif name == "decompose_both" and network.algorithm == "lokr" and parse_bool(value) and not network.keeps_whole:
        out.put(theirs, "lokr_decompose_both", True)
    elif name == "rank_dropout_scale" and is_off(parse_scalar(network.arguments.get("rank_dropout", 0))):
        out.note(theirs, "only used with rank_dropout")
    elif name == "module_dropout" and (network.is_lycoris or pair) and scalar:
        out.put(theirs, "module_dropout", scalar)
    elif name in TUCKER and network.is_lycoris and parse_bool(value) and out.fields.get("network") in _CORES:
        out.put(theirs, "tucker", True)
    elif name == "train_norm" and network.is_lycoris and parse_bool(value):
        out.put(theirs, "train_norm", True)
    elif name in ("conv_dim", "conv_alpha", "factor", "rs_lora"):
        ours = {"conv_dim": "conv_rank", "rs_lora": "rslora", "factor": "lokr_factor"}.get(name, name)
        used = scalar and (name != "factor" or network.algorithm == "lokr")
        out.put(theirs, ours, scalar) if used else out.unset.append(theirs)
    elif name in ("network_reg_dims", "network_reg_lrs"):
        _regex_rules(out, theirs, name, value)
    elif name in _LORA_PLUS:
        out.mapping.setdefault(theirs, "loraplus_lr_ratio")  # `put_lora_plus` reads them together
    elif name in _HARMLESS or (name in _LOKR_ONLY and network.algorithm != "lokr"):
        out.note(theirs, NO_CHANGE)
    else:
        return name == "dropout"  # read before
    return True


def _argument(out: Translation, network: NetworkArgs, name: str, value: Any) -> None:
    theirs = f"network_args.{name}"
    if name == "algo" or (name == "dora_wd" and network.algorithm in ("lora", "locon")):
        out.mapping.setdefault(theirs, "network")
    elif name == "preset":
        row.choice("targets", _PRESETS).read(out, theirs, value)
    elif read_argument(out, network, name, value):
        return
    elif is_off(parse_scalar(value)) or parse_scalar(value) == "all":
        out.unset.append(theirs)
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
