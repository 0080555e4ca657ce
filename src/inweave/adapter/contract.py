"""The two interfaces between algorithms and files: `Parts` for reading, `Form` for writing.

    class Factors:  recognize(parts: Parts)   takes its roles out of a module's tensors and makes entries of them
                    spelled(form: Form, ...)  returns its tensors by suffix, or why the dialect cannot express them

`inweave.formats` implements both; algorithms depend only on these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inweave.adapter.tensor import Tensor

Keys = tuple[str, ...]

#: terms of the series for OFT's rotation where a file states none: PEFT's default, and OneTrainer's number
SERIES_TERMS = 5


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """The fields of a PEFT configuration that algorithms read; `inweave.formats.config` has the others."""

    peft_type: str = "LORA"
    fan_in_fan_out: bool = False
    block_share: bool = False
    neumann_terms: int | None = SERIES_TERMS
    constrained: bool = False  # PEFT's coft
    modules_to_save: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def alpha_of(self, module: str) -> float | None:
        """Return the alpha of a module."""
        raise NotImplementedError

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
        """Return whether `modules_to_save` lists a module or an enclosing one."""
        raise NotImplementedError


class Parts(Protocol):
    """The tensors that a file holds for one module, by role; each can be taken once.

    ``left``      role -> tensor, of those that no algorithm has taken yet
    ``config``    the PEFT configuration, or None; ``config_name`` is the module's path in its patterns
    ``rslora``    whether the file's metadata specifies rs-LoRA; ``dimension`` is the rank that it states (0: none)
    """

    left: dict[str, Tensor]

    @property
    def config(self) -> PeftSettings | None: ...

    @property
    def config_name(self) -> str: ...

    @property
    def parameter(self) -> str:
        """The bare parameter that the tensors are for; empty for the weight of a layer."""

    @property
    def depth(self) -> int:
        """The number of wrappers between the tensors' own and the outermost; -1 if the parameter is certain."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """The parameters that the tensors may be for; empty if it is certain."""

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
        """Add an entry, or a problem if the shapes do not fit together; return whether it was added.

        ``part`` numbers a part of a fused module; ``inner`` is a name inside the module.
        """

    def malformed(self, keys: Keys, reason: str) -> None:
        """Report tensors with wrong values or shapes."""

    def unsupported(self, keys: Keys, reason: str) -> None:
        """Report tensors that cannot be applied."""

    def warn(self, text: str) -> None:
        """Add a warning about the file."""


@dataclass(frozen=True, slots=True)
class Form:
    """The capabilities of a dialect that determine how an algorithm is written in it."""

    family: str  # of suffixes: "kohya" or "peft"
    norms: bool = False  # norm layers have separate suffixes
    replaces: bool = False  # values can replace the base's
    norm_scales: bool = False  # of these, a norm's `scale`
    widens: bool = False  # a widened base weight can be written, or loaders widen it automatically
    rotates_inputs: bool = False  # OFT on the inputs, as in PEFT and OneTrainer
    magnitude: str = ""  # the suffix of a DoRA magnitude; empty if there is none
    peft_type: str = "LORA"  # PEFT's type of the whole file
    options: Mapping[str, object] = field(default_factory=dict)  # of that type, in PEFT's configuration


@dataclass(frozen=True, slots=True)
class Blocks:
    """The composition of a joined tensor: rank (0: absent) and alpha of each part, and whether factors are shared."""

    ranks: tuple[int, ...]
    alphas: tuple[float | None, ...]
    shared: bool

    def describes(self, parts: int) -> bool:
        """Return whether a record from a file's metadata can be true for this number of parts."""
        return len(self.ranks) == len(self.alphas) == parts and any(self.ranks)
