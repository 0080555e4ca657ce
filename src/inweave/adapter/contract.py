"""The two views through which an algorithm meets files: `Parts` when it is read, `Form` when it is written.

    class Factors:  recognize(parts: Parts)   takes its roles out of a module's tensors and makes entries of them
                    spelled(form: Form, ...)  gives its tensors back by suffix, or the reason why the dialect has none

`inweave.formats` implements both; the algorithms below it know only these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inweave.adapter.tensor import Tensor

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """The fields of a PEFT configuration that algorithms read; `inweave.formats.config` has the others."""

    peft_type: str = "LORA"
    fan_in_fan_out: bool = False
    block_share: bool = False
    neumann_terms: int | None = 5
    constrained: bool = False  # PEFT's coft
    modules_to_save: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def rank_of(self, module: str) -> int | None:
        """Return the rank of a module."""
        raise NotImplementedError

    def is_feedforward(self, module: str) -> bool:
        """Return whether an (IA)^3 module scales its inputs."""
        raise NotImplementedError

    def tokens_of(self, module: str) -> tuple[int, ...] | None:
        """Return the ids of the tokens that were trained in an embedding; None if none are listed."""
        raise NotImplementedError

    def saves(self, module: str) -> bool:
        """Return whether `modules_to_save` lists a module, or one around it."""
        raise NotImplementedError


class Parts(Protocol):
    """The tensors that a file holds for one module, by role; each can be taken once.

    ``left``      role -> tensor, of those that no algorithm has taken yet
    ``config``    the PEFT configuration, where there is one; ``config_name`` is the module's path in its patterns
    ``rslora``    whether the file's metadata says rs-LoRA, ``dimension`` the rank that it states (0: none)
    """

    left: dict[str, Tensor]

    @property
    def config(self) -> PeftSettings | None: ...

    @property
    def config_name(self) -> str: ...

    @property
    def rslora(self) -> bool: ...

    @property
    def dimension(self) -> int: ...

    @property
    def is_peft(self) -> bool:
        """Whether PEFT wrote the module's tensors, so that plain weights are modules it saved whole."""

    def has(self, *roles: str) -> bool:
        """Return whether all of these roles are left."""

    def take(self, *roles: str) -> Keys:
        """Remove these roles and return their keys in the file; roles that are not left are skipped."""

    def shared(self, algorithm: type[Any], *, configured: bool = True) -> tuple[dict[str, Any], Keys]:
        """Take alpha, scale, magnitude, ... and return them as fields of `Factors` together with their keys."""

    def file_tensor(self, suffix: str) -> tuple[str, Tensor] | None:
        """Return the key and the tensor that all modules of the file share under a suffix."""

    def make(
        self, factors: Any, keys: Keys, param: str = "weight", *, part: int | None = None, inner: str = ""
    ) -> bool:
        """Add an entry, or a problem if the shapes do not meet; return whether it was added.

        ``part`` numbers a part of a fused module; ``inner`` names something inside of the module.
        """

    def malformed(self, keys: Keys, reason: str) -> None:
        """Report tensors with wrong values or shapes."""

    def unsupported(self, keys: Keys, reason: str) -> None:
        """Report tensors that cannot be applied."""

    def warn(self, text: str) -> None:
        """Add a warning about the file."""


@dataclass(frozen=True, slots=True)
class Form:
    """The abilities of a dialect that an algorithm must know to be written in it."""

    family: str  # of suffixes: "kohya" or "peft"
    norms: bool = False  # norm layers have suffixes of their own
    replaces: bool = False  # values can replace the base's
    norm_scales: bool = False  # of these, a norm's `scale`
    widens: bool = False  # a widened base weight can be written, or loaders widen it by themselves
    rotates_inputs: bool = False  # OFT on the inputs, as PEFT and OneTrainer have it
    magnitude: str = ""  # the suffix of a DoRA magnitude; empty if there is none
    peft_type: str = "LORA"  # of a PEFT directory


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a joined tensor was made: each part's rank (0: the part was absent), own alpha, or shared factors."""

    ranks: tuple[int, ...]
    alphas: tuple[float | None, ...]
    shared: bool

    def describes(self, parts: int) -> bool:
        """Return whether a record from a file's metadata can be true for this number of parts."""
        return len(self.ranks) == len(self.alphas) == parts and any(self.ranks)
