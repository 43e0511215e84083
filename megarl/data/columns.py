"""Look up columns of rows by name, and select rows by their columns (`where`).

A dot in a name looks inside dictionaries, unless a column has exactly that name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError
from megarl.config.where import Where, takes
from megarl.text.display import one_line

if TYPE_CHECKING:
    import pyarrow

SHOWN = 4  # values of a column that a message shows


def at(row: dict[str, Any], dotted: str, place: str, key: str) -> Any:
    """Return row["a"]["b"] for "a.b", or row["a.b"] if a column has that name.

    Args:
        row: the row's columns.
        dotted: the column's name.
        place: the start of an error's message.
        key: the setting that gave `dotted`.

    Raises:
        ConfigError: there is no such value, or it is null.
    """
    value = find(row, dotted)
    if value is None:
        if _holds(row, dotted):
            raise ConfigError(f"{place}: {key}={dotted!r} is null")
        raise ConfigError(f"{place}: no value for {key}={dotted!r}; the row has {one_line(', '.join(row)) or 'no columns'}")
    return value


def find(row: dict[str, Any], dotted: str) -> Any:
    """Like `at`, but return None if there is no such value."""
    if dotted in row:
        return row[dotted]
    value: Any = row
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _holds(row: dict[str, Any], dotted: str) -> bool:
    """Whether a row has a column, which may be null."""
    outer, _, name = dotted.rpartition(".")
    return dotted in row or (bool(outer) and name in (find(row, outer) or ()))


def find_in_table(table: pyarrow.Table, dotted: str) -> pyarrow.ChunkedArray | None:
    """Return the column whose values `find` would return; None if there is none, or several of that name."""
    import pyarrow
    from pyarrow import compute

    name, *inner = [dotted] if dotted in table.column_names else dotted.split(".")
    if table.column_names.count(name) != 1:
        return None
    column = table[name]
    for field in inner:
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index(field) < 0:
            return None
        column = compute.struct_field(column, field)
    return column


def chosen_rows(rows: Iterator[tuple[str, dict[str, Any]]], where: Where, path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows, with their places, whose columns meet all conditions.

    Args:
        rows: (place, columns) of each row of a file.
        where: conditions by column; if empty, all rows are chosen.
        path: the file's path, for messages.
        key: the source's dotted key, such as "data.train".

    Raises:
        ConfigError: after the last row: there are rows, but none is chosen.
    """
    if not where:
        yield from rows
        return
    count, matches, first = 0, 0, dict[str, Any]()
    examples: dict[str, list[Any]] = {name: [] for name in where}
    for place, row in rows:
        count, first = count + 1, first or row
        values = {name: find(row, name) for name in where}
        if all(takes(where[name], value) for name, value in values.items()):
            matches += 1
            yield place, row
        elif not matches:
            for name, value in values.items():
                if len(examples[name]) <= SHOWN and value is not None and value not in examples[name]:
                    examples[name].append(value)
    if count and not matches:
        raise _no_match(examples, count, first, path, key)


def chosen_places(table: pyarrow.Table, where: Where, path: Path, key: str) -> np.ndarray:
    """Return which rows of a table `chosen_rows` would yield. Evaluates a condition only once per distinct value of its column.

    Args:
        table: all rows of a file.
        where: conditions by column.
        path: the file's path, for messages.
        key: the source's dotted key, such as "data.train".

    Returns:
        The row indices, counted from 0, int64, in order.

    Raises:
        ConfigError: there are rows, but none is chosen.
    """
    import pyarrow
    from pyarrow import compute, types

    taken_N = np.ones(table.num_rows, dtype=bool)
    examples: dict[str, Sequence[Any]] = {}
    for name, condition in where.items():
        column = find_in_table(table, name)
        if column is not None and types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column is None or types.is_nested(column.type):
            examples[name] = [] if column is None else column.slice(0, SHOWN).to_pylist()
            taken_N[:] = False
            continue
        distinct = column.unique()
        examples[name] = [value for value in distinct.slice(0, SHOWN + 2).to_pylist() if value is not None]
        accepted_values = distinct.filter(pyarrow.array([takes(condition, value) for value in distinct.to_pylist()], pyarrow.bool_()))
        taken_N &= compute.is_in(column, value_set=accepted_values).to_numpy()
    if not taken_N.any():
        raise _no_match(examples, table.num_rows, table.slice(0, 1).to_pylist()[0], path, key)
    return np.flatnonzero(taken_N)


def _no_match(examples: Mapping[str, Sequence[Any]], count: int, first: dict[str, Any], path: Path, key: str) -> ConfigError:
    """Return the error for conditions that select no row.

    Args:
        examples: the first values of each column; more than SHOWN if the column has more.
        count: number of rows.
        first: the first row.
        path: the file's path.
        key: the source's dotted key.
    """
    for name, values in examples.items():
        if not values:
            return ConfigError(f"{key}.where: no row of {path} has a value for {name!r}; the first one has {', '.join(_names(first))}")
    description = "; ".join(
        f"{name} is {', '.join(f'{value!r:.40}' for value in values[:SHOWN])}{', ...' if len(values) > SHOWN else ''}"
        for name, values in examples.items()
    )
    return ConfigError(f"{key}.where: selects none of the {count:,} rows of {path}, where {description}")


def _names(row: dict[str, Any]) -> list[str]:
    return [
        one_line(name)
        for outer, value in row.items()
        for name in ([f"{outer}.{one}" for one in value] if isinstance(value, dict) else [outer])
    ]
