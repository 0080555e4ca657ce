"""The networks and dialects that the settings list are those of the registries."""

from __future__ import annotations

from inweave.adapter import ALGORITHMS
from inweave.formats.dialects import WRITTEN
from inweave.training.config.types import NETWORKS, OUTPUT_DIALECTS


def test_networks_are_the_algorithms_that_can_be_layers() -> None:
    forms_of_lora = {"locon", "dora"}  # with kernels, with magnitudes
    own = {kind: each for kind, each in ALGORITHMS.items() if each.__module__.startswith("inweave.")}
    layers = {kind for kind, each in own.items() if each.layer and not each.of_parameter}
    assert set(NETWORKS) - forms_of_lora == layers


def test_dialects_of_trained_adapters_can_be_written() -> None:
    assert set(WRITTEN) - set(OUTPUT_DIALECTS) == {"comfy", "bfl", "candle"}  # of other programs' models alone
