"""Its return value, and what it prints and raises."""

import os
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tests.unit.sandbox.attacks import HOSTILE, hostile


class Evil(float):
    def __float__(self) -> float:
        raise SystemError("no")

    def __repr__(self) -> str:
        os._exit(7)


class Raises(Exception):
    def __str__(self) -> str:
        raise ValueError("and again")


HOSTILE.update(
    an_evil_number=lambda meta: Evil(1),
    ten_thousand_parts=lambda meta: {"score": 1.0} | {f"part {number}": 1.0 for number in range(10_000)},
    a_part_with_a_long_name=lambda meta: {"score": 1.0, "x" * 1_000_000: 1.0},
    a_number_too_large=lambda meta: 10**400,
    a_number_whose_square_overflows=lambda meta: 1e308,
    a_decimal=lambda meta: Decimal(1),
    a_fraction=lambda meta: Fraction(1, 2),
    a_complex_number=lambda meta: 1j,
)


@hostile
def an_exception_that_raises(meta: dict[str, Any]) -> Any:
    raise Raises


@hostile
def a_long_exception(meta: dict[str, Any]) -> Any:
    raise ValueError("x" * 10_000_000)


@hostile
def an_exception_that_clears_the_screen(meta: dict[str, Any]) -> Any:
    raise type("\x1b[2J\n\nmegarl: done", (Exception,), {})("\x1b]0;title\x07")


@hostile
def prints_that_clear_the_screen(meta: dict[str, Any]) -> float:
    os.write(2, b"\x1b[2J\x1b[31mred\n")
    return 1.0


@hostile
def prints_without_end(meta: dict[str, Any]) -> float:
    for _ in range(100):
        os.write(1, b"x" * 99_999 + b"\n")
    return 1.0
