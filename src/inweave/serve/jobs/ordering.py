"""Priorities that move a waiting job to another place.

    order      higher priority first, then lower number
    moved up   the job, and those before it if necessary, get the lowest priority that keeps them in front
    moved down the job, and those behind it if necessary, get the highest priority that keeps them behind

Everything on the other side keeps its priority.
"""

from __future__ import annotations

from collections.abc import Sequence


def priorities_after_move(waiting: Sequence[tuple[str, int, int]], job: str, position: int) -> dict[str, int]:
    """Return the new priorities by job; ``waiting``: (job, number, priority) in the order they would run."""
    before = next(index for index, row in enumerate(waiting) if row[0] == job)
    after = max(0, min(position, len(waiting) - 1))
    order = [row for row in waiting if row[0] != job]
    order.insert(after, waiting[before])
    changes: dict[str, int] = {}
    if after < before:
        for index in range(after, -1, -1):
            name, number, priority = order[index]
            _, next_number, next_priority = order[index + 1]
            bound = changes.get(order[index + 1][0], next_priority) + (number > next_number)
            if priority < bound:
                changes[name] = bound
    elif after > before:
        for index in range(after, len(order)):
            name, number, priority = order[index]
            _, last_number, last_priority = order[index - 1]
            bound = changes.get(order[index - 1][0], last_priority) - (number < last_number)
            if priority > bound:
                changes[name] = bound
    return changes
