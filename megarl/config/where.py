"""Conditions on the columns of rows: a value, a list of accepted values, or the range {min, max} of a number."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field


def _checked(where: dict[str, Any]) -> dict[str, Any]:
    """Return the conditions, by column. Raise ValueError for a malformed one."""
    for column, condition in where.items():
        if not isinstance(condition, Mapping):
            values = condition if isinstance(condition, list) else [condition]
            if not values or not all(isinstance(value, str | int | float) for value in values):
                raise ValueError(f"{column}: must be strings, numbers, true or false, or a mapping of min and max (got {condition!r:.80})")
            continue
        if not condition or not condition.keys() <= {"min", "max"} or not all(map(_is_number, condition.values())):
            raise ValueError(f"{column}: a range has the numbers min, max or both (got {condition!r:.80})")
        if condition.get("min", -math.inf) > condition.get("max", math.inf):
            raise ValueError(f"{column}: min={condition['min']} is above max={condition['max']}")
    return where


MEANING = (
    "Selects rows by conditions on their columns, all of which must hold, such as {data_source: gsm8k, extra_info.level: [1, 2], "
    "pass_rate: {min: 0.2, max: 0.8}}; a dot looks inside dictionaries."
)
Where = Annotated[dict[str, Any], Field(max_length=64, description=MEANING), AfterValidator(_checked)]


def takes(condition: Any, value: object) -> bool:
    """Return whether a condition accepts a row's value. None (a missing value) is never accepted; 1 equals 1.0, but not true or "1"."""
    if isinstance(condition, Mapping):
        return _is_number(value) and condition.get("min", -math.inf) <= value <= condition.get("max", math.inf)
    values = condition if isinstance(condition, list) else [condition]
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
