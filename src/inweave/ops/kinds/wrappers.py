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


def peft_layers(network: nn.Module) -> list[str]:
    """Return the names of PEFT's layers in a network, below which its weights have other names."""
    return [
        name
        for name, module in named_modules(network)
        if any(kind.__name__ == "BaseTunerLayer" for kind in type(module).__mro__) and "base_layer" in module._modules
    ]


def peft_problem(network: nn.Module) -> str | None:
    """Return why adapters find no place in a network that already has PEFT's layers, or None."""
    if not (names := peft_layers(network)):
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{type(network).__name__} already has PEFT layers ({names[0]}{more}), inside which its weights have other "
        "names: remove them first (pipe.unload_lora_weights(), or unload() or merge_and_unload() of the PeftModel)"
    )


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
