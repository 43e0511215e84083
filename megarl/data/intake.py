"""What becomes of a source's rows: those that are refused or left out, and what else is worth knowing about them, in a few lines."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from megarl.config import SourceFormat
from megarl.errors import ConfigError
from megarl.text.display import one_line

Item = TypeVar("Item")
Made = TypeVar("Made")
UNUSED = "columns that nothing uses"
SHOWN = 3  # reasons of dropped rows that are reported
KEPT = 1000  # reasons that a `RowReport` has


@dataclass(frozen=True)
class RowReport:
    """What became of a source's rows."""

    lines: list[str]  # how many were left out, and the notes
    reasons: list[str]  # why items were left out, of the first `KEPT`
    dropped: int  # how many items were left out


_reports: ContextVar[list[RowReport] | None] = ContextVar("reports", default=None)


@contextmanager
def reported() -> Iterator[list[RowReport]]:
    """Collect what `Intake.tell` reports within the block, instead of printing it."""
    token = _reports.set(reports := list[RowReport]())
    try:
        yield reports
    finally:
        _reports.reset(token)


class TooLong(ConfigError):
    """An item exceeds the token limit; one line."""


class Intake:
    """Rows of a source that are too long (`data.overlong`) or otherwise bad (`data.on_bad_row`), and notes about the others.

    Args:
        drop_overlong: leave out items that are too long; otherwise the first is refused.
        drop_bad: leave out rows that are refused for any other reason; otherwise the first is refused.

    Attributes:
        overlong: how many items were left out since they are too long.
        bad: how many rows were left out for another reason.
        reasons: why, for the first `SHOWN` of them.
        last: why the last item was left out.
        rows: how many rows have control tokens inside their texts.
    """

    def __init__(self, drop_overlong: bool = False, drop_bad: bool = False) -> None:
        self._drop_overlong, self._drop_bad = drop_overlong, drop_bad
        self.overlong, self.bad, self.reasons, self.last = 0, 0, list[str](), ""
        self._left_out = list[str]()  # why, for the first `KEPT` of all
        self.rows, self._control, self._place = 0, "", ""
        self._notes = defaultdict[str, set[str]](set)
        self._unread, self._first_unread = 0, ""

    @classmethod
    def of(cls, data: SourceFormat) -> Intake:
        """The intake that a run's `data` section asks for."""
        return cls(data.overlong == "drop", data.on_bad_row == "drop")

    @property
    def dropped(self) -> int:
        """How many items and rows were left out."""
        return self.overlong + self.bad

    def each(self, items: Iterable[Item], make: Callable[[Item], Made]) -> Iterator[Made]:
        """Yield `make` of each item; leave out those that it refuses with ConfigError, or re-raise if such items are not left out."""
        for item in items:
            try:
                result = make(item)
            except ConfigError as error:
                self.refuse(error)
            else:
                yield result

    def made(self, items: Iterable[Item], make: Callable[[Item], Made]) -> list[Made]:
        """`each`, as a list."""
        return list(self.each(items, make))

    def taken(self, items: Iterable[tuple[Item, Made | ConfigError]]) -> list[tuple[Item, Made]]:
        """Return the items with results; those with an error are treated as in `made`."""
        results = list[tuple[Item, Made]]()
        for item, result in items:
            if isinstance(result, ConfigError):
                self.refuse(result)
            else:
                results.append((item, result))
        return results

    def refuse(self, error: ConfigError) -> None:
        """Count an item that is left out. Raises the error if such items are not left out."""
        self.last = str(error)
        if not (self._drop_overlong if isinstance(error, TooLong) else self._drop_bad):
            raise error
        if len(self._left_out) < KEPT:
            self._left_out.append(str(error))
        if isinstance(error, TooLong):
            self.overlong += 1
            return
        self.bad += 1
        if len(self.reasons) < SHOWN:
            self.reasons.append(str(error))

    def note_control(self, place: str, token: str) -> None:
        """Note a row with a control token inside its text; the sides of a pair are one row."""
        self.rows += place != self._place
        self._place = place
        self._control = self._control or f"{token!r} in {place}"

    def note_unread(self, place: str) -> None:
        """Note a row with messages after the last one that is learned."""
        self._unread += 1
        self._first_unread = self._first_unread or place

    def note(self, what: str, names: Iterable[str]) -> None:
        """Note names in the rows of which the same is to be said, such as columns that nothing uses."""
        self._notes[what].update(names)

    def tell(self, count: int, key: str, limit: str) -> None:
        """Report what was left out, and the notes, on stderr or to `reported`. Raise ConfigError if everything was left out.

        Args:
            count: how many items were not left out.
            key: the source's dotted key.
            limit: the limit that overlong items exceed, as text.
        """
        if (reports := _reports.get()) is not None:
            reports.append(RowReport(list(self._lines(count, limit, "")), self._left_out, self.dropped))
        if not count and self.bad:
            raise ConfigError(f"{key}: nothing is left: {self.dropped:,} are left out, {self.bad:,} of them as this one: {self.reasons[0]}")
        if not count and self.overlong:
            raise ConfigError(f"{key}: nothing is left: all {self.overlong:,} are longer than {limit}")
        if reports is not None:
            return
        more = "; ..." if self.bad > len(self.reasons) else ""
        for line in self._lines(count, limit, f": {one_line('; '.join(self.reasons), 1000)}{more}"):
            print(f"megarl: {key}: {line}", file=sys.stderr)

    def _lines(self, count: int, limit: str, reasons: str) -> Iterator[str]:
        if self.overlong:
            total = self.overlong + count
            yield f"{self.overlong:,} of {total:,} are longer than {limit}, and left out (data.overlong=drop)"
        if self.bad:
            yield f"{_count(self.bad, 'bad row is', 'bad rows are')} left out (data.on_bad_row=drop){reasons}"
        if self.rows:
            rows = _count(self.rows, "row has", "rows have")
            yield f"{rows} control tokens inside their texts, the first {self._control} (data.control_tokens=allow)"
        if self._unread:
            rows = _count(self._unread, "row has", "rows have")
            yield f"{rows} messages after the last one that is learned, which nothing reads, the first {self._first_unread}"
        for what, names in self._notes.items():
            if names:
                yield f"{what}: {one_line(', '.join(sorted(names)), 300)}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
