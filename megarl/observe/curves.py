"""The course of a run's metrics over its steps: for its picture, and for comparing runs."""

from collections.abc import Iterable, Sequence

SCORES = ("avg@", "pass@", "greedy")  # how the names of a set's held-out scores begin


def series(rows: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """The steps at which a metric was reported, and its values."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def held_out(names: Iterable[str], *kinds: str) -> list[str]:
    """The evaluation metrics among `names`, of all sets: those whose part after the set's name begins with one of `kinds`."""
    return sorted(name for name in names if name.startswith("eval/") and name.rpartition("/")[2].startswith(kinds))
