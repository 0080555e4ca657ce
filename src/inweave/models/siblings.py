"""Which LoRA layers of a denoiser read one input, and how blocks ask for their outputs (`inweave.layers.siblings`).

    attention          queries, keys and values of one stream
    cross attention    keys and values of all blocks of a UNet: the text is the same tensor for all of them

`stack_siblings` finds them in a network with adapters whose blocks are fused (`inweave.models.fused.blocks`), which
call `project`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from inweave.layers import LoraLayer
from inweave.layers.siblings import SharedSiblings, Siblings, stacked

#: of one attention module
_STREAMS = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


class ProjectsSiblings:
    """A mixin for attention modules that call `project` or `project_at_once`."""

    siblings: dict[str, Siblings] = {}  # noqa: RUF012  replaced, never changed
    projects_siblings = True


class TextProjections(NamedTuple):
    """Where a cross attention finds its keys and values."""

    group: SharedSiblings
    keys: int
    values: int


def stack_siblings(network: nn.Module, *, across: bool = True) -> int:
    """Let layers of one input share a product; returns how many do. ``across``: also layers of several blocks."""
    groups: list[Siblings] = []
    for module in network.modules():
        if getattr(module, "projects_siblings", False):
            streams = {names[0]: [getattr(module, name, None) for name in names] for names in _STREAMS}
            products = {name: stacked(Siblings, layers) for name, layers in streams.items()}
            own = {name: group for name, group in products.items() if group is not None}
            module.siblings = own  # type: ignore[assignment]
            groups += own.values()
    if across and getattr(network, "shares_text", False):
        groups += _stack_text(network)
    return sum(group.count for group in groups)


def unstack_siblings(network: nn.Module) -> None:
    """Let every layer compute separately again; its weight stays in the joint tensor."""
    for module in network.modules():
        module.__dict__.pop("siblings", None)
        module.__dict__.pop("text", None)


def project(attention: nn.Module, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, ...]:
    """Outputs of the layers with these names for one input."""
    group = getattr(attention, "siblings", {}).get(names[0])
    outputs = None if group is None else group.outputs(x)
    return tuple(getattr(attention, name)(x) for name in names) if outputs is None else outputs


def project_at_once(attention: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor | None:
    """Return the outputs in one tensor (..., layers, columns); None if the layers compute separately."""
    group = getattr(attention, "siblings", {}).get(names[0])
    return None if group is None else group.product(x)


@contextmanager
def shared_text(network: Any, text: Tensor | None) -> Iterator[None]:
    """Share this tensor with the cross attentions, which look up their keys and values for it inside the block."""
    groups = network.siblings.values() if text is not None else ()
    try:
        for group in groups:
            group.share(text)
        yield
    finally:
        for group in groups:
            group.forget()


def _stack_text(network: nn.Module) -> list[SharedSiblings]:
    readers: dict[tuple[tuple[int, ...], ...], list[Any]] = {}
    layers: Any
    for module in network.modules():
        if getattr(module, "reads_text", False):
            layers = module.to_k, module.to_v
            if all(isinstance(layer, LoraLayer) and len(layer.acting) == 1 for layer in layers):
                readers.setdefault(_shapes(layers[0]), []).append(module)
    groups = {}
    for shapes, modules in readers.items():
        layers = [layer for module in modules for layer in (module.to_k, module.to_v)]
        group = stacked(SharedSiblings, layers)
        if group is not None:
            groups[f"text {shapes}"] = group
            for at, module in enumerate(modules):
                module.text = TextProjections(group, 2 * at, 2 * at + 1)
    network.siblings = groups  # type: ignore[assignment]
    return list(groups.values())


def _shapes(layer: LoraLayer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in (layer.weight, *layer.acting[0][0].roles().values()))
