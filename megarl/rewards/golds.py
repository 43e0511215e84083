r"""Reference answers and boxed answers as math-verify must be given them, so that it reads the value that was written.

math-verify 0.9.0 reads `1e-05` as e - 5, `1 000` as 0, `12.` and `90°` not at all, `10 dollars` as a product of letters, and rounds
6.02 x 10^23 to a double before it compares. What is certain is rewritten here, on both sides alike; what is not is refused (`fault_of`).

This module is imported in the sandbox and by checks, so it imports nothing heavy.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from math import gcd
from typing import Any

from megarl.data.answers import Answer, text_of

SHOWN = 80  # characters of an answer in messages
LONGEST, LARGEST_POWER = 1000, 1000  # characters of a numeral, and its power of ten: both bound what its digits take

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE_TEXT = re.compile(rf"\\(?:text|textrm|mathrm|mbox)\s*\{{\s*((?:{'|'.join(SCALES)})\b[^{{}}]*)\}}$")
DIGITS = r"(?:[1-9]\d{0,2}(?P<gap>,|[ _]|\\,|\{,\})\d{3}(?:(?P=gap)\d{3})*(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
POWER = r"[eE](?P<e>[+-]?\d{1,4})|\s*(?:\\times|\\cdot|[×⋅*x])\s*10\s*(?:\^|\*\*)\s*(?P<ten>[+-]?\d{1,4}|\{[+-]?\d{1,4}\}|\([+-]?\d{1,4}\))"
CURRENCY = r"(?:USD|EUR|GBP|INR|JPY|CNY|(?:US|AU|CA|HK|NT|A|C|S)?\\?\$|\\text\{\\?\$\}|[€£¥₹₩₽]|\\pounds|\\euro(?:\{\})?|Rs\.?)"
UNIT = r"(?:\\(?:text|textrm|mathrm|mbox|rm)\s*\{[^{}\\%]*\}|[A-Za-z][A-Za-z ./]*)(?:\^?\{?[23]\}?)?"
SPACE = r"(?:\s|\\[ ,;:!])*"
TAIL = re.compile(rf"(?<=[\d}}]){SPACE}(?P<unit>{UNIT})$")
TIME = re.compile(r"(?P<hour>\d\d?):(?P<minute>[0-5]\d)\s*(?P<half>[AaPp])?(?:\.?[Mm]\.?)?")
NUMERAL = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:{CURRENCY}{SPACE})?(?P<inner>[+-]?)(?P<digits>{DIGITS})(?:{POWER})?"
    rf"(?:{SPACE}(?:{CURRENCY}|(?P<scale>{'|'.join(SCALES)})?{SPACE}(?P<unit>{UNIT})?))?"
)
MIXED = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d+)\s+(?P<over>\d+)/(?P<under>\d+)")
REPEATING = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d*)\.(?P<once>\d*)(?:\\overline\s*\{(?P<bar>\d+)\}|\((?P<again>\d+)\))")
SHORT_UNITS = re.compile(
    "[kcmn]m|[km]?g|lbs?|oz|m[lL]|cc|ft|in|yd|mi|hrs?|mins?|secs?|ms|[mk]ph|kmh|[kM]?Hz|kWh?|kJ|k?Pa|mol|eV|[KMGT]B|sq|"
    "cups?|tsp|tbsp|tons?|days?|men|pcs|USD|EUR|GBP|INR|JPY|CNY|CAD|AUD"
)
FUNCTIONS = "pi|log|ln|a?(?:rc)?(?:sin|cos|tan)h?|cot|sec|csc|exp"
NO_UNITS = re.compile(  # words after a number that change what it means
    f"{FUNCTIONS}|sqrt|mod|choose|and|or|to|percent|percentage|pct|hundred|[mbtr]+illion|thousand|dozen|half|halves|thirds?|quarters?|inf|"
    "infinity|infty|than|more|less|least|most|about|times|plus|minus|over|squared|cubed|base|remainder|if|when|where|for|factorial",
    re.IGNORECASE,
)
SCIENTIFIC = re.compile(r"(?<![\w.\\])(?P<digits>\d+(?:\.\d*)?|\.\d+)[eE](?P<e>[+-]?\d{1,3})(?!\w|\.\d)")

SIGNS = str.maketrans(
    dict.fromkeys("−–‑－", "-")
    | dict.fromkeys("\u00a0\u2009\u202f~", " ")
    | {"∞": r"\infty ", "°": r"^\circ ", "·": r"\cdot ", "∪": r"\cup ", "∩": r"\cap "}
    | {half: f"\\frac{{{over}}}{{{under}}}" for half, over, under in ("½12", "¼14", "¾34", "⅓13", "⅔23", "⅕15", "⅛18")}
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
BARE = re.compile(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])")
ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt(?:\s*\(([^()]*)\))?(?![A-Za-z])")
OPAQUE = ("\\text", "\\mathrm", "\\operatorname", "\\mbox")
WRAPPERS = re.compile(r"\*\*(?P<bold>.+)\*\*|\\(?:textbf|mathbf|boldsymbol|bm|text|mathrm)\s*\{(?P<inner>[^{}]*)\}", re.DOTALL)
SPANS = (
    re.compile(r"\$\$?(?P<math>[^$\\]*(?:\\.[^$\\]*)*)\$\$?", re.DOTALL),
    re.compile(r"\\\((?P<math>.+)\\\)"),
    re.compile(r"\\\[(?P<math>.+)\\\]"),
)


class BadGold(ValueError):
    """A reference answer that the verifier cannot read, or does not read as it is written."""


def bad(answer: Any, fault: str) -> BadGold:
    """Return the error for an answer; `fault`: what is wrong, after "the answer ..."."""
    return BadGold(f"the answer {answer!r:.{SHOWN}} {fault}")


def texts_of(answer: Answer) -> list[str]:
    """Return the acceptable answers of a row, each as text. Raises BadGold for what has no text."""
    answers = answer if isinstance(answer, list) else [answer]
    for one in answers:
        if isinstance(one, bool | list | dict) or one is None:
            raise bad(one, "is neither a text nor a number, nor a list of them")
    return [text_of(one) for one in answers]


def bare(text: str) -> str:
    """Return an answer without the dollars around it and the point after it."""
    text = text.strip()
    for _ in range(2):  # "$12.$" and "$12$."
        text = text[:-1].rstrip() if re.search(r"[\w})$\]]\.$", text) else text
        for span in SPANS:
            if (match := span.fullmatch(text)) is not None and r"\(" not in match["math"] and r"\[" not in match["math"]:
                text = match["math"].strip()
    return text


def numeral(text: str) -> str | None:
    r"""Return the number that an answer is certain to mean, in the digits in which it is written: `0.00001`, or `\frac{1}{3}`.

    Currency signs, units, thousands separators, powers of ten and words such as million are understood; percent signs are math-verify's.
    """
    if len(text) > LONGEST:
        return None
    text = _signed(text).strip()
    if (wrapped := WRAPPERS.fullmatch(text)) is not None:
        text = (wrapped["bold"] or wrapped["inner"] or "").strip()
    text = SCALE_TEXT.sub(r" \1", re.sub(r"\s*\^\s*\{?\\circ\}?$", "", text))
    if (match := MIXED.fullmatch(without_unit(text))) is not None and int(match["under"]):
        whole, over, under = (int(match[name]) for name in ("whole", "over", "under"))
        return f"{match['sign'].strip('+')}\\frac{{{whole * under + over}}}{{{under}}}"
    if (match := REPEATING.fullmatch(text)) is not None:
        return _repeating(match)
    match = NUMERAL.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]) or not _is_unit(match["unit"]):
        return None
    power = int((match["e"] or match["ten"] or "0").strip("{}()")) + SCALES.get(match["scale"] or "", 0)
    if abs(power) > LARGEST_POWER:
        return None
    digits = re.sub(r"[^\d.]", "", match["digits"]).rstrip(".")
    number = Decimal(digits).scaleb(power) if power else Decimal(digits)
    return ("-" if "-" in (match["sign"], match["inner"]) else "") + format(number, "f")


def value_of(digits: str) -> Fraction:
    """Return the value of what `numeral` has returned."""
    if (match := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", digits)) is not None:
        return Fraction(int(match[1] + match[2]), int(match[3]))
    return Fraction(digits)


def expression(text: str) -> str:
    """Return LaTeX, rewritten for math-verify: words, Unicode signs, powers of ten, names of functions; the rest as it is."""
    if re.fullmatch(r"[A-Za-z][A-Za-z' -]*", text) and not BARE.search(text) and any(map(is_word, re.findall("[A-Za-z]+", text))):
        return f"\\text{{{text}}}"  # otherwise a product of letters, equal to that of any other order of them
    if (time := TIME.fullmatch(text)) is not None and (time["half"] or gcd(int(time["hour"]), int(time["minute"])) > 1):
        half = f"{time['half'].lower()}m" if time["half"] else ""
        return f"\\text{{{time['hour']}:{time['minute']}{half}}}"  # otherwise 12:30 would be 2/5; a ratio is 2:5
    text = without_unit(_signed(text))
    text = re.sub(r"√\s*(\d+|[A-Za-z]|\([^()]*\))", lambda root: f"\\sqrt{{{root[1].strip('()')}}}", text)
    text = re.sub(r"(?<![\d.])\d{1,3}(?:\\,\d{3})+(?!\d)", lambda groups: groups[0].replace("\\,", ""), text)
    if not any(name in text for name in OPAQUE):
        text = ROOT.sub(lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "\\sqrt", text)
        text = BARE.sub(r"\\\1 ", text)
    return plain_powers(text)


def without_unit(text: str) -> str:
    """Return a text without the unit after the number or the fraction at its end, if there is one for certain."""
    match = TAIL.search(text) if len(text) <= LONGEST else None
    return text[: match.start()] if match is not None and _is_unit(match["unit"]) else text


def _signed(text: str) -> str:
    """Return a text with LaTeX for Unicode's signs."""
    return re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: f"^{{{run[0].translate(RAISED)}}}", text.translate(SIGNS))


def plain_powers(text: str) -> str:
    """Return a text with plain digits instead of each number such as 6.02e23 or 2e-5, which is no product with e."""
    return SCIENTIFIC.sub(lambda match: numeral(match[0]) or match[0], text)


def certain(answer: Answer) -> bool:
    """Return whether a row's answer is a number in digits, or a list of such, of which nothing remains to be checked.

    Raises BadGold for what has no text.
    """
    texts = [text.rpartition("####")[2] for text in texts_of(answer)]
    return all(len(text) <= LONGEST and fault_of(bare(text)) is None and numeral(bare(text)) is not None for text in texts)


def fault_of(text: str) -> str | None:
    """Return why an answer cannot be read; None if nothing speaks against it, as far as the text alone shows."""
    if not text:
        return "is empty"
    if re.fullmatch(r"[+-]?[\d.]+[eE][+-]?\d+", text) and numeral(text) is None:
        return f"is beyond the limit of 10^{LARGEST_POWER}"
    return None


def ends_in_variable(latex: str) -> bool:
    r"""Return whether a letter at the end, as in `\pi r^2 h`, is a variable for certain: it then stands beside another one.

    math-verify takes c, d, g, h, l, m, o, s and t after a digit, a brace or a space for units, and drops them.
    """
    side = latex.rpartition("=")[2].strip()
    return re.search(r"[\d}\s][a-z]$", side) is not None and re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", side[:-1])) is not None


def _repeating(match: re.Match[str]) -> str:
    whole, once, again = match["whole"] or "0", match["once"], match["bar"] or match["again"]
    under = (10 ** len(again) - 1) * 10 ** len(once)
    value = Fraction(int(whole + once + again) - int(whole + once), under)
    return f"{match['sign'].strip('+')}\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _is_unit(text: str | None) -> bool:
    """Return whether what follows a number can only be its unit; None: nothing follows."""
    if text is None:
        return True
    marked = text.startswith("\\")
    words = re.findall(r"[A-Za-z]+", re.sub(r"\\[a-z]+", "", text))
    if any(map(NO_UNITS.fullmatch, words)):
        return False
    return marked or text.strip() in ("m/s", "m/s^2") or any(is_word(word) or SHORT_UNITS.fullmatch(word) for word in words)


def is_word(letters: str) -> bool:
    """Return whether a run of letters is a word: of at least four, and not in the order of the alphabet, as in the product abcd."""
    return letters.lower() in ("yes", "no", "odd", "any", "all") or (len(letters) >= 4 and list(letters) != sorted(letters))
