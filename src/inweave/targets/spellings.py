"""Further names under which a file may mean a module: wrappers left in front, a parameter's name left behind, fused
leaves.

    model.blocks.0.attn.to_q               a wrapper that the grammar cannot tell from a model's own root
    img_attn.norm.query_norm.scale         a parameter, where the module is query_norm
    attn.to_qkv                            rows of to_q, to_k, to_v of the same attention, in this order

They are tried only after the name itself, so a model whose modules really have these names is never misread.
"""

from __future__ import annotations

from collections.abc import Iterator

#: roots of wrappers, none of which is the root of a known network
_ROOTS = (
    "text_model", "language_model", "diffusion_model", "transformer", "denoiser", "model",
    "module", "unet", "dit", "net", "pipe",
)  # fmt: skip
_PARAMS = ("scale", "weight")
_MOST = 8  # wrappers that may be nested

#: a fused projection -> the leaves of the same attention whose rows it stacks, in order
FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ("add_qkv_proj", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ("to_added_kv", ("add_k_proj", "add_v_proj")),
    ("add_kv_proj", ("add_k_proj", "add_v_proj")),
    ("to_qkv", ("to_q", "to_k", "to_v")),
    ("to_kv", ("to_k", "to_v")),
)


def alternatives(name: str, *, flat: bool, any_root: bool) -> Iterator[str]:
    """Yield other names of the same module, the likeliest first.

    ``any_root``: the network is known by its own names only, so a dotted path may have extra leading segments.
    """
    mark = "_" if flat else "."
    names = [name]
    while len(names) <= _MOST and (rest := _without_root(names[-1], mark)):
        names.append(rest)
    yield from names[1:]
    for each in names:
        param = next((param for param in _PARAMS if each.endswith(mark + param)), None)
        if param is not None:
            yield each[: -len(param) - 1]
    if any_root and not flat:
        yield f"transformer.{name}"  # a language model's own root, which a key spells like a pipeline's component
        for _ in range(min(_MOST, name.count(".") - 1)):
            name = name.partition(".")[2]
            yield name


def _without_root(name: str, mark: str) -> str:
    root = next((root for root in _ROOTS if name.startswith(root + mark)), None)
    rest = name[len(root) + 1 :] if root else ""
    return "" if root == "transformer" and rest.startswith("blocks_") else rest  # `transformer_blocks_0` is a name


def fused_leaves(name: str) -> tuple[str, ...]:
    """Return the names of the modules a fused projection stacks, empty if ``name`` is not such a projection."""
    for leaf, parts in FUSED:
        if name.endswith((f".{leaf}", f"_{leaf}")):
            stem = name[: -len(leaf)]
            return tuple(stem + part for part in parts)
    return ()
