"""Convert a group of tensors with the same module name to the changes of its weight and bias.

The algorithm is determined by the set of roles present, never by the file: the algorithms are tried in the order of the
registry, and each takes the roles it recognizes (`Factors.recognize`). The remaining roles are orphans: half a pair, an
alpha without tensors.
"""

from __future__ import annotations

from inweave.adapter import ALGORITHMS, Entry, KeyProblem
from inweave.adapter.adapter import Fault
from inweave.formats.dialects import dialect_of
from inweave.formats.group import SHARED_ROLES, Context, Group, ModuleParts

_ADDITIONS = frozenset(SHARED_ROLES) - {"scale"}  # a vector called scale may be the value of a norm
_ORPHANS = {
    "alpha": "an alpha without tensors", "scale": "a scale without tensors",
    "dora_scale": "a DoRA magnitude without factors", "magnitude": "a DoRA magnitude without factors",
}  # fmt: skip


def classify(group: Group, context: Context, entries: list[Entry], problems: list[KeyProblem]) -> None:
    """Append the group's entries, and problems for tensors that cannot be used."""
    parts = ModuleParts(group, context)
    if any(role.startswith("tlora_") for role in parts.left):
        parts.unsupported(parts.take(*parts.left), "T-LoRA: its change depends on the timestep and cannot be merged")
    elif not _ADDITIONS.issuperset(parts.left):  # an alpha or a magnitude alone belongs to nothing
        for algorithm in ALGORITHMS.values():
            algorithm.recognize(parts)
            if not parts.left:
                break
    if parts.left:
        problems.append(_leftovers(parts))
    problems.extend(parts.problems)
    name = dialect_of(group.prefix, group.families, group.ref.name, group.has_adapter_name)
    entries.extend(Entry(ref, param, factors, keys, name) for ref, param, factors, keys in parts.made)


def _leftovers(parts: ModuleParts) -> KeyProblem:
    reasons = _ORPHANS | {role: text for each in ALGORITHMS.values() for role, text in each.orphans.items()}
    roles = [role for role in parts.left if role not in SHARED_ROLES] or list(parts.left)
    reason = "; ".join(dict.fromkeys(reasons.get(role, f"{role} is part of an incomplete set") for role in roles))
    fault: Fault = "unknown" if parts.left.keys() <= {"plain_weight", "plain_bias"} else "orphan"
    return KeyProblem(fault, parts.take(*parts.left), f"{parts.group.ref}: {reason}")
