"""math-verify as a verifier. It runs only in the scoring processes."""

import logging
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megarl.data.answers import Answer
from megarl.rewards.golds import (
    LABEL,
    SHOWN,
    Meaning,
    bad,
    bare,
    decimals_of,
    golds_of,
    numeral,
    plain_powers,
    read,
    same_number,
)
from megarl.text.reasoning import after_reasoning

DOLLARS = re.compile(r"(?<!\\)\$([^$\\]*(?:\\.[^$\\]*)*)\$(?!\d)")
JOINED = re.compile(r"(?:[\s,;]|\band\b|\bor\b)*")
BOXES = re.compile(r"\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[\s$,;]*(?:and|or)?[\s$,;]*\\boxed")  # of which none is the answer alone
APPROXIMATE = re.compile(r"\\(?:approx|simeq|doteq)(?![A-Za-z])|≈|~=")
NAME = re.compile(r"\\?[A-Za-z]+(?:_\w+)?(?:\(\w*\))?")  # of what an equation gives the value of
LETTERS_BETWEEN = re.compile(r"\d\s*(?!(?:and|or|pi|ln|log|sin|cos|tan)\b)[A-Za-z]+\s*\d")  # as in 7 R 2
_box = r"\boxed{{{}}}".format
Gold = tuple[Meaning, int]  # one acceptable answer, and to how many decimals floats are compared with it


class MathVerify:
    """Scores a response 1 if its answer equals one of the row's answers, else 0.

    Words, codes and numbers are compared as such, all else by math-verify. Of two different units none is right; a response may leave the
    unit out. An equation of numbers that differ is not right. Tuples have an order, sets have none, and a list without brackets is either.
    """

    def __init__(self) -> None:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
        from math_verify.grader import Tuple, sort_key

        # math-verify's time limits use signal.alarm, of which a process has only one, and ours uses it; without them it warns at each call.
        for module in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(module).setLevel(logging.ERROR)
        settings = LatexExtractionConfig().normalization_config
        # Units are ours: math-verify drops whatever stands in \text{} at the end, and letters such as h, s and t.
        self._formula = [LatexExtractionConfig(normalization_config=replace(settings, units=False))]
        self._anything = [*self._formula, ExprExtractionConfig()]  # where no formula is read, the last number
        self._parse, self._verify, self._tuple, self._key = parse, verify, Tuple, sort_key
        self._golds, self._boxed = lru_cache(4096)(self._read), lru_cache(4096)(lambda latex: self._parsed(_box(latex), self._formula))

    def __call__(self, prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, dict[str, float]]:
        """Raises BadGold if an answer of the row cannot be read."""
        golds = [gold for text in golds_of(answer) for gold in self._golds(text)]
        response = after_reasoning(response)
        if (box := last_box(response)) is None:
            return float(self._is_right(golds, read(bare(response)), response)), {}
        return float(any(self._is_right(golds, read(own)) for own in self._answers(bare(box)))), {}

    def check_gold(self, answer: Answer) -> None:
        """Raise BadGold unless every answer of a row is read as it is written, and scores 1 as a response."""
        for text in golds_of(answer):
            [(gold, _), *_], response = self._golds(text), _box(self._own(text))
            if self("", response, text, {})[0] != 1.0:
                expression = f"{self._boxed(gold.latex)[0]!s:.{SHOWN}}"
                raise bad(text, f"is read by math-verify as {expression}, for which {response!r:.{SHOWN}} would score 0")

    def _is_right(self, golds: list[Gold], own: Meaning, unboxed: str | None = None) -> bool:
        """Return whether a response's answer equals one of the golds.

        Args:
            golds: the acceptable answers.
            own: the response's answer.
            unboxed: the response, if its answer is not in a box, but somewhere in it.
        """
        if own.kind in ("text", "formula") and any(
            (gold.kind, gold.value, gold.unit) == (own.kind, own.value, own.unit) for gold, _ in golds
        ):
            return True
        golds = [
            (gold, decimals) for gold, decimals in golds if gold.kind != "text" and (gold.unit == own.unit or None in (gold.unit, own.unit))
        ]
        if own.kind == "number":
            if any(gold.kind == "number" and same_number(gold, own, decimals) for gold, decimals in golds):
                return True
            golds = [(gold, decimals) for gold, decimals in golds if gold.kind == "formula"]
        if not golds or (own.kind == "unclear" and unboxed is None) or (own.kind == "text" and any(map(str.isdigit, own.value))):
            return False
        parsed = self._boxed(own.latex) if unboxed is None or own.kind == "number" else self._parsed(plain_powers(unboxed), self._anything)
        return any(self._equal(self._boxed(gold.latex), parsed, decimals) for gold, decimals in golds)

    def _answers(self, own: str) -> list[str]:
        """Return what a box offers: an answer, or a choice and its value, or what is approximated and a number near it."""
        if (label := LABEL.fullmatch(own)) is not None:
            return [label["choice"], label["value"]]
        *parts, last = (part.strip() for part in APPROXIMATE.split(own))
        if not parts:
            return [own]
        size, rounded = self._size(read(parts[0])), read(last)
        if size is None or rounded.kind != "number" or rounded.unit == "percent":
            return [part for part in (parts[0], last) if part and not NAME.fullmatch(part)]
        digits = rounded.value.partition(".")
        step = Fraction(1, 10 ** len(digits[2])) if digits[1] else 10 ** (len(digits[0]) - len(digits[0].rstrip("0")))
        return [parts[0], last] if abs(size - rounded.number) < step else []

    def _size(self, reading: Meaning) -> Fraction | None:
        """Return the value of a real number, exactly if it is in digits; None for what is none."""
        if reading.kind == "number":
            return reading.number
        try:
            value = _sides(self._boxed(reading.latex)[0])[-1]
            return Fraction(float(value.evalf())) if value.is_number else None
        except (TypeError, ValueError, OverflowError, AttributeError, IndexError):  # complex, infinite, a matrix, a relation, nothing
            return None

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
        if JOINED.fullmatch(outside) or read(whole).unit is not None:
            return bare(whole)
        if len(spans) > 1 or re.search(r"[\d$]", outside):
            raise bad(text, "has several formulas")
        return bare(spans[0])

    def _read(self, text: str) -> list[Gold]:
        """Return what a gold says: one answer, or two of an approximation. Raises BadGold for what cannot be read."""
        own = self._own(text)
        if (reading := read(own)).kind == "unclear":
            raise bad(text, reading.value)
        readings = [read(one) for one in self._answers(own)]
        formulas = [self._boxed(reading.latex) for reading in readings if reading.kind == "formula"]
        if not readings or [] in formulas:
            raise bad(text, "equates numbers that differ")
        for formula in formulas:
            expression = self._parsed(_box(formula[-1]), self._anything)[0]
            if isinstance(expression, str):
                raise bad(text, "is no mathematical expression that math-verify can read")
            if isinstance(formula[0], str) or _misread(formula):
                raise bad(text, f"is read by math-verify as {expression!s:.{SHOWN}}")
        return [(reading, decimals_of(abs(self._size(reading) or Fraction()))) for reading in readings]

    def _parsed(self, text: str, kinds: list[Any]) -> list[Any]:
        """Return math-verify's expression and its text: of an equation of numbers the last, and nothing if they differ."""
        parsed = list(self._parse(text, kinds, parsing_timeout=None))
        for equation in parsed[0].args if _brackets(parsed) in ("{", ",") else parsed[:1]:
            sides = _sides(equation)
            numbers = [side for side in sides if getattr(side, "is_number", False)]
            if any(not self._verify([number], [numbers[-1]], timeout_seconds=None) for number in numbers[:-1]):
                return []
            if len(sides) == len(numbers) > 1 and equation is parsed[0]:
                parsed[0] = sides[-1]
        return parsed

    def _equal(self, gold: list[Any], own: list[Any], decimals: int) -> bool:
        """Return whether math-verify takes two expressions for equal, and their brackets do not say otherwise.

        Args:
            gold: the right expression and its text.
            own: the response's.
            decimals: to which floats are compared.
        """
        brackets, members = _brackets(gold), _members(gold)
        match brackets, _brackets(own):
            case ("{", "(") | ("(", "{"):
                return False
            case ("(", "," | "(") | (",", "("):
                gold, own = ([self._tuple(*_members(one)) if _brackets(one) == "," else _sides(one[0])[-1]] for one in (gold, own))
            case (",", ",") if len(members) > len(set(members)):  # in a set, 3, 3, 5 is 3, 5
                gold, own = ([self._tuple(*sorted(_members(one), key=self._key))] for one in (gold, own))
        return bool(self._verify(gold, own, float_rounding=decimals, allow_set_relation_comp=True, timeout_seconds=None))


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


def _sides(expression: Any) -> list[Any]:
    """Return the sides of an equation or of a chain of them, and of another expression itself."""
    equations = expression._unsorted_args if type(expression).__name__ == "And" else [expression]
    return [side for one in equations for side in (one.args if type(one).__name__ == "Equality" else [one])]


def _brackets(parsed: list[Any]) -> str:
    """Return what stands around the members of an answer: `{`, `(` or `[` as `(`, or a comma between them for nothing."""
    kind = type(_sides(parsed[0])[-1]).__name__ if parsed else ""
    if kind == "FiniteSet":
        return "{" if re.search(r"(?:^|=|\\in)\s*\\?\{", str(parsed[-1])) else ","
    return "(" if kind in ("Tuple", "Interval") else ""


def _members(parsed: list[Any]) -> list[Any]:
    """Return the members of a list in the order in which they are written."""
    return list(getattr(_sides(parsed[0])[-1], "_unsorted_args", [])) if parsed else []


def _misread(parsed: list[Any]) -> bool:
    """Return whether math-verify has taken words beside numbers for products of letters, or digits for a product with 0."""
    from math_verify.grader import Mul

    products = parsed[0].atoms(Mul) if hasattr(parsed[0], "atoms") else []
    system = "\\begin" in str(parsed[-1]) and "matrix" not in str(parsed[-1])  # of equations, of which only the last one is read
    if system or str(parsed[0]) in ("zoo", "nan") or any(factor.is_zero for product in products for factor in product.args):
        return True
    text = re.sub(r"\\(?:begin|end|text\w*|math\w*|mbox|operatorname)\s*\{[^{}]*\}", " ", str(parsed[-1]))
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]+", text)
    return any(map(str.isdigit, text)) and (any(map(_is_word, words)) or LETTERS_BETWEEN.search(text) is not None)


def _is_word(letters: str) -> bool:
    """Return whether letters beside digits may be a word: three at least, and not in the order of the alphabet, as in the product abcd."""
    return len(letters) >= 3 and list(letters.casefold()) != sorted(letters.casefold())
