"""Optimizers of other libraries on the views of flat parameters.

    prodigy       prodigyopt.Prodigy                estimates the learning rate: give lr = 1
    schedulefree  schedulefree.AdamWScheduleFree    trains y, evaluates the average x; needs no decaying schedule
    adafactor     torch.optim.Adafactor             second moments as row and column sums
    lion          lion_pytorch.Lion                 the sign of a momentum: Chen et al., arXiv 2302.06675
    came          came_pytorch.CAME                 factored moments with a confidence: Luo et al., arXiv 2307.02047
    dadapt_*      dadaptation.DAdaptAdam, ...       estimate the learning rate: Defazio and Mishchenko, arXiv 2301.07733
    torch.optim.RAdam, ...

An optimizer gets those of lr, betas, eps and weight_decay that its class has, and `optimizer_args`; CAME and DAdaptAdan
have three betas, the third their own, and CAME two epsilons of its own.

They do not support decisions on the device: `step` reads lr and ok on the host (one synchronization per step), scales
the gradients in place, and does nothing when ok is 0. A step that reads numbers on the host cannot be captured.

A state consists of tensors alone, so that it fits into a safetensors file:

    <parameter>:<key>    the library's tensors
    numbers              JSON as bytes: every number the library changes on its own, exactly as Python prints it
    layout               which parameters they belong to

Numbers the caller chose (learning rate, betas, decay, ...) are not part of it: a resumed run uses its own settings.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.files.documents import parse_json
from inweave.training.config.fields import OPTIMIZERS
from inweave.training.config.presets import ADAPTIVE
from inweave.training.optim.flat import FlatParameters, preserve_values

#: name -> (module, class)
_CLASSES = {
    "prodigy": ("prodigyopt", "Prodigy"),
    "schedulefree": ("schedulefree", "AdamWScheduleFree"),
    "adafactor": ("torch.optim", "Adafactor"),
    "lion": ("lion_pytorch", "Lion"),
    "came": ("came_pytorch", "CAME"),
    "dadapt_adam": ("dadaptation", "DAdaptAdam"),
    "dadapt_adagrad": ("dadaptation", "DAdaptAdaGrad"),
    "dadapt_adan": ("dadaptation", "DAdaptAdan"),
    "dadapt_lion": ("dadaptation", "DAdaptLion"),
    "dadapt_sgd": ("dadaptation", "DAdaptSGD"),
    **{name: ("torch.optim", name.rpartition(".")[2]) for name in OPTIMIZERS if name.startswith("torch.optim.")},
}
#: module -> (package, extra) to install
_PACKAGES = {
    "prodigyopt": ("prodigyopt", "train"),
    "schedulefree": ("schedulefree", "train"),
    "lion_pytorch": ("lion-pytorch", "optimizers"),
    "came_pytorch": ("came-pytorch", "optimizers"),
    "dadaptation": ("dadaptation", "optimizers"),
}
#: optimizers that keep their library's default rate until the first step sets it
_OWN_RATE = ("prodigy", "schedulefree", "adafactor")
#: state that torch keeps on the host unless a graph is captured
_ON_HOST = ("step", "mu_product")
#: numbers that a parameter group gets in its first step, and that a new optimizer does not have yet
_FROM_FIRST_STEP = {"prodigy": {"d_denom": 0.0, "d_hat": 0.0}, "dadapt_sgd": {"g0_norm": 0.0}}


class LibraryOptimizer:
    """A torch optimizer with one parameter group per learning-rate multiplier."""

    capturable: ClassVar[bool] = False
    capture_problem: ClassVar[str] = "its step reads the learning rate and the finite check on the host"

    def __init__(self, name: str, flat: FlatParameters, settings: Mapping[str, Any]) -> None:
        self._name, self._flat = name, flat
        self._chosen = {"lr", *settings}
        self._untried = False  # a saved state was loaded, and no step has been taken with it yet
        groups: dict[float, list[str]] = {}
        for parameter, factor in flat.factors.items():
            groups.setdefault(factor, []).append(parameter)
        self._multipliers = list(groups)
        rows = [{"params": [flat.parameters[name] for name in names]} for names in groups.values()]
        with contextlib.redirect_stdout(io.StringIO()):  # Prodigy prints which decay it uses
            try:
                self._inner: Any = _optimizer_class(name)(rows, **settings)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"optimizer {name}: {error}") from None

    @torch.no_grad()
    def step(self, lr: torch.Tensor, grad_scale: torch.Tensor, ok: torch.Tensor) -> None:
        if not bool(ok):
            return
        self._flat.grads.mul_(grad_scale)
        rate = float(lr)
        for group, multiplier in zip(self._inner.param_groups, self._multipliers, strict=True):
            group["lr"] = rate * multiplier
        try:
            self._inner.step()
        except Exception as error:  # a library may fail in any way on a state that it did not write
            if self._untried and not isinstance(error, torch.OutOfMemoryError | MemoryError):
                raise FormatError(f"optimizer {self._name}: the saved state does not fit: {error!r}") from None
            raise
        self._untried = False

    def state(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for name, parameter in self._flat.parameters.items():
            for key, value in self._inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}:{key}"] = value
                else:
                    numbers.setdefault(name, {})[key] = value
        groups = [
            {key: value for key, value in group.items() if key not in self._chosen and key != "params"}
            for group in self._inner.param_groups
        ]
        text = json.dumps({"optimizer": self._name, "groups": groups, "parameters": numbers})
        return {**tensors, "numbers": torch.tensor(list(text.encode()), dtype=torch.uint8), "layout": self._flat.layout}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        tensors = dict(state)
        numbers, layout = tensors.pop("numbers", None), tensors.pop("layout", None)
        fits = numbers is not None and numbers.dtype == torch.uint8 and numbers.dim() == 1
        if not fits or numbers is None or layout is None or not torch.equal(layout.cpu(), self._flat.layout):
            raise FormatError(f"optimizer {self._name}: the saved state belongs to other parameters")
        try:
            saved = parse_json(bytes(numbers.tolist()), "its numbers", finite=False)
            groups = [dict(group.items()) for group in saved["groups"]]
            states: dict[str, dict[str, Any]] = {name: dict(own.items()) for name, own in saved["parameters"].items()}
            kind, count = saved["optimizer"], len(groups)
        except (FormatError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"optimizer {self._name}: the saved numbers cannot be read: {error}") from None
        if kind != self._name or count != len(self._inner.param_groups):
            raise FormatError(
                f"optimizer {self._name}: the saved state belongs to {for_message(kind)} with {count} groups"
            )
        for group, values in zip(self._inner.param_groups, groups, strict=True):
            own = {**_FROM_FIRST_STEP.get(self._name, {}), **group}
            del own["params"]
            if wrong := [key for key, value in values.items() if key not in own or not _alike(own[key], value)]:
                raise FormatError(f"optimizer {self._name}: the saved option {wrong[0]!r} is not one of its own")
        for full, tensor in tensors.items():
            name, _, key = full.rpartition(":")
            device = "cpu" if key in _ON_HOST else self._flat.values.device
            states.setdefault(name, {})[key] = tensor.to(device, copy=True)
        if unknown := sorted(states.keys() - self._flat.parameters.keys()):
            raise FormatError(f"optimizer {self._name}: the saved state has {unknown[0]!r}, which is not trained")
        self._inner.state.clear()
        self._untried = True
        for name, values in states.items():
            self._inner.state[self._flat.parameters[name]] = values
        for group, values in zip(self._inner.param_groups, groups, strict=True):
            for key, value in values.items():
                if key not in self._chosen:
                    group[key] = tuple(value) if isinstance(value, list) else value

    def eval_weights(self) -> AbstractContextManager[None]:
        return nullcontext()


def _alike(own: object, saved: object) -> bool:
    """Return whether a saved number has the library's type; JSON has lists instead of tuples."""
    if isinstance(own, bool) or own is None or isinstance(own, str):
        return type(own) is type(saved)
    if isinstance(own, tuple | list):
        return isinstance(saved, list) and len(saved) == len(own) and all(map(_alike, own, saved))
    return isinstance(saved, int | float) and not isinstance(saved, bool)


class ScheduleFree(LibraryOptimizer):
    """The parameters are y = (1 - beta1) z + beta1 x while training; the average x is used for evaluation."""

    def __init__(self, flat: FlatParameters, settings: Mapping[str, Any]) -> None:
        super().__init__("schedulefree", flat, settings)
        self._inner.train()

    def state(self) -> dict[str, torch.Tensor]:
        if not self._inner.param_groups[0]["train_mode"]:
            raise ConfigError(
                "the state can only be saved outside of eval_weights(): inside it, the values are averages"
            )
        return super().state()

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Switch to x inside the block; y is restored from a copy, since the library would compute and round it."""
        with preserve_values(self._flat):
            self._inner.eval()
            try:
                yield
            finally:
                self._inner.train()


def require_library(name: str) -> None:
    """Raise ConfigError if the optimizer's library is not installed."""
    if name in _CLASSES:
        _optimizer_class(name)


def make(
    name: str, flat: FlatParameters, common: Mapping[str, Any], args: Mapping[str, Any] | None = None
) -> LibraryOptimizer:
    """Build the third-party optimizer called ``name`` with ``args`` and the ``common`` settings its class has."""
    settings = {**_accepted(name, common), **(args or {})}
    if name == "schedulefree":
        return ScheduleFree(flat, settings)
    if name in ADAPTIVE and len(set(flat.factors.values()) - {0.0}) > 1:
        raise ConfigError(
            f"{name} estimates one learning rate for all parameters; leave out the learning-rate multipliers"
        )
    return LibraryOptimizer(name, flat, settings)


def _accepted(name: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the common settings that the class accepts, in its own form."""
    parameters = inspect.signature(_optimizer_class(name)).parameters
    settings = {key: value for key, value in common.items() if key in parameters}
    if name in _OWN_RATE:
        settings.pop("lr", None)
    for key in ("betas", "eps"):
        default = parameters[key].default if key in settings else None
        if isinstance(default, tuple) and key == "eps":
            del settings[key]
        elif isinstance(default, tuple):
            settings[key] = (*common[key], *default[len(common[key]) :])
    if name == "adafactor":  # its two epsilons are not Adam's
        settings.pop("eps", None)
    return settings


def _optimizer_class(name: str) -> Any:
    module, kind = _CLASSES[name]
    package, extra = _PACKAGES.get(module, ("torch", "torch"))
    try:
        return getattr(importlib.import_module(module), kind)
    except ImportError:
        raise ConfigError(
            f"optimizer {name} needs the package {package}, which is not installed: pip install 'inweave[{extra}]'"
        ) from None
    except AttributeError:
        raise ConfigError(f"optimizer {name}: the installed {package} has no class {kind}; upgrade it") from None
