"""math-verify as a verifier. It runs only in the scoring processes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megarl.data.answers import Answer
from megarl.rewards.golds import (
    SHOWN,
    bad,
    bare,
    ends_in_variable,
    expression,
    fault_of,
    is_word,
    numeral,
    plain_powers,
    texts_of,
    value_of,
)

DECIMALS, SMALL = 6, 1e-4  # math-verify's decimals in comparisons of floats; below SMALL, as many significant digits


@dataclass(frozen=True)
class Gold:
    """One acceptable answer, as it was read."""

    number: Fraction | None  # exactly, if it is a number in digits
    readings: list[Any]  # math-verify's: expressions, and the text
    decimals: int  # after the point, to which floats are compared
    units: bool  # whether a letter after a number may be a unit, which math-verify drops


class MathVerify:
    """Scores a response 1 if its answer equals one of the row's answers, else 0.

    Numbers in digits are compared exactly first; everything else, and numbers that differ, by math-verify.
    """

    def __init__(self) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
        from math_verify.parser import normalize_latex

        # math-verify's time limits use signal.alarm, of which a process has only one, and ours uses it; without them it warns at each call.
        for module in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(module).setLevel(logging.ERROR)
        settings = LatexExtractionConfig().normalization_config
        self._kinds = {
            units: [LatexExtractionConfig(normalization_config=replace(settings, units=units)), ExprExtractionConfig()]
            for units in (True, False)
        }
        boxed = replace(settings, basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="last")
        self._boxed: Callable[[str], str] = lambda text: str(normalize_latex(text, boxed))
        self._parse, self._verify = parse, verify
        self._gold = lru_cache(4096)(self._read)

    def __call__(self, prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Raises BadGold if an answer of the row cannot be read."""
        golds = [self._gold(text) for text in texts_of(answer)]
        boxed = self._content(response)
        digits = None if boxed is None else numeral(boxed)
        if digits is not None and value_of(digits) in [gold.number for gold in golds]:
            return 1.0, {}
        latex = boxed if boxed is None or fault_of(boxed) is not None else digits or expression(boxed)
        text = plain_powers(response) if latex is None or latex == boxed else _box(latex)
        readings = {units: self._readings(text, units) for units in {gold.units for gold in golds}}
        compared = (self._verify(gold.readings, readings[gold.units], float_rounding=gold.decimals, timeout_seconds=None) for gold in golds)
        return float(any(compared)), {}

    def check_gold(self, answer: Answer) -> None:
        """Raise BadGold unless every answer of a row is read as it is written, and scores 1 as a response."""
        for text in texts_of(answer):
            gold, response = self._gold(text), _marked(self._own(text))
            if self("", response, text, {})[0] != 1.0:
                raise bad(text, f"is read by math-verify as {_shown(gold.readings[0])}, for which {response!r:.{SHOWN}} would score 0")

    def _content(self, text: str) -> str | None:
        r"""Return what the last \boxed{} holds; None if there is none."""
        return bare(self._boxed(text)) if "\\boxed" in text or "\\fbox" in text else None

    def _own(self, text: str) -> str:
        r"""Return the answer within a text: what follows GSM8K's `####`, or what the last \boxed{} holds."""
        last = text.rpartition("####")[2]
        content = self._content(last)
        return bare(last) if content is None else content

    def _read(self, text: str) -> Gold:
        own = self._own(text)
        if (fault := fault_of(own)) is not None:
            raise bad(text, fault)
        digits = numeral(own)
        latex = digits or expression(own)
        units = not ends_in_variable(latex)
        readings = self._readings(_marked(latex), units)
        if not readings or isinstance(readings[0], str):
            raise bad(text, "is no mathematical expression that math-verify can read")
        if digits is None and _misread(readings):
            raise bad(text, f"is read by math-verify as {_shown(readings[0])}")
        return Gold(None if digits is None else value_of(digits), readings, _decimals(readings[0]), units)

    def _readings(self, text: str, units: bool) -> list[Any]:
        return list(self._parse(text, self._kinds[units], parsing_timeout=None))


def _box(latex: str) -> str:
    return f"\\boxed{{{latex}}}"


def _marked(text: str) -> str:
    r"""Return a text whose mathematics is marked: what is in dollars, or else all of it. A bare `x^2+1` would be read as the number 1."""
    return text if re.search(r"(?<!\\)\$", text) and numeral(text) is None else _box(text)


def _misread(readings: list[Any]) -> bool:
    """Return whether math-verify has taken words beside numbers for products of letters, or digits for a product with 0."""
    if any(term.is_Mul and any(factor.is_zero for factor in term.args) for term in _terms(readings[0])):
        return True
    text = re.sub(r"\\(?:begin|end|text\w*|math\w*|mbox|operatorname)\s*\{[^{}]*\}", " ", str(readings[-1]))
    if "\\begin" in str(readings[-1]) and "matrix" not in str(readings[-1]):
        return True  # a system of equations, of which only the last one is read
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]+", text)
    return any(character.isdigit() for character in text) and any(map(is_word, words))


def _terms(expression: Any) -> Iterator[Any]:
    """Yield a sympy expression and all within it; of a matrix and the like nothing."""
    if getattr(expression, "is_Mul", None) is not None:
        yield expression
        for term in expression.args:
            yield from _terms(term)


def _decimals(reading: Any) -> int:
    """Return to how many decimals floats are compared with an answer: math-verify's six, or six significant digits of a small one."""
    try:
        size = abs(float(reading.evalf(3))) if reading.is_number else 0.0
    except (TypeError, ValueError, OverflowError, AttributeError):  # complex, infinite, a matrix, a relation
        return DECIMALS
    return DECIMALS - math.floor(math.log10(size)) if 0 < size < SMALL else DECIMALS


def _shown(reading: Any) -> str:
    return f"{reading!s:.{SHOWN}}"
