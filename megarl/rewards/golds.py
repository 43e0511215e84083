r"""Reference answers and boxed answers as math-verify must be given them, so that it reads the value that was written.

math-verify 0.9.0 reads `1e-05` as e - 5, `1 000` as 0, `2024-01-15` as 2008 and `BCA` as the product abc, drops whatever stands in
`\text{}` at the end, and rounds 6.02 x 10^23 to a double before it compares. What is certain is rewritten here,
on both sides alike (`numeral`, `split_unit`, `expression`), or compared as text (`textual`); what is not is refused (`fault_of`).

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
POWER = (
    r"\s?[eE](?P<e>[+-]?\d{1,4})|\s*(?:\\times|\\cdot|[×⋅*x])\s*10\s*(?:\^|\*\*)\s*(?P<ten>[+-]?\d{1,4}|\{[+-]?\d{1,4}\}|\([+-]?\d{1,4}\))"
)
MONEY = {"$": "dollar", "USD": "dollar", "€": "euro", "EUR": "euro", "£": "pound", "GBP": "pound", "¥": "yen", "₹": "rupee",
         "Rs.": "rupee", "Rs": "rupee", "₩": "won", "₽": "rouble", "pounds": "pound", "euro": "euro"}  # fmt: skip
CURRENCY = rf"(?:(?:US|AU|CA|HK|NT|[ACS])(?=\\?\$))?(?P<money>\\text\{{\\?\$\}}|\\?(?:{'|'.join(map(re.escape, MONEY))}))"
UNITS = {  # all that is taken off a number, by its spellings
    **{unit: f"{unit} {word} {word}s" for unit, word in zip(("g", "kg", "mg"), ("gram", "kilogram", "milligram"), strict=True)},
    **{f"{prefix}m": f"{prefix}m {name}meter {name}meters {name}metre {name}metres" for prefix, name in
       (("", ""), ("k", "kilo"), ("c", "centi"), ("m", "milli"), ("d", "deci"))},
    "L": "L l liter liters litre litres", "mL": "mL ml milliliter milliliters", "in": "in inch inches",
    "ft": "ft foot feet", "yd": "yd yard yards",
    "mi": "mi mile miles", "mi/h": "mph", "km/h": "kmh kmph kph", "lb": "lb lbs", "oz": "oz ounce ounces",
    "ton": "ton tons", "s": "s sec secs second seconds",
    "min": "min mins minute minutes", "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "month": "month months",
    "year": "yr yrs year years", "deg": "deg degree degrees", "degC": "degC Celsius", "degF": "degF Fahrenheit",
    "rad": "rad radian radians",
    "dollar": "dollar dollars USD", "cent": "cent cents", "euro": "euro euros EUR", "pound": "pound pounds GBP",
    "yen": "yen", "rupee": "rupee rupees",
    "J": "J joule joules", "N": "N newtons", "W": "W watts", "Hz": "Hz", "mol": "mol moles",
    **{word: f"{word} {word}s" for word in
       ("unit", "way", "student", "apple", "cup", "gallon", "acre", "point", "mark", "coin", "book", "ticket")},
    "people": "people person persons", "men": "men", "women": "women", "child": "child children",
}  # fmt: skip
NAMES = {name: unit for unit, names in UNITS.items() for name in names.split()}
MARKED = r"\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{(?P<inner>[^{}\\%]*)\}"
SPACE = r"(?:\s|\\[ ,;:!])*"
RAISED_TO = r"(?:\^\{?[23]\}?)?"
TAIL = re.compile(
    rf"(?<=[\d}}.)]){SPACE}(?P<scale>\b(?:{'|'.join(SCALES)}))?{SPACE}"
    rf"(?P<unit>(?:{MARKED}|[A-Za-z][A-Za-z .]*){RAISED_TO}(?:/[A-Za-z]+{RAISED_TO})?)$"
)
DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ|\\degree)\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*(?P<marked>[CF])\s*\}|(?P<plain>[CF]))?$")
NOT_PLAIN = re.compile(r"[A-Za-z]|(?<=.)[+-]")  # after which letters are no unit for certain, unless they are in \text{}
TIME = re.compile(r"(?P<hour>\d\d?):(?P<minute>[0-5]\d)\s*(?P<half>[AaPp])?(?:\.?[Mm]\.?)?")
NUMERAL = re.compile(rf"(?P<sign>[+-]?)\s*(?P<digits>{DIGITS})(?:{POWER})?(?:{SPACE}(?P<scale>{'|'.join(SCALES)}))?")
BASE = re.compile(r"(?:\d[\dA-Z]*|[A-F\d]{2,})_(?:\w|\{[^{}]*\})")
CODE = re.compile(  # dates, scores, telephone numbers, versions, lists of numbers, feet and inches
    r"\d+-\d+|\d+(?:[-/:]\d+){2,}|(?!\d{1,3}(?:\.\d{3})+$)\d+(?:\.\d+){2,}|\d+(?:\s+\d+)+|\d+\s*'(?:\s*\d+\s*(?:\"|''))?"
)
WORDS = re.compile(r"[A-Za-zÀ-ÿ][A-Za-zÀ-ÿ',;\s-]+")
MIXED = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d+)\s+(?P<over>\d+)/(?P<under>\d+)")
REPEATING = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d*)\.(?P<once>\d*)(?:\\overline\s*\{(?P<bar>\d+)\}|\((?P<again>\d+)\))")
FUNCTIONS = "pi|log|ln|a?(?:rc)?(?:sin|cos|tan)h?|cot|sec|csc|exp"
SCIENTIFIC = re.compile(r"(?<![\w.\\])(?P<digits>\d+(?:\.\d*)?|\.\d+)[eE](?P<e>[+-]?\d{1,3})(?!\w|\.\d)")

SIGNS = str.maketrans(
    dict.fromkeys("−–‑－", "-")
    | dict.fromkeys("\u00a0\u2009\u202f~", " ")
    | {"∞": r"\infty ", "°": r"^\circ ", "·": r"\cdot ", "∪": r"\cup ", "∩": r"\cap "}
    | {half: f"\\frac{{{over}}}{{{under}}}" for half, over, under in ("½12", "¼14", "¾34", "⅓13", "⅔23", "⅕15", "⅛18")}
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
BARE = re.compile(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])")
GLUED = re.compile(f"(?:{FUNCTIONS}|sqrt)[a-z]")
INFINITE = ("inf", "infinity", "infty")
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
    text = split_unit(text)[0]
    if (match := MIXED.fullmatch(text)) is not None and int(match["under"]):
        whole, over, under = (int(match[name]) for name in ("whole", "over", "under"))
        return f"{match['sign'].strip('+')}\\frac{{{whole * under + over}}}{{{under}}}"
    if (match := REPEATING.fullmatch(text)) is not None:
        return _repeating(match)
    match = NUMERAL.fullmatch(text)
    if match is None:
        return None
    power = int((match["e"] or match["ten"] or "0").strip("{}()")) + SCALES.get(match["scale"] or "", 0)
    if abs(power) > LARGEST_POWER:
        return None
    digits = re.sub(r"[^\d.]", "", match["digits"]).rstrip(".")
    number = Decimal(digits).scaleb(power) if power else Decimal(digits)
    return match["sign"].strip("+") + format(number, "f")


def value_of(digits: str) -> Fraction:
    """Return the value of what `numeral` has returned."""
    if (match := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", digits)) is not None:
        return Fraction(int(match[1] + match[2]), int(match[3]))
    return Fraction(digits)


def expression(text: str) -> str:
    """Return LaTeX, rewritten for math-verify: words, Unicode signs, powers of ten, names of functions; the rest as it is."""
    text = split_unit(text)[0]
    text = re.sub(r"√\s*(\d+|[A-Za-z]|\([^()]*\))", lambda root: f"\\sqrt{{{root[1].strip('()')}}}", text)
    text = re.sub(r"(?<![\d.])\d{1,3}(?:\\,\d{3})+(?!\d)", lambda groups: groups[0].replace("\\,", ""), text)
    if not any(name in text for name in OPAQUE):
        text = ROOT.sub(lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "\\sqrt", text)
        text = BARE.sub(r"\\\1 ", text)
    return plain_powers(text)


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Return a text without its unit, and the unit's name, as in ("12", "m^2") for `12 \text{ m}^2`; None if it has none of `UNITS`."""
    text = _signed(text).strip()
    if len(text) > LONGEST:
        return text, None
    if (wrapped := WRAPPERS.fullmatch(text)) is not None:
        text = (wrapped["bold"] or wrapped["inner"] or "").strip()
    text = DEGREES.sub(lambda match: rf"\text{{deg{match['marked'] or match['plain'] or ''}}}", SCALE_TEXT.sub(r" \1", text))
    unit = None
    if (match := TAIL.search(text)) is not None and (name := _unit(match["unit"])) is not None:
        rest = f"{text[: match.start()]} {match['scale'] or ''}".strip()
        plain = re.sub(r"\\[a-z]+|pi|\^\{?-?\d+|[eE][+-]?\d+", "", text[: match.start()].rpartition("=")[2].strip())
        if match["inner"] is not None or NOT_PLAIN.search(plain) is None:
            text, unit = rest, name
    before = re.fullmatch(rf"(?P<sign>[+-]?)\s*{CURRENCY}{SPACE}(?P<rest>[+-]?[\d.].*)", text, re.DOTALL)
    after = re.fullmatch(rf"(?P<sign>)(?P<rest>.*\d){SPACE}{CURRENCY}", text, re.DOTALL)
    if (match := before or after) is not None and not (match["sign"] and match["rest"][0] in "+-"):
        money = MONEY[re.sub(r"\\text|[\\{}]", "", match["money"])]
        return match["sign"] + match["rest"], money if unit in (None, money) else None
    return text, unit


def _unit(text: str) -> str | None:
    """Return the name of a unit, the same for all its spellings; None if it is none of `UNITS`."""
    parts = list[str]()
    for part in re.sub(r"\bper\b", "/", re.sub(MARKED, r"\g<inner>", text)).split("/"):
        match = re.fullmatch(r"(?:(?P<kind>square|sq|cubic|cu)\.?\s+)?(?P<name>[A-Za-z]+)\.?\s*(?:\^\{?(?P<power>[23])\}?)?", part.strip())
        name = None if match is None else NAMES.get(match["name"]) or (NAMES.get(match["name"].lower()) if len(match["name"]) > 2 else None)
        if match is None or name is None:
            return None
        power = match["power"] or {"s": "2", "c": "3"}.get((match["kind"] or " ")[0])
        parts.append(name if power is None else f"{name}^{power}")
    return "/".join(parts)


def textual(text: str) -> str | None:
    """Return an answer that is compared as text in its normal form; None for one that is mathematics.

    Words and lists of letters are texts, in their order, in upper or lower case; so are codes of digits, and numerals with a base.
    """
    text = re.sub(r"\s*(?:\\cdot|\\ |~)\s*", " ", text.translate(SIGNS)).strip()
    if (wrapped := WRAPPERS.fullmatch(text)) is not None:
        text = (wrapped["bold"] or wrapped["inner"] or "").strip()
    if (time := TIME.fullmatch(text)) is not None:  # a ratio is 2:5, and 12:30 is none
        clock = time["half"] or gcd(int(time["hour"]), int(time["minute"])) > 1
        return f"{time['hour']}:{time['minute']}{(time['half'] or '').lower()}" if clock else None
    words = WORDS.fullmatch(text) and not BARE.search(text) and text.lower() not in INFINITE and not GLUED.fullmatch(text)
    if not words and not BASE.fullmatch(text) and (not CODE.fullmatch(text) or re.fullmatch(DIGITS, text)):
        return None
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|[{}]", "", re.sub(r"\s+", " ", text)).casefold()


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
    if re.fullmatch(r"\D*(?:\d+,\d+\s?[eE][+-]?\d+|\d{1,3}(?:\.\d{3})+,\d+)", text):
        return "has a decimal comma, which is unclear"
    return "joins the name of a function and a letter, which is unclear" if GLUED.fullmatch(text) else None


def _repeating(match: re.Match[str]) -> str:
    whole, once, again = match["whole"] or "0", match["once"], match["bar"] or match["again"]
    under = (10 ** len(again) - 1) * 10 ** len(once)
    value = Fraction(int(whole + once + again) - int(whole + once), under)
    return f"{match['sign'].strip('+')}\\frac{{{value.numerator}}}{{{value.denominator}}}"


def is_word(letters: str) -> bool:
    """Return whether letters beside digits may be a word: three at least, and not in the order of the alphabet, as in the product abcd."""
    return len(letters) >= 3 and list(letters) != sorted(letters)
