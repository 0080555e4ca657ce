"""A group of tensors that name one module -> what its weight and its bias receive.

The algorithm follows from the set of roles present, never from the file:

    down up [mid]                     lora        w1_a w1_b w2_a w2_b [t1 t2]    loha
    kr_w1|kr_w1_a+b, kr_w2|...        lokr        g_a1 g_a2 g_b1 g_b2 [g_bm]     glora
    plain_weight + on_input           ia3         ia3_l                          ia3 (PEFT)
    oft_blocks (3-D / 4-D) [rescale]  oft / boft  oft_R | boft_R boft_s          PEFT oft / boft
    diff diff_b set_weight w_norm b_norm, plain weights under PEFT, norm scales  full
    vera_b vera_d                     vera
    token_rows                        rows of an embedding (PEFT trainable_token_indices)

Roles left over are orphans: half a pair, an alpha without tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inweave.adapter import (
    Boft,
    BoftIn,
    Entry,
    Full,
    Glora,
    Ia3,
    Loha,
    Lokr,
    Lora,
    Oft,
    OftIn,
    Problem,
    TokenRows,
    Vera,
)
from inweave.formats.config import PeftConfig, ends, is_true, network_args
from inweave.formats.dialects import dialect_of
from inweave.formats.grammar import is_number
from inweave.formats.group import SHARED_ROLES, Context, Group, Work, single

_ADDITIONS = frozenset(SHARED_ROLES) - {"scale"}  # a vector called scale may be a norm of its own
_LOHA = ("w1_a", "w1_b", "w2_a", "w2_b")
_GLORA = ("g_a1", "g_a2", "g_b1", "g_b2")


def classify(group: Group, context: Context, entries: list[Entry], problems: list[Problem]) -> None:
    """Append the group's entries, and a problem for whatever cannot be used."""
    work = Work(group, context)
    config = context.config_of(group)
    if config and config.targets_parameter(group.ref.name):
        problems.append(Problem("unsupported", work.take_all(), "targets a bare parameter (PEFT target_parameters)"))
        return
    if any(role.startswith("tlora_") for role in work.left):
        reason = "T-LoRA: its change depends on the timestep and cannot be merged"
        problems.append(Problem("unsupported", work.take_all(), reason))
        return
    lonely = _ADDITIONS.issuperset(work.left)  # an alpha or a magnitude, and nothing that it could belong to
    builders = (_lora, _embedding, _loha, _lokr, _glora, _oft, _oft_in, _ia3, _vera, _tokens, _full)
    for build in () if lonely else builders:
        if not work.left:
            break
        build(work, config)
    _scaled_bias(work)
    _leftovers(work, problems)
    problems.extend(work.problems)
    name = dialect_of(group.prefix, group.families, group.ref, group.has_adapter_name)
    entries.extend(Entry(ref, param, factors, keys, name) for ref, param, factors, keys in work.made)


def _lora(work: Work, config: PeftConfig | None) -> None:
    if not work.has("down", "up"):
        return
    down, up, mid = work.left["down"], work.left["up"], work.left.get("mid")
    fields, keys = work.shared(config)
    keys = work.take("down", "up", "mid") + keys
    if len(down.shape) < 2 or len(up.shape) < 2:
        work.malformed(keys, f"down {list(down.shape)} and up {list(up.shape)} must have two axes or more")
        return
    factors = Lora(down=down, up=up, mid=mid, **fields)
    if not factors.groups:
        work.malformed(keys, f"the ranks differ: down {list(down.shape)}, up {list(up.shape)}")
        return
    work.make(factors, keys)


def _embedding(work: Work, config: PeftConfig | None) -> None:
    if not work.has("emb_down", "emb_up"):
        return
    down, up = work.left["emb_down"], work.left["emb_up"]
    fields, keys = work.shared(config)
    fields["transposed"] = True
    keys = work.take("emb_down", "emb_up") + keys
    if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1]:
        work.malformed(keys, f"embedding factors {list(down.shape)} and {list(up.shape)} do not make a product")
        return
    work.make(Lora(down=down, up=up, embedding=True, **fields), keys)


def _loha(work: Work, config: PeftConfig | None) -> None:
    if not work.has(*_LOHA):
        return
    parts: dict[str, Any] = {role: work.left[role] for role in _LOHA}
    cores: dict[str, Any] = {role: work.left.get(role) for role in ("t1", "t2")}
    fields, keys = work.shared(config)
    keys = work.take(*_LOHA, "t1", "t2") + keys
    if any(len(tensor.shape) < 2 for tensor in parts.values()):
        work.malformed(keys, "LoHa factors must have two axes or more")
        return
    work.make(Loha(**parts, **cores, **fields), keys)


def _lokr(work: Work, config: PeftConfig | None) -> None:
    roles = [role for role in work.left if role.startswith("kr_")]
    if not roles:
        return
    parts: dict[str, Any] = {role.removeprefix("kr_"): work.left[role] for role in roles}
    if "t1" in parts or not Lokr(**parts).complete():
        return
    fields, keys = work.shared(config)
    keys = work.take(*roles) + keys
    if any(len(tensor.shape) < 2 for tensor in parts.values()):
        work.malformed(keys, "LoKr factors must have two axes or more")
        return
    factors = Lokr(**parts, **fields)
    if config and config.peft_type == "LOKR":
        factors = replace(factors, nominal_rank=config.rank_of(work.config_name()))
    elif factors.rank is None and factors.alpha:
        dim = work.context.metadata.get("ss_network_dim", "")
        if is_number(dim) and int(dim) > 0 and factors.alpha != int(dim) and int(dim) < 10_000:
            factors = replace(factors, nominal_rank=int(dim))
            work.context.warn(f"LoKr with two full factors and alpha != dim: scaled by alpha / {dim} (ss_network_dim)")
    work.make(factors, keys)


def _glora(work: Work, config: PeftConfig | None) -> None:
    if not work.has(*_GLORA):
        return
    parts: dict[str, Any] = {
        role.removeprefix("g_"): work.left[role] for role in (*_GLORA, "g_bm") if role in work.left
    }
    fields, keys = work.shared(config)
    keys = work.take(*_GLORA, "g_bm") + keys
    if is_true(network_args(work.context.metadata).get("rs_lora")) or is_true(work.context.metadata.get("rs_lora")):
        fields["rslora"] = True  # the one LyCORIS algorithm that does not fold it into the saved alpha
    factors = Glora(**parts, **fields)
    if any(len(tensor.shape) < 2 for tensor in parts.values()) or not (factors.layouts or factors.bm):
        work.malformed(keys, f"shapes fit no GLoRA layout: { {k: list(v.shape) for k, v in parts.items()} }")
        return
    if len(factors.layouts) > 1 and factors.rank == factors.a1.shape[0] == factors.a1.shape[1]:
        work.context.warn("GLoRA: the shapes fit both layouts; the newer one is used")
    work.make(factors, keys)


def _oft(work: Work, config: PeftConfig | None) -> None:
    """kohya stores one tensor a fused part (`oft_blocks.<i>`) under a single constraint."""
    numbered = sorted((role for role in work.left if role.startswith("oft_blocks.")), key=lambda r: int(r[11:]))
    whole = [role for role in ("oft_blocks", "oft_diag") if role in work.left]
    if not numbered and not whole:
        return
    fields, keys = work.shared(config, constraint=True)
    rescale = work.left.get("rescale")
    extra = work.take("rescale") + keys
    for role in (*whole, *numbered):
        blocks = work.left[role]
        part = int(role[11:]) if role.startswith("oft_blocks.") else None
        keys_of_part = work.take(role) + extra
        if len(blocks.shape) == 4:
            work.make(Boft(blocks=blocks, rescale=rescale, **fields), keys_of_part, part=part)
        elif len(blocks.shape) == 3 and blocks.shape[1] == blocks.shape[2]:
            work.make(Oft(blocks=blocks, rescale=rescale, solved=role == "oft_diag", **fields), keys_of_part, part=part)
        else:
            work.malformed(
                keys_of_part, f"OFT blocks of shape {list(blocks.shape)}; (n, b, b) or (m, n, b, b) was expected"
            )


def _oft_in(work: Work, config: PeftConfig | None) -> None:
    if work.has("oft_R"):
        blocks, spread = work.left["oft_R"], work.left.get("scaled_oft")
        fields, keys = work.shared(config, constraint=True)
        keys = work.take("oft_R", "scaled_oft") + keys
        if len(blocks.shape) != 2 or not blocks.shape[1]:
            work.malformed(keys, f"oft_R has shape {list(blocks.shape)}; (blocks, b(b-1)/2) was expected")
            return
        if config and config.constrained:
            work.problems.append(Problem("unsupported", keys, "constrained OFT (PEFT coft=true)"))
            return
        share = config.block_share if config else False
        terms = config.neumann_terms if config else 5
        work.make(OftIn(blocks=blocks, share=share, neumann_terms=terms, spread=spread, **fields), keys)
    if work.has("boft_R", "boft_s"):
        blocks, out_scale = work.left["boft_R"], work.left["boft_s"]
        fields, keys = work.shared(config, constraint=True)
        keys = work.take("boft_R", "boft_s") + keys
        if len(blocks.shape) != 4:
            work.malformed(keys, f"boft_R has shape {list(blocks.shape)}; (m, n, b, b) was expected")
            return
        work.make(BoftIn(blocks=blocks, out_scale=out_scale, **fields), keys)
    if work.has("oft_r"):
        work.problems.append(
            Problem("unsupported", work.take_all(), "OFT as PEFT wrote it before 0.16; save it again with a newer PEFT")
        )


def _ia3(work: Work, config: PeftConfig | None) -> None:
    if work.has("plain_weight", "on_input"):
        vector, flag = work.left["plain_weight"], work.left["on_input"]
        keys = work.take("plain_weight", "on_input")
        number = single(flag)
        if number is None:
            work.malformed(keys, f"on_input is {flag}; one number was expected")
            return
        on_input = bool(number)
        work.make(Ia3(vector=vector, on_input=on_input, convention="offset", stored_on_input=flag), keys)
    if work.has("ia3_l"):
        vector = work.left["ia3_l"]
        keys = work.take("ia3_l")
        shape = vector.shape
        on_input = config.is_feedforward(work.config_name()) if config else len(shape) > 1 and shape[0] == 1
        transposed = config.fan_in_fan_out if config else False
        made = Ia3(vector=vector, on_input=on_input, convention="factor", transposed=transposed)
        work.make(made, keys)
        if not on_input:  # PEFT scales the layer's output, so the bias as well; skipped where there is none
            work.make(replace(made, transposed=False), keys, param="bias?")


def _vera(work: Work, config: PeftConfig | None) -> None:
    if not work.has("vera_b", "vera_d"):
        return
    shared, (down, up) = work.context.shared, work.context.projections()
    lambda_b, lambda_d = work.left["vera_b"], work.left["vera_d"]
    keys = work.take("vera_b", "vera_d")
    if down is None or up is None:
        reason = (
            "VeRA saved without its projections (save_projection=false): they cannot be made again from a seed here"
        )
        work.problems.append(Problem("unsupported", keys, reason))
        return
    work.context.used_shared.update((down, up))
    transposed = config.fan_in_fan_out if config else False
    made = Vera(lambda_b=lambda_b, lambda_d=lambda_d, down=shared[down], up=shared[up], transposed=transposed)
    work.make(made, (*keys, down, up))


def _tokens(work: Work, config: PeftConfig | None) -> None:
    if not work.has("token_rows"):
        return
    value = work.left["token_rows"]
    keys = work.take("token_rows")
    tables = config.token_indices if config else {}
    names = [name for name in (*ends(work.config_name()), "") if name in tables]
    if not names:
        reason = "trained tokens, but no adapter_config.json names their ids (trainable_token_indices)"
        work.problems.append(Problem("unsupported", keys, f"{work.group.ref}: {reason}"))
        return
    indices = tables[names[0]]
    if len(value.shape) != 2 or value.shape[0] != len(indices):
        work.malformed(keys, f"{list(value.shape)} for {len(indices)} tokens; one row per token was expected")
        return
    work.make(TokenRows(value=value, indices=indices), keys)


def _full(work: Work, config: PeftConfig | None) -> None:
    left = work.left
    for role, param, mode, norm in (
        ("diff", "weight", "add", False),
        ("diff_b", "bias", "add", False),
        ("w_norm", "weight", "add", True),
        ("b_norm", "bias", "add", True),
        ("set_weight", "weight", "set", False),
        ("set_bias", "bias", "set", False),
    ):
        if role in left:
            fields: dict[str, Any] = {}
            keys: tuple[str, ...] = ()
            if role == "diff":  # a full difference may be decomposed, and may stand on a widened base
                shared, keys = work.shared(None)
                fields = {
                    name: shared[name] for name in ("magnitude", "widen", "alpha", "stored_alpha") if name in shared
                }
            value = left[role]
            work.make(
                Full(value=value, mode="set" if mode == "set" else "add", norm=norm, **fields),
                work.take(role) + keys,
                param,
            )
    if "diff_modulation" in left:  # named by its block: the table of shifts and scales in it is a bare parameter
        value, ref = left["diff_modulation"], work.group.ref
        name = f"{ref.name}_modulation" if ref.flat else f"{ref.name}.modulation"
        work.made.append(
            (replace(ref, name=name), "weight", Full(value=value, mode="add"), work.take("diff_modulation"))
        )
    if "scale" in left and left["scale"].numel > 1:
        work.make(Full(value=left["scale"], mode="set"), work.take("scale"), "scale")
    if "inner_bias" in left:
        work.make(Full(value=left["inner_bias"], mode="set", inside=True), work.take("inner_bias"), "bias")
    whole = work.context.peft is not None or work.group.prefix == "peft" or "peft" in work.group.families
    for role, param in (("plain_weight", "weight"), ("plain_bias", "bias")):
        if role in left and whole:
            work.make(Full(value=left[role], mode="set"), work.take(role), param)


def _scaled_bias(work: Work) -> None:
    """`lora_B.bias` is scaled like the LoRA it belongs to."""
    if not work.has("up_bias"):
        return
    lora = next((factors for _, _, factors, _ in work.made if isinstance(factors, Lora)), None)
    if lora is None:
        return
    value = work.left["up_bias"]
    made = Full(value=value, bias_rank=lora.rank, alpha=lora.alpha, stored_scale=lora.stored_scale, rslora=lora.rslora)
    work.make(made, work.take("up_bias"), "bias")


_PARTNERS = {
    "down": "lora_up is missing", "up": "lora_down is missing", "mid": "lora_up and lora_down are missing",
    "emb_down": "lora_embedding_B is missing", "emb_up": "lora_embedding_A is missing",
    "alpha": "an alpha without tensors", "scale": "a scale without tensors",
    "dora_scale": "a DoRA magnitude without factors", "magnitude": "a DoRA magnitude without factors",
    "on_input": "the (IA)^3 vector is missing", "plain_weight": "a plain weight, not an adapter tensor",
    "plain_bias": "a plain bias, not an adapter tensor", "up_bias": "a LoRA bias without its LoRA",
    "boft_R": "boft_s is missing", "boft_s": "boft_R is missing",
}  # fmt: skip


def _leftovers(work: Work, problems: list[Problem]) -> None:
    if not work.left:
        return
    roles = [role for role in work.left if role not in SHARED_ROLES] or list(work.left)
    reason = "; ".join(dict.fromkeys(_PARTNERS.get(role, f"{role} is part of an incomplete set") for role in roles))
    fault = "unknown" if set(work.left) <= {"plain_weight", "plain_bias"} else "orphan"
    problems.append(Problem(fault, work.take_all(), f"{work.group.ref}: {reason}"))  # type: ignore[arg-type]
