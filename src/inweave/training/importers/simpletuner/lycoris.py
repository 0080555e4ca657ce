"""SimpleTuner's file for LyCORIS.

{algo, linear_dim, linear_alpha, factor, apply_preset: {target_module, module_algo_map}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.checked import for_message
from inweave.training.config.network_args import DORA_BYPASS, DORA_NORM, LOKR_BYPASS, refuse_dropped_norms
from inweave.training.config.translate import Translation
from inweave.training.config.values import is_off, names, normalize_name, number_or, parse_int, parse_number
from inweave.training.importers.targets import FLOW

#: classes of diffusers' modules, as LyCORIS names its targets
_CLASSES = {
    "Attention": r".*attn\d?\..+", "FeedForward": r".*ff(_context)?\..+",
    "Transformer2DModel": r".*attentions\.\d+\..+", "ResnetBlock2D": r".*resnets\.\d+\..+",
    "Downsample2D": r".*downsamplers\.\d+\..+", "Upsample2D": r".*upsamplers\.\d+\..+",
    "JointTransformerBlock": r"transformer_blocks\.\d+\..+", "FluxTransformerBlock": r"transformer_blocks\.\d+\..+",
    "FluxSingleTransformerBlock": r"single_transformer_blocks\.\d+\..+",
    "Flux2TransformerBlock": r"transformer_blocks\.\d+\..+",
    "Flux2SingleTransformerBlock": r"single_transformer_blocks\.\d+\..+",
    "QwenImageTransformerBlock": r"transformer_blocks\.\d+\..+", "ZImageTransformerBlock": r"layers\.\d+\..+",
}  # fmt: skip
#: options of LyCORIS that are read, or change only how it computes
_READ = names(
    "algo linear_dim linear_alpha factor apply_preset full_matrix bypass_mode train_norm use_tucker "
    "module_dropout rank_dropout decompose_both"
)
_AT = "lycoris_config"


def put_lycoris(out: Translation, table: Mapping[str, Any]) -> None:
    """Set the algorithm, its ranks and the modules it adapts."""
    fields = out.fields
    algorithm = normalize_name(table.get("algo", "lokr"))
    if algorithm not in ("lora", "locon", "loha", "lokr"):
        out.refuse(f"{_AT}.algo", f"{for_message(table.get('algo'))} is not supported")
        return
    fields["network"] = algorithm
    fields["rank"] = 2**20 if not is_off(table.get("full_matrix")) else parse_int(table.get("linear_dim") or 4)
    fields["alpha"] = number_or(table.get("linear_alpha"), 1) or None  # 0 is the rank
    preset = _table(table, "apply_preset")
    _put_modules(out, table, preset, algorithm)
    if not is_off(table.get("dora_wd", table.get("weight_decompose"))) and algorithm in ("lora", "locon"):
        fields["network"] = "dora"
        if not is_off(table.get("bypass_mode")):
            out.refuse(f"{_AT}.bypass_mode", DORA_BYPASS)
        out.unsupported(f"{_AT}.dora_wd", DORA_NORM)
    for theirs, ours in (("rs_lora", "rslora"), ("train_norm", "train_norm"), ("use_tucker", "tucker")):
        if not is_off(table.get(theirs)):
            fields[ours] = True
    if fields.get("train_norm") and out.family in FLOW:
        out.refuse(f"{_AT}.train_norm", "no LayerNorm or GroupNorm of this model has weights")
    if fields.get("tucker") and fields["network"] in ("lora", "dora"):
        out.refuse(f"{_AT}.use_tucker", f"{for_message(fields['network'])} has no Tucker core")
    if not is_off(table.get("module_dropout")):
        fields["module_dropout"] = parse_number(table["module_dropout"])
    if not is_off(table.get("rank_dropout")) and algorithm == "lokr" and not is_off(table.get("bypass_mode")):
        out.note(f"{_AT}.rank_dropout", LOKR_BYPASS)
    elif not is_off(table.get("rank_dropout")) and algorithm in ("loha", "lokr"):
        fields["rank_dropout"] = parse_number(table["rank_dropout"])
    elif not is_off(table.get("rank_dropout")) and is_off(table.get("bypass_mode")):
        fields["output_dropout"] = parse_number(table["rank_dropout"])
    elif not is_off(table.get("rank_dropout")):
        why = "with bypass_mode LyCORIS drops ranks without scaling the others"
        out.refuse(f"{_AT}.rank_dropout", f"{for_message(table['rank_dropout'])}: {why}")
    if not is_off(table.get("decompose_both")) and algorithm == "lokr":
        if is_off(table.get("full_matrix")):
            fields["lokr_decompose_both"] = True
        else:
            why = "with full_matrix, LoKr has a rank of its smaller factor only"
            out.refuse(f"{_AT}.decompose_both", why)
    refuse_dropped_norms(out, f"{_AT}.train_norm")
    for key, value in table.items():
        doubled = key in ("dora_wd", "weight_decompose", "rs_lora") and algorithm in ("lora", "locon")
        plain = key in _READ or doubled or is_off(value) or (key == "multiplier" and parse_number(value) == 1)
        if not plain:
            out.refuse(f"{_AT}.{key}", f"{for_message(value)}: is not supported")
    for key in preset:
        if key not in ("target_module", "target_name", "module_algo_map") and not is_off(preset[key]):
            out.refuse(f"{_AT}.apply_preset.{key}", f"{for_message(preset[key])}: is not supported")
    fields |= {"train_text_encoders": False, "dropout": 0.0}
    out.mapping[_AT] = "network"


def _put_modules(out: Translation, table: Mapping[str, Any], preset: Mapping[str, Any], algorithm: str) -> None:
    """Set the targets; options of single classes of modules are refused, but for one LoKr factor."""
    modules = preset.get("target_module") or ["Attention", "FeedForward"]
    own = {str(name): each for name, each in _table(preset, "module_algo_map").items()}
    factors = {parse_int(_table(own, each).get("factor", table.get("factor", -1))) for each in modules}
    if len(factors) > 1:
        out.refuse(f"{_AT}.apply_preset.module_algo_map", "all modules share one LoKr factor")
    for name in own:
        for key, value in _table(own, name).items():
            same = {"algo": algorithm, "dim": table.get("linear_dim"), "alpha": table.get("linear_alpha")}.get(key)
            if key != "factor" and (normalize_name(value) if key == "algo" else value) != same:
                where = f"{_AT}.apply_preset.module_algo_map.{name}.{key}"
                out.refuse(where, f"{for_message(value)}: all modules are alike")
    if algorithm == "lokr":
        out.fields["lokr_factor"] = factors.pop()
    unknown = [each for each in modules if each not in _CLASSES]
    if unknown or preset.get("target_name"):
        name = for_message(unknown or preset.get("target_name"))
        out.refuse(f"{_AT}.apply_preset", f"{name}: modules of an unknown class")
    else:
        out.fields["targets"] = ["|".join(_CLASSES[each] for each in modules)]


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = table.get(name)
    return inner if isinstance(inner, Mapping) else {}
