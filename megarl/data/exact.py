"""Rows that keep the digits that were written, although JSON's and Arrow's readers round.

In a `name`, the column of the answers, a dot looks inside dictionaries; if it is empty, there are none.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.answers import exact
from megarl.data.columns import find
from megarl.text.strict_json import parse_json

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
    """Return the rows of a table: 0.1 in float32, in a column of answers or at any depth of a nested one, is 0.1; a map is an object."""
    from pyarrow import types

    rows: list[dict[str, Any]] = table.to_pylist()
    kinds = {field.name: field.type for field in table.schema if field.name == name or types.is_nested(field.type)}
    kinds = {column: kind for column, kind in kinds.items() if re.search("float|map<", str(kind))}  # halffloat, float; not double
    return [row | {column: _exact(row[column], kind) for column, kind in kinds.items()} for row in rows] if kinds else rows


def _exact(value: Any, kind: pyarrow.DataType) -> Any:
    """Return a value of an Arrow type.

    Each float32 and float16 becomes the shortest float64 that reads as the same one; a map whose keys are different texts a dictionary.
    """
    from pyarrow import types

    if value is None:
        return None
    if types.is_float32(kind) or types.is_float16(kind):
        return float(str((np.float32 if types.is_float32(kind) else np.float16)(value)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_exact(one, kind.value_type) for one in value]
    if types.is_struct(kind):
        return {field.name: _exact(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        items = [(name, _exact(item, kind.item_type)) for name, item in value]
        whole = types.is_string(kind.key_type) and len(dict(items)) == len(items)
        return dict(items) if whole else items
    return value
