"""Reference answers as the rows of a source give them: any JSON value but null, every number with its exact decimal value.

A number is the float that is written with the same digits, or, where no float is, the text of its digits: as a float, 123456789012345678.0
would be 123456789012345680. This module is imported in the sandbox, so it imports nothing heavy.
"""

import json
import math
from decimal import Decimal
from typing import Any

from megarl.errors import ConfigError

Answer = str | bool | int | float | list[Any] | dict[str, Any]


def checked_answer(value: Any, place: str, name: str) -> Answer:
    """Return the answer of a row.

    Args:
        value: the column's value.
        place: the row's name in messages.
        name: the column's name.

    Raises:
        ConfigError: the value, or one within it, is not one of JSON, not finite, or an empty list.
    """
    answer: Answer = exact(value)
    fault = _fault(answer)
    if fault is not None or answer == []:
        fault_text = fault or "an empty list"
        raise ConfigError(f"{place}: {name} must be a text, a finite number, or a list or an object of these, not {fault_text}")
    return answer


def text_of(answer: Answer) -> str:
    """Return an answer as text: a number in plain digits, as in 0.00001 for 1e-05; a list or an object in JSON."""
    match answer:
        case str():
            return answer
        case float():
            return format(Decimal(repr(answer)), "f")
        case _:
            return json.dumps(answer, ensure_ascii=False)


def response_of(answer: Answer) -> str:
    """Return a right response as text: of a list of answers, the first."""
    return text_of(answer[0] if isinstance(answer, list) else answer)


def exact(value: Any) -> Any:
    """Replace each Decimal within a value by the float that is written with the same digits, or else by its text."""
    if isinstance(value, Decimal):
        number = float(value)
        return number if not math.isfinite(number) or Decimal(repr(number)) == value else format(value, "f")
    if isinstance(value, list):
        return [exact(one) for one in value]
    return {name: exact(one) for name, one in value.items()} if isinstance(value, dict) else value


def _fault(value: Any) -> str | None:
    """Return what within a value is neither null nor a finite value of JSON, as text; None if there is nothing such."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return next((fault for one in inner if (fault := _fault(one)) is not None), None)
    finite = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return None if finite else f"{value!r:.80}"
