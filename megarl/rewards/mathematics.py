"""math-verify as a verifier. It runs only in the scoring processes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megarl.data.answers import Answer
from megarl.rewards.golds import (
    SHOWN,
    bad,
    bare,
    expression,
    fault_of,
    is_word,
    numeral,
    plain_powers,
    split_unit,
    texts_of,
    textual,
    value_of,
)

DOLLARS = re.compile(r"(?<!\\)\$([^$\\]*(?:\\.[^$\\]*)*)\$(?!\d)")
JOINED = re.compile(r"(?:[\s,;]|\band\b|\bor\b)*")
BOXES = re.compile(r"\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[\s$,;]*(?:and|or)?[\s$,;]*\\boxed")  # of which none is the answer alone
DECIMALS, SMALL = 6, 1e-4  # math-verify's decimals in comparisons of floats; below SMALL, as many significant digits


@dataclass(frozen=True)
class Gold:
    """One acceptable answer, as it was read."""

    text: str | None  # what it is compared as, unless it is mathematics
    number: Fraction | None  # exactly, if it is a number in digits
    readings: list[Any]  # math-verify's: expressions, and the text
    decimals: int  # after the point, to which floats are compared
    unit: str | None


class MathVerify:
    """Scores a response 1 if its answer equals one of the row's answers, else 0.

    Words and codes are compared as text, numbers in digits exactly; everything else, and numbers that differ, by math-verify. Of two
    different units none is right; a response may leave the unit out.
    """

    def __init__(self) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        # math-verify's time limits use signal.alarm, of which a process has only one, and ours uses it; without them it warns at each call.
        for module in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(module).setLevel(logging.ERROR)
        settings = LatexExtractionConfig().normalization_config
        # Units are ours: math-verify drops whatever stands in \text{} at the end, and letters such as h, s and t.
        self._kinds = [LatexExtractionConfig(normalization_config=replace(settings, units=False)), ExprExtractionConfig()]
        self._parse, self._verify = parse, verify
        self._gold = lru_cache(4096)(self._read)

    def __call__(self, prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Raises BadGold if an answer of the row cannot be read."""
        golds = [self._gold(text) for text in texts_of(answer)]
        boxed = last_box(response)
        own = bare(response if boxed is None else boxed)
        if not own:
            return 0.0, {}
        text, (_, unit) = textual(own), split_unit(own)
        if text is not None and text in [gold.text for gold in golds]:
            return 1.0, {}
        golds = [gold for gold in golds if gold.text is None and (gold.unit == unit or None in (gold.unit, unit))]
        if not golds or (text is not None and any(character.isdigit() for character in text)):
            return 0.0, {}
        digits = None if boxed is None else numeral(own)
        if digits is not None and value_of(digits) in [gold.number for gold in golds]:
            return 1.0, {}
        latex = None if boxed is None or fault_of(own) is not None else digits or expression(own)
        readings = self._readings(plain_powers(response) if latex is None else _box(latex))
        compared = (self._verify(gold.readings, readings, float_rounding=gold.decimals, timeout_seconds=None) for gold in golds)
        return float(any(compared)), {}

    def check_gold(self, answer: Answer) -> None:
        """Raise BadGold unless every answer of a row is read as it is written, and scores 1 as a response."""
        for text in texts_of(answer):
            gold, response = self._gold(text), _box(self._own(text))
            if self("", response, text, {})[0] != 1.0:
                raise bad(text, f"is read by math-verify as {_shown(gold.readings[0])}, for which {response!r:.{SHOWN}} would score 0")

    def _own(self, text: str) -> str:
        r"""Return the answer within a gold: what follows GSM8K's `####`, or what the last \boxed{} holds. Raises BadGold for several."""
        last = text.rpartition("####")[2]
        if (content := last_box(last)) is not None:
            if BOXES.search(last):
                raise bad(text, "has several answers, each in a \\boxed{}")
            return bare(content)
        own = bare(last)
        spans = DOLLARS.findall(own)
        if not spans or numeral(own) is not None:
            price = re.fullmatch(r"[A-Za-z][^\d$]*\s(\$[\d.,]*\d)", own)  # as in "The cost is $5"
            return own if price is None else price[1]
        outside = DOLLARS.sub(" ", own).strip(" .")
        whole = DOLLARS.sub(r"\1", own)
        if JOINED.fullmatch(outside) or split_unit(whole)[1] is not None:
            return bare(whole)
        if len(spans) > 1 or re.search(r"[\d$]", outside):
            raise bad(text, "has several formulas")
        return bare(spans[0])

    def _read(self, text: str) -> Gold:
        own = self._own(text)
        if (fault := fault_of(own)) is not None:
            raise bad(text, fault)
        if (words := textual(own)) is not None:
            return Gold(words, None, [own], DECIMALS, None)
        digits = numeral(own)
        readings = self._readings(_box(digits or expression(own)))
        if not readings or isinstance(readings[0], str):
            raise bad(text, "is no mathematical expression that math-verify can read")
        if digits is None and _misread(readings):
            raise bad(text, f"is read by math-verify as {_shown(readings[0])}")
        return Gold(None, None if digits is None else value_of(digits), readings, _decimals(readings[0]), split_unit(own)[1])

    def _readings(self, text: str) -> list[Any]:
        return list(self._parse(text, self._kinds, parsing_timeout=None))


def last_box(text: str) -> str | None:
    r"""Return what the last \boxed{} of a text holds, whatever stands before it: nothing if it is not closed; None without any."""
    starts = [match.end() for match in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]
    if not starts:
        return None
    content, depth = text[starts[-1] :], 1
    for place, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[:place]
    return ""


def _box(latex: str) -> str:
    return f"\\boxed{{{latex}}}"


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
