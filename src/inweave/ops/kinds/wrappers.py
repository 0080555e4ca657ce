"""Wrapper modules (torch.compile, FSDP, DDP) whose names do not appear in state-dict keys.

torch.compile               _orig_mod
FSDP                        _fsdp_wrapped_module
activation checkpointing    _checkpoint_wrapped_module
DataParallel, DDP           module
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_CHILDREN = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_wrapper(module: nn.Module, leaf: str) -> bool:
    """Return whether ``module`` is only a wrapper of its child ``leaf``."""
    if leaf == "module":
        return isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    return leaf in _CHILDREN


def unwrapped(network: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers; a module without wrappers is returned unchanged."""
    while True:
        inner = next((child for leaf, child in network._modules.items() if is_wrapper(network, leaf)), None)
        if inner is None:
            return network
        network = inner


def named_modules(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under each of its names, as in files: without the names of wrappers."""
    return _walk(network, "", ())


def _walk(module: nn.Module, name: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in above:
        return
    yield name, module
    for leaf, child in module._modules.items():
        if child is not None:
            inner = name if is_wrapper(module, leaf) else f"{name}.{leaf}" if name else leaf
            yield from _walk(child, inner, (*above, id(module)))
