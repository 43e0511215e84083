"""Questions from reasoning-gym."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError, ReasoningGymSource
from megarl.data.bounds import in_memory, within_cpu_time
from megarl.data.tokenizer import first_line
from megarl.errors import hint
from megarl.imports import gc_paused

ITEM_S = 8.0  # limit of CPU time per item; the slowest data set takes 3 s
ROOM_MB, ITEMS_PER_MB = 384, 32  # memory limit: a fixed part, plus 1 MB for this many items


@dataclass
class Look:
    """A limit on the items drawn from each source. `most`: the limit; `cut`: whether some source has more."""

    most: int
    cut: bool = False


_look: ContextVar[Look | None] = ContextVar("look", default=None)


@contextmanager
def first_items(most: int) -> Iterator[Look]:
    """Draw only the first items of each source within the block; for checks, which need not see 60,000 puzzles of one kind."""
    look = Look(most)
    token = _look.set(look)
    try:
        yield look
    finally:
        _look.reset(token)


def read_gym(source: ReasoningGymSource, key: str) -> tuple[list[dict[str, Any]], int]:
    """Return the entries (question, answer, metadata) of a source, and how many were dropped since `exclude` has the same question.

    reasoning-gym draws item i from Random(seed + i), so sources with nearby seeds share almost all items: `exclude` compares questions.
    Raises ConfigError with the dotted key for an unknown dataset or parameter.
    """
    excluded = set()
    if source.exclude is not None:
        excluded = {entry["question"] for entry in read_gym(source.exclude, f"{key}.exclude")[0]}
    make, entries = _maker(source, key), list[dict[str, Any]]()
    try:
        with in_memory(ROOM_MB + source.items / ITEMS_PER_MB), within_cpu_time(ITEM_S) as again:
            dataset = make()
            for index in range(_drawn(source)):
                again()
                entries.append(dataset[index])
    except ConfigError:
        raise
    except Exception as error:  # reasoning-gym checks few of its parameters before it draws
        raise ConfigError(f"{key}.params: {source.dataset} cannot draw with {source.params}: {type(error).__name__}: {error}") from None
    others = [entry for entry in entries if entry["question"] not in excluded]
    if not others and not all_drawn():  # some of the items that were not drawn may remain
        others = entries
    return others, len(entries) - len(others)


def all_drawn() -> bool:
    """Return whether every item has been drawn, so that the number of items is known."""
    look = _look.get()
    return look is None or not look.cut


def _drawn(source: ReasoningGymSource) -> int:
    look = _look.get()
    if look is None or source.items <= look.most:
        return source.items
    look.cut = True
    return look.most


def _maker(source: ReasoningGymSource, key: str) -> Callable[[], Any]:
    """Return a function that creates a source's data set. Raise ConfigError for an unknown data set or parameter."""
    with gc_paused():
        from reasoning_gym import factory as gym
    if source.dataset not in gym.DATASETS:
        raise ConfigError(f"{key}.dataset: reasoning-gym has no dataset {source.dataset!r}{hint(source.dataset, gym.DATASETS)}")
    parameters = gym.DATASETS[source.dataset][1].__dataclass_fields__
    for name in source.params:
        if name in ("seed", "size"):
            raise ConfigError(f"{key}.params.{name}: set {key}.{'seed' if name == 'seed' else 'items'} instead")
        if name not in parameters:
            raise ConfigError(f"{key}.params.{name}: {source.dataset} has no such parameter ({', '.join(sorted(parameters))})")

    def make() -> Any:
        try:
            return gym.create_dataset(source.dataset, seed=source.seed, size=source.items, **source.params)
        except Exception as error:
            raise ConfigError(f"{key}.params: {source.dataset} refuses {source.params}: {first_line(error)}") from None

    return make
