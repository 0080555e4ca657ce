"""Optimizers of other libraries: steps are the library's own, resumed runs have the same bits, names are forgiving."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.training.config.fields import OPTIMIZERS, TrainSettings
from inweave.training.optim import third_party
from inweave.training.optim.adamw import make_optimizer
from inweave.training.optim.flat import FlatParameters
from tests.support import sized
from tests.unit.training.tiny import EVERYTHING, config, file_bits, state_bits, tiny
from tests.unit.training.tiny import OPTIMIZERS as WITHOUT_LIBRARIES

#: (our name, module, class, what the library gets)
LIBRARIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lion": ("lion_pytorch", "Lion", {"betas": (0.9, 0.95)}),
    "came": ("came_pytorch", "CAME", {"betas": (0.9, 0.95, 0.9999)}),
    "dadapt_adam": ("dadaptation", "DAdaptAdam", {"betas": (0.9, 0.95), "eps": 1e-7}),
    "dadapt_adagrad": ("dadaptation", "DAdaptAdaGrad", {"eps": 1e-7}),
    "dadapt_adan": ("dadaptation", "DAdaptAdan", {"betas": (0.9, 0.95, 0.99), "eps": 1e-7}),
    "dadapt_lion": ("dadaptation", "DAdaptLion", {"betas": (0.9, 0.95)}),
    "dadapt_sgd": ("dadaptation", "DAdaptSGD", {}),
    "torch.optim.Adadelta": ("torch.optim", "Adadelta", {"eps": 1e-7}),
    "torch.optim.Adagrad": ("torch.optim", "Adagrad", {"eps": 1e-7}),
    "torch.optim.Adam": ("torch.optim", "Adam", {"betas": (0.9, 0.95), "eps": 1e-7}),
    "torch.optim.Adamax": ("torch.optim", "Adamax", {"betas": (0.9, 0.95), "eps": 1e-7}),
    "torch.optim.ASGD": ("torch.optim", "ASGD", {}),
    "torch.optim.Muon": ("torch.optim", "Muon", {"eps": 1e-7}),
    "torch.optim.NAdam": ("torch.optim", "NAdam", {"betas": (0.9, 0.95), "eps": 1e-7}),
    "torch.optim.RAdam": ("torch.optim", "RAdam", {"betas": (0.9, 0.95), "eps": 1e-7}),
    "torch.optim.RMSprop": ("torch.optim", "RMSprop", {"eps": 1e-7}),
    "torch.optim.Rprop": ("torch.optim", "Rprop", {}),
    "torch.optim.SGD": ("torch.optim", "SGD", {}),
}


def library_class(name: str) -> Any:
    module, kind, _ = LIBRARIES[name]
    return getattr(pytest.importorskip(module, reason="pip install 'inweave[optimizers]'"), kind)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (8, 5), "b": (5, 8), "c": (3, 3)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", LIBRARIES)
def test_steps_are_the_librarys_own(name: str) -> None:
    kind = library_class(name)
    decay = {} if name == "torch.optim.Rprop" else {"weight_decay": 0.1}
    ours, theirs = parameters(), copy.deepcopy(parameters())
    flat = FlatParameters(ours)
    rate = 1.0 if name.startswith("dadapt") else 2**-7
    optimizer = make_optimizer(name, flat, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-7, learning_rate=rate)
    peer = kind(theirs.values(), lr=rate, **decay, **LIBRARIES[name][2])
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for key, parameter in theirs.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            flat.parameters[key].grad.copy_(2 * parameter.grad)  # type: ignore[union-attr]
        optimizer.step(torch.tensor(rate), torch.tensor(0.5), torch.tensor(True))
        peer.step()
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key
        assert not torch.equal(ours[key], parameters()[key])
    assert not optimizer.capturable and "on the host" in optimizer.capture_problem
    before = flat.values.clone()
    flat.grads.fill_(float("nan"))
    optimizer.step(torch.tensor(rate), torch.tensor(0.5), torch.tensor(False))
    assert torch.equal(flat.values, before), "a skipped step changes nothing"


#: those that keep numbers of their own beside tensors, or a counter on the host
RESUMED = ("lion", "came", "dadapt_adam", "dadapt_sgd", "torch.optim.NAdam", "torch.optim.ASGD")


@pytest.mark.parametrize("name", RESUMED if sized(0, 1) == 0 else tuple(LIBRARIES))
def test_a_resumed_run_is_the_straight_one(name: str, tmp_path: Path) -> None:
    library_class(name)
    adaptive = name.startswith("dadapt")
    settings: dict[str, Any] = {
        **EVERYTHING, "optimizer": name, "steps": 4, "learning_rate": 1.0 if adaptive else 0.01,
        "scale_weight_norms": 1.0,
    }  # fmt: skip
    straight = tiny(tmp_path / "straight", save_every=2, **settings)
    done = straight.train()
    again = tiny(tmp_path / "again", resume=str(tmp_path / "straight" / "t-state" / "step-000002"), **settings)
    assert file_bits(again.train().path) == file_bits(done.path) and state_bits(again) == state_bits(straight)


def test_every_class_of_torch_has_a_name_or_a_reason() -> None:
    classes = {name for name, each in vars(torch.optim).items() if isinstance(each, type)} - {"Optimizer"}
    known = {name.removeprefix("torch.optim.") for name in OPTIMIZERS if name.startswith("torch.")}
    assert known | {"AdamW", "Adafactor"} == classes - {"LBFGS", "SparseAdam"}
    assert {*LIBRARIES, *WITHOUT_LIBRARIES} == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RAdam", "torch.optim.RAdam"), ("radam", "torch.optim.RAdam"), ("torch.optim.SGD", "torch.optim.SGD"),
        ("AdamW8bit", "adamw8bit"), ("Lion", "lion"), ("CAME", "came"), ("DAdaptAdam", "dadapt_adam"),
        ("dadaptation", "dadapt_adam"), ("DAdaptLion", "dadapt_lion"), ("Prodigy", "prodigy"),
        ("torch.optim.AdamW", "adamw"),
    ],
)  # fmt: skip
def test_names_of_classes(written: str, name: str, tmp_path: Path) -> None:
    assert config(tmp_path, optimizer=written).optimizer == name


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("torch.optim.LBFGS", "evaluates the loss several times"),
        ("SparseAdam", "is for sparse gradients"),
        ("adamx", "'adamw'"),
        ("torch.optim.Nothing", "optimizer"),
    ],
)
def test_optimizers_that_cannot_train(written: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, optimizer=written)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("lion", "lion-pytorch", "optimizers"),
        ("came", "came-pytorch", "optimizers"),
        ("dadapt_sgd", "dadaptation", "optimizers"),
        ("prodigy", "prodigyopt", "train"),
    ],
)
def test_a_missing_library_is_named(name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> Any:
        raise ImportError(module)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=rf"{package}.*pip install 'inweave\[{extra}\]'"):
        third_party.require_library(name)


def test_options_of_a_class_reach_it_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    flat = FlatParameters(parameters())
    optimizer: Any = make_optimizer("torch.optim.SGD", flat, args={"momentum": 0.9, "nesterov": True})
    assert optimizer._inner.param_groups[0]["momentum"] == 0.9
    with pytest.raises(ConfigError, match=r"optimizer torch.optim.RAdam: .*warp"):
        make_optimizer("torch.optim.RAdam", flat, args={"warp": 1.0})


@pytest.mark.parametrize("name", ["dadapt_adam", "prodigy"])
def test_one_estimated_rate_has_no_multipliers(name: str) -> None:
    pytest.importorskip({"prodigy": "prodigyopt"}.get(name, "dadaptation"))
    with pytest.raises(ConfigError, match=f"{name} estimates one learning rate"):
        make_optimizer(name, FlatParameters(parameters(), {"a": 2.0}))


def test_presets_suit_the_optimizer() -> None:
    def filled(**fields: Any) -> TrainSettings:
        from inweave.training.config.schema import TrainConfig

        return TrainConfig(dataset="-", **fields).with_preset("sdxl")

    assert filled(optimizer="dadapt_adam").learning_rate == 1.0
    assert filled(optimizer="dadapt_adam").text_encoder_learning_rate is None
    assert filled(optimizer="lion").betas == (0.9, 0.99) and filled(optimizer="lion", betas=(0.8, 0.9)).betas == (
        0.8,
        0.9,
    )
    assert filled(optimizer="RAdam").betas == (0.9, 0.999) == filled().betas
