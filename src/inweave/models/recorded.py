"""A denoiser recorded in CUDA graphs: one for each shape of its arguments, replayed without Python in between.

    first call of a shape   eager: libraries choose their kernels, Triton compiles its own
    second call             recorded, which computes nothing, then replayed
    every later call        replayed

    arguments               copied to fixed addresses, those that are the same tensor as before left alone
    result                  copied out of the memory that all graphs share

Weights may change in place, so swaps of adapters keep the graphs. Everything else that a graph relies on is compared
before each call: addresses of weights, modules, their classes and hooks. If any differs, all graphs are dropped.
Numbers of arguments in host memory are part of a shape, since a graph would repeat those it was recorded with.

Adapters that are added to the rows of a batch are hooks, and their factors and strengths are read from device memory
(`inweave.weights.row_adapters`). Every layout of them, and none, has graphs of its own, and a network to compare with:
batches with and without such adapters take turns, and a graph follows whatever the rows get.

What cannot be recorded (because it reads a number from the device, say) runs eagerly, and `problem` says why.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from inweave.ops.tensors.oom import out_of_memory
from inweave.weights.snapshot import Entry, Snapshot

MOST = 16  # graphs
SHARE = 0.25  # of the device's memory: the most that the graphs may take together
PATIENCE = 8  # changes of the network, none of them followed by a replay

_LATENTS, _TIME = "", " "  # no argument of a denoiser has these names
_PLAIN = frozenset(vars(nn.Module()))  # attributes of every module

#: (layout of added adapters, shape of the arguments)
Key = tuple[Hashable, Hashable]
#: (latents, time, other arguments) -> prediction
Denoise = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]
#: latents -> what a recorded call relies on besides the network
Layout = Callable[[Tensor], Hashable]


class _Graph(NamedTuple):
    graph: Any  # with a method `replay`
    inputs: dict[str, Any]
    output: Tensor
    sources: dict[str, tuple[Tensor, int]]  # what was copied into the inputs last, and its version


class Pool(Protocol):
    """What runs and records work on one device, in one memory: a `GraphPool`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def bytes(self) -> int: ...

    @property
    def device_bytes(self) -> int: ...

    def run(self, work: Callable[[], None]) -> None: ...

    def record(self, work: Callable[[], None]) -> Any: ...

    def release(self) -> None: ...


class RecordedDenoiser:
    """Calls of one network on one device; not for several threads at once.

    Args:
        denoise: what is recorded; it must not change anything but its result.
        network: what it computes with.
        pool: records on an NVIDIA GPU.
        layout: of the adapters that are added to the rows of latents now; None: there are none.
    """

    def __init__(self, denoise: Denoise, network: nn.Module, pool: Pool, layout: Layout = lambda latents: None) -> None:
        self.problem = ""  # why nothing is recorded
        self._reported = ""
        self.seconds = 0.0  # spent on recording
        self._denoise, self._network, self._pool, self._layout = denoise, network, pool, layout
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._seen: dict[Key, tuple[torch.Size, torch.dtype]] = {}  # of the result
        self._too_large: set[Key] = set()
        self._states: OrderedDict[Hashable, NetworkState] = OrderedDict()  # by layout
        self._changes = 0  # of the network since the last replay

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, latents: Tensor, t: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the denoiser's prediction."""
        device = self._pool.device
        if self.problem or torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            return self._denoise(latents, t, inputs)
        added = self._layout(latents)
        self._follow(added)
        t = t.to(device)
        arguments: dict[str, Any] = {**inputs, _LATENTS: latents, _TIME: t}
        key = added, _shape_of(arguments, device.type)
        if (recorded := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            return self._replayed(recorded, arguments)
        if key in self._too_large:
            return self._denoise(latents, t, inputs)
        if key not in self._seen:
            result = self._eager(latents, t, inputs)
            self._seen[key] = result.shape, result.dtype
            return result
        recorded = self._record(key, arguments)
        if recorded is None:
            return self._denoise(latents, t, inputs)
        return self._replayed(recorded, arguments)

    def new_problem(self) -> str:
        """Return why nothing is recorded, once; "" afterwards."""
        reported, self._reported = self._reported, self.problem
        return self.problem if reported != self.problem else ""

    def clear(self) -> None:
        """Forget all graphs and give their memory back."""
        self._graphs.clear()
        self._seen.clear()
        self._too_large.clear()
        self._states.clear()
        self._pool.release()

    @property
    def bytes(self) -> int:
        """The memory of all graphs."""
        return self._pool.bytes

    def _follow(self, added: Hashable) -> None:
        """Drop all graphs if the network changed; give up if it does so in every call."""
        if (state := self._states.get(added)) is not None:
            if state.holds():
                self._states.move_to_end(added)
                return
            self.clear()
            self._changes += 1
        if self._changes >= PATIENCE:
            self.problem = "the network's modules change with every call"
        while len(self._states) >= MOST:
            self._forget(next(iter(self._states)))
        self._states[added] = NetworkState(self._network)

    def _forget(self, added: Hashable) -> None:
        """Drop what is known of a layout."""
        del self._states[added]
        for key in {*self._graphs, *self._seen, *self._too_large}:
            if key[0] == added:
                self._graphs.pop(key, None)
                self._seen.pop(key, None)
                self._too_large.discard(key)

    def _eager(self, latents: Tensor, t: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        results: list[Tensor] = []
        self._pool.run(lambda: results.append(self._denoise(latents, t, inputs)))
        return results.pop().clone()

    def _record(self, key: Key, arguments: Mapping[str, Any]) -> _Graph | None:
        started = time.perf_counter()
        device = self._pool.device.type
        inputs = {name: value.clone() if _is_on(device, value) else value for name, value in arguments.items()}
        others = {name: value for name, value in inputs.items() if name not in (_LATENTS, _TIME)}
        shape, dtype = self._seen[key]
        output = torch.empty(shape, dtype=dtype, device=self._pool.device)

        def work() -> None:
            output.copy_(self._denoise(inputs[_LATENTS], inputs[_TIME], others))

        try:
            graph = self._pool.record(work)
        except Exception as error:  # the network does something that cannot be recorded
            self._graphs.clear()
            self._pool.release()
            if out_of_memory(error):
                self._too_large.add(key)
            else:
                self.problem = " ".join(str(error).split())[:300]
            return None
        finally:
            self.seconds += time.perf_counter() - started
        recorded = _Graph(graph, inputs, output, {})
        if len(self._graphs) >= MOST:
            self._graphs.popitem(last=False)
        if self._graphs and self.bytes > SHARE * self._pool.device_bytes:
            self._graphs.clear()  # their memory is one: it returns when all are gone
            del graph, recorded
            self._pool.release()
            return self._record(key, arguments)
        self._graphs[key] = recorded
        return recorded

    def _replayed(self, recorded: _Graph, arguments: Mapping[str, Any]) -> Tensor:
        for name, value in arguments.items():
            if not _is_on(self._pool.device.type, value):
                continue
            version = -1 if value.is_inference() else value._version
            source, old = recorded.sources.get(name, (None, -1))
            if source is not value or version < 0 or version != old:
                recorded.inputs[name].copy_(value)
                recorded.sources[name] = value, version
        recorded.graph.replay()
        self._changes = 0
        return recorded.output.clone()


class NetworkState:
    """What a graph of a network relies on besides the numbers of its tensors."""

    def __init__(self, network: nn.Module) -> None:
        self._modules = list(network.modules())
        self._classes = list(map(type, self._modules))
        self._attributes = [vars(module) for module in self._modules]
        self._counts = list(map(len, self._attributes))
        self._training = [module.training for module in self._modules]
        entries, tensors = list[Entry](), list[Tensor]()
        self._hooks = list[dict[int, Any]]()
        for module in self._modules:
            for members in (module._parameters, module._buffers, module._modules):
                entries += [(members, name, value) for name, value in members.items()]
            hooks: Any
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                self._hooks.append(hooks)
                entries += [(hooks, each, hook) for each, hook in hooks.items()]
            own = (*module._parameters.values(), *module._buffers.values())
            values = vars(module)
            entries += [(values, name, value) for name, value in values.items() if name not in _PLAIN]
            tensors += [tensor for tensor in own if tensor is not None]
        self._hook_counts = list(map(len, self._hooks))
        self._snapshot = Snapshot(entries, tensors)

    def holds(self) -> bool:
        """Return whether all of it is as it was."""
        return (
            list(map(type, self._modules)) == self._classes
            and list(map(len, self._attributes)) == self._counts
            and list(map(len, self._hooks)) == self._hook_counts
            and [module.training for module in self._modules] == self._training
            and self._snapshot.holds()
        )


def _shape_of(arguments: Mapping[str, Any], device: str) -> Hashable:
    """Return what arguments have in common that one graph can serve."""
    described: list[Hashable] = []
    for name, value in arguments.items():
        if _is_on(device, value):
            described.append((name, tuple(value.shape), value.stride(), value.dtype))
        elif torch.is_tensor(value):
            described.append((name, tuple(value.shape), value.dtype, tuple(value.flatten().tolist())))
        else:
            described.append((name, repr(value)))
    return tuple(described)


def _is_on(device: str, value: Any) -> bool:
    return torch.is_tensor(value) and value.device.type == device
