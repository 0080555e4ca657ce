"""Which kind of layer a module is: torch's own classes, transformers' Conv1D, and what a user registers.

    register_layer(MyLinear, kind="linear")                          the same mathematics, and perhaps more around it
    register_layer(InOut, kind=LinearKind(transposed=True))          its weight is stored as (in, out)
    register_layer(Exotic, kind=MyKind())                            a `LayerKind` of one's own

A registration holds for the class and its subclasses; the nearest class in the method resolution order wins, and a
registration goes before what would be recognized without it. transformers' Conv1D is known by its structure; nothing
is imported for it.
"""

from __future__ import annotations

from torch import nn

from inweave.errors import ConfigError
from inweave.ops.kinds.base import LayerKind
from inweave.ops.kinds.standard import ConvKind, EmbeddingKind, LinearKind

_LINEAR, _CONV, _EMBEDDING, _CONV1D_OF_TRANSFORMERS = LinearKind(), ConvKind(), EmbeddingKind(), LinearKind(True)
#: the names a kind can be given by, and the class a module must then derive from
_NAMED: dict[str, tuple[LayerKind, type[nn.Module]]] = {
    "linear": (_LINEAR, nn.Module),
    "conv1d": (_CONV, nn.Conv1d),
    "conv2d": (_CONV, nn.Conv2d),
    "conv3d": (_CONV, nn.Conv3d),
    "embedding": (_EMBEDDING, nn.Module),
}
_REGISTERED: dict[type[nn.Module], LayerKind] = {}


def register_layer(layer: type[nn.Module], kind: str | LayerKind) -> None:
    """Let adapters go on modules of the class ``layer``, which keeps its weight in a parameter called ``weight``.

    ``kind``: "linear", "conv1d", "conv2d", "conv3d" or "embedding" where a change of the weight acts as it does there,
    or a `LayerKind`. What else the module's forward does is kept: the change is added to the module's own output.
    """
    if not isinstance(layer, type) or not issubclass(layer, nn.Module):
        raise ConfigError(f"register_layer takes a class derived from torch.nn.Module, got {layer!r}")
    if isinstance(kind, LayerKind):
        _REGISTERED[layer] = kind
        return
    if kind not in _NAMED:
        known = ", ".join(repr(name) for name in _NAMED)
        raise ConfigError(f"kind must be one of {known} or a LayerKind object, got {kind!r}")
    standard, parent = _NAMED[kind]
    if not issubclass(layer, parent):
        raise ConfigError(
            f"{layer.__name__} is not derived from torch.nn.{parent.__name__}, so its stride, padding and groups are "
            f"unknown: give kind a LayerKind object instead of {kind!r}"
        )
    _REGISTERED[layer] = standard


def registered_kind(module: nn.Module) -> LayerKind | None:
    """The kind a user registered for the module's class, or for a class it derives from."""
    return next((_REGISTERED[each] for each in type(module).__mro__ if each in _REGISTERED), None)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of layer that a module is, or None if it takes no adapters."""
    if (kind := registered_kind(module)) is not None:
        return kind
    match module:
        case nn.Linear():
            return _LINEAR
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return _CONV
        case nn.Embedding():
            return _EMBEDDING
    return _CONV1D_OF_TRANSFORMERS if _is_conv1d_of_transformers(module) else None


def stored_transposed(module: nn.Module) -> bool:
    """Whether a registered module stores its weight as (in, out): a file does not say, and the shape may be square."""
    kind = registered_kind(module)
    return kind is not None and kind.transposed and not kind.embedding


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    if not any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]
