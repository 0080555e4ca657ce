"""Which kind of layer a module is: torch's own classes, transformers' Conv1D, and classes that a user registers.

    register_layer(MyLinear, kind="linear")                          the same mathematics, and perhaps more around it
    register_layer(InOut, kind=LinearKind(transposed=True))          its weight is stored as (in, out)
    register_layer(Exotic, kind=MyKind())                            a custom `LayerKind`

A registration holds for the class and its subclasses; the nearest class in the method resolution order wins, and a
registration takes precedence over the classes that are recognized without one. transformers' Conv1D is recognized by
its structure, without importing transformers.
"""

from __future__ import annotations

from torch import nn

from inweave.errors import ConfigError
from inweave.ops.kinds.base import LayerKind
from inweave.ops.kinds.standard import ConvKind, EmbeddingKind, LinearKind

_LINEAR, _CONV, _EMBEDDING, _CONV1D_OF_TRANSFORMERS = LinearKind(), ConvKind(), EmbeddingKind(), LinearKind(True)
#: name of a kind -> the kind, and the class that a module must derive from
_NAMED: dict[str, tuple[LayerKind, type[nn.Module]]] = {
    "linear": (_LINEAR, nn.Module),
    "conv1d": (_CONV, nn.Conv1d),
    "conv2d": (_CONV, nn.Conv2d),
    "conv3d": (_CONV, nn.Conv3d),
    "embedding": (_EMBEDDING, nn.Module),
}
_REGISTERED: dict[type[nn.Module], LayerKind] = {}


def register_layer(layer: type[nn.Module], kind: str | LayerKind) -> None:
    """Allow adapters on modules of a class whose weight is a parameter called ``weight``.

    The module's own forward is kept: the change is added to its output.

    Args:
        layer: the class; the registration holds for its subclasses too.
        kind: "linear", "conv1d", "conv2d", "conv3d" or "embedding" if a change of the weight acts as in that layer, or
            a `LayerKind`.

    Raises:
        ConfigError: if ``layer`` is not a class of modules, the kind is unknown, or the class does not fit the kind.
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
    """Return the kind that a user registered for the module's class, or for the nearest class that it derives from."""
    return next((_REGISTERED[each] for each in type(module).__mro__ if each in _REGISTERED), None)


def kind_of(module: nn.Module) -> LayerKind | None:
    """Return the kind of layer that a module is, or None if it takes no adapters."""
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
    """Return whether a registered module stores its weight as (in, out): neither a file nor a square shape shows it."""
    kind = registered_kind(module)
    return kind is not None and kind.transposed and not kind.embedding


def _is_conv1d_of_transformers(module: nn.Module) -> bool:
    if not any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]
