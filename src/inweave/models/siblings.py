"""Which layers of a denoiser read one input, and how blocks ask for their outputs.

    attention          queries, keys and values of one stream
    cross attention    keys and values of all blocks of a UNet: the text is the same tensor for all of them

In a network whose blocks are fused (`inweave.models.fused.blocks`), which call `project`:

    stack_siblings    layers with adapters that are trained    `inweave.layers.siblings`
    join_siblings     plain layers, to generate with           `inweave.layers.joined`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from inweave.layers import LoraLayer
from inweave.layers.joined import JoinedLinear, Member, joined
from inweave.layers.siblings import SharedOutputs, SharedSiblings, Siblings, stacked

#: of one attention module
_STREAMS = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


Group = Siblings | JoinedLinear


class JoinedText(JoinedLinear, SharedOutputs):
    """Keys and values of several blocks for one text, without adapters."""


T = TypeVar("T", SharedSiblings, JoinedText)


class ProjectsSiblings:
    """A mixin for attention modules that call `project` or `project_at_once`."""

    siblings: dict[str, Group] = {}  # noqa: RUF012  replaced, never changed
    projects_siblings = True


class TextProjections(NamedTuple):
    """Where a cross attention finds its keys and values."""

    group: SharedSiblings | JoinedText
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


def join_siblings(network: nn.Module) -> int:
    """Let plain layers of one input, without adapters, share a product; returns how many do."""
    groups: list[JoinedLinear] = []
    for module in network.modules():
        if getattr(module, "projects_siblings", False):
            streams = {names[0]: joined(JoinedLinear, [Member(module, name) for name in names]) for names in _STREAMS}
            own = {name: group for name, group in streams.items() if group is not None}
            module.siblings = own  # type: ignore[assignment]
            groups += own.values()
    if getattr(network, "shares_text", False):
        groups += _join_text(network)
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
    return _text_groups(
        network, readers.values(), lambda layers: stacked(SharedSiblings, [each.layer for each in layers])
    )


def _join_text(network: nn.Module) -> list[JoinedText]:
    readers: dict[tuple[int, ...], list[Any]] = {}
    for module in network.modules():
        if getattr(module, "reads_text", False) and type(module.to_k) is nn.Linear:
            readers.setdefault(tuple(module.to_k.weight.shape), []).append(module)
    return _text_groups(network, readers.values(), lambda layers: joined(JoinedText, layers))


def _text_groups(network: nn.Module, readers: Iterable[list[Any]], make: Callable[[list[Member]], T | None]) -> list[T]:
    """Let the cross attentions of each list find their keys and values in one product, where they can share it."""
    groups: dict[str, T] = {}
    for modules in readers:
        group = make([Member(module, name) for module in modules for name in ("to_k", "to_v")])
        if group is not None:
            groups[f"text {len(groups)}"] = group
            for at, module in enumerate(modules):
                module.text = TextProjections(group, 2 * at, 2 * at + 1)
    network.siblings = groups  # type: ignore[assignment]
    return list(groups.values())


def _shapes(layer: LoraLayer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in (layer.weight, *layer.acting[0][0].roles().values()))
