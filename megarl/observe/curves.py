"""What the metrics of a run say over its steps: for its picture, and for those that compare runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SCORES = ("avg@", "pass@", "greedy")  # begin the names of a set's held-out scores


def series(rows: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric."""
    kept = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in kept], [value for _, value in kept]


def held_out(names: Iterable[str], *kinds: str) -> list[str]:
    """The metrics of evaluations among these, of all sets. `kinds`: what comes after the set begins so."""
    return sorted(name for name in names if name.startswith("eval/") and name.rpartition("/")[2].startswith(kinds))
