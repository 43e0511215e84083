"""Rows whose answers keep the digits that were written, although JSON's and Arrow's readers round.

In a `name`, the column of the answers, a dot looks inside dictionaries; if it is empty, there are none.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.answers import exact
from megarl.data.columns import find, find_in_table
from megarl.strict_json import parse_json

if TYPE_CHECKING:
    import pyarrow


def exact_row(row: dict[str, Any], line: bytes, name: str) -> dict[str, Any]:
    """Return a row of JSONL with all digits of its answer.

    Args:
        row: the row's columns.
        line: the line that they were parsed from.
        name: the column of the answer.
    """
    if name and isinstance(find(row, name), float | list | dict):
        return row | {name: exact(find(parse_json(line, Decimal), name))}
    return row


def exact_rows(table: pyarrow.Table | pyarrow.RecordBatch, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table; an answer of 1234.56 in a float32 column is 1234.56, not 1234.56005859375."""
    import pyarrow

    rows: list[dict[str, Any]] = table.to_pylist()
    whole = table if isinstance(table, pyarrow.Table) else pyarrow.Table.from_batches([table])
    column = find_in_table(whole, name) if name else None
    if column is None or "float" not in str(column.type):  # Arrow's names are halffloat, float and double
        return rows
    return [row | {name: _widened(find(row, name), column.type)} for row in rows]


def _widened(value: Any, kind: pyarrow.DataType) -> Any:
    """Return a value of an Arrow type, with the shortest float64 instead of each float32 and float16 that reads as the same one."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str((np.float32 if types.is_float32(kind) else np.float16)(value)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_widened(one, kind.value_type) for one in value]
    if types.is_struct(kind):
        return {field.name: _widened(value[field.name], field.type) for field in kind}
    return value
