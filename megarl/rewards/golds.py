r"""What an answer says, as far as its text shows: words or a code, a number with its unit, or a formula for math-verify.

math-verify 0.9.0 reads `1e-05` as e - 5, `1 000` as 0, `2024-01-15` as 2008 and `BCA` as the product abc, drops whatever stands in
`\text{}` at the end, and rounds 6.02 x 10^23 to a double before it compares. So `read` classifies golds and responses alike:
texts and numbers are compared here, formulas are rewritten for math-verify, and what is unclear is refused.

This module is imported in the sandbox and by checks, so it imports nothing heavy.
"""

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import floor, gcd, log10
from typing import Any, Literal

from megarl.data.answers import Answer, text_of

SHOWN = 80  # characters of an answer in messages
MAX_CHARS, LARGEST_POWER = 1000, 1000  # characters of a numeral, and its power of ten: both bound what its digits take
DECIMALS, SMALL = 6, Fraction(1, 10**4)  # decimals to which math-verify compares floats; below SMALL, as many significant digits

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SHORT = {"k": " thousand", "m": " million", "b": " billion"}  # of money, as in $1.5M
DIGITS = r"(?:[1-9]\d{0,2}(?P<gap>,|[ _']|\\,|\{,\})\d{3}(?:(?P=gap)\d{3})*(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
POWER = (
    r"\s?[eE](?P<e>[+-]?\d{1,4})|\s*(?:\\times|\\cdot|[×⋅*x])\s*10\s*(?:\^|\*\*)\s*(?P<ten>[+-]?\d{1,4}|\{[+-]?\d{1,4}\}|\([+-]?\d{1,4}\))"
)
SIGNS_OF_MONEY = "dollar $ USD, euro € EUR euro, pound £ GBP pounds, yen ¥, rupee ₹ Rs. Rs, won ₩, rouble ₽"
MONEY = {sign: names[0] for names in map(str.split, SIGNS_OF_MONEY.split(",")) for sign in names[1:]}
CURRENCY = rf"(?:(?:US|AU|CA|HK|NT|[ACS])(?=\\?\$))?(?P<money>\\text\{{\\?\$\}}|\\?(?:{'|'.join(map(re.escape, MONEY))}))"
UNITS = (  # all that is taken off a number: a name, and other spellings; of words the plural, too
    "g gram, kg kilogram, mg milligram, m meter metre, km kilometer kilometre, cm centimeter centimetre, mm millimeter millimetre, dm "
    "decimeter decimetre, L l liter litre, mL ml milliliter, in inch inches, ft foot feet, yd yard, mi mile, mi/h mph, km/h kmh kmph kph, "
    "lb lbs, oz ounce, ton, s sec second, min minute, h hr hrs hour, day, week, month, year yr yrs, deg degree, degC Celsius, degF "
    "Fahrenheit, rad radian, percent pct, th st nd rd, dollar USD, cent, euro EUR, pound GBP, yen, rupee, J joule, kJ, N newtons, kN, W "
    "watts, kW, V volt, amp, Hz, kHz, MHz, Pa, kPa, mol mole, unit, way, student, apple, cup, gallon, acre, point, mark, coin, book, "
    "ticket, people person, men, women, child children"
)
NAMES = {form: names[0] for names in map(str.split, UNITS.split(",")) for name in names
         for form in ((name, f"{name}s") if len(name) > 2 else (name,))}  # fmt: skip
TEXT = r"\\(?:text|textrm|textnormal|mathrm|mbox|rm)\s*\{"
MARKED = rf"{TEXT}(?P<inner>[^{{}}\\%]*)\}}"
SPACE = r"(?:\s|\\[ ,;:!])*"
RAISED_TO = r"(?:\^\{?[23]\}?)?"
TAIL = re.compile(
    rf"(?<=[\d}}.)]){SPACE}(?P<scale>\b(?:{'|'.join(SCALES)}))?{SPACE}"
    rf"(?P<unit>(?:{MARKED}|[A-Za-z][A-Za-z .]*|(?<=\s)\([A-Za-z .]+\)){RAISED_TO}(?:/[A-Za-z]+{RAISED_TO})?)$"
)
MARKS = (  # what stands for a unit or belongs to one, in the form that TAIL reads
    (re.compile(rf"{TEXT}\s*((?:{'|'.join(SCALES)})\b[^{{}}]*)\}}$"), r" \1"),
    (re.compile(r"(?:\^\s*\{?\s*\\circ|\\degree)\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*([CF])\s*\}|([CF]))?$"), r"\\text{deg\1\2}"),
    (re.compile(r"\bdegrees?\s+([CF])(?:elsius|ahrenheit)?(\s*\})?$"), r"deg\1\2"),
    (re.compile(r"(?<=\d)\s*\^\s*\{?(?:\\text\s*\{)?(st|nd|rd|th)\}{0,2}$"), r"\\text{\1}"),
    (re.compile(r"\\?[%％]$"), r"\\text{percent}"),
    (re.compile(rf"\\frac\s*\{{{TEXT}([^{{}}]*)\}}\}}\s*\{{{TEXT}([^{{}}]*)\}}\}}$"), r"\\text{\1/\2}"),
    (re.compile(rf"\}}\s*/\s*{TEXT}"), "/"),
)
NOT_PLAIN = re.compile(r"[A-Za-z]|(?<=.)[+-]")  # after which letters are no unit for certain, unless they are in \text{}
TIME = re.compile(r"(?P<hour>\d\d?)(?::(?P<minute>[0-5]\d))?(?:\s*(?P<half>[AaPp])\.?\s?[Mm]\.?)?")
NUMERAL = re.compile(rf"(?P<sign>[+-]?)\s*(?P<digits>{DIGITS})(?:{POWER})?(?:{SPACE}(?P<scale>{'|'.join(SCALES)}))?")
BASE = re.compile(r"(?:\d[\dA-Z]*|[A-F\d]{2,})_(?:\w|\{[^{}]*\})")
AMOUNT = r"[$€£]?\d+(?:\.\d+)?(?:\\?%)?"
CODE = re.compile(  # ranges, dates, scores, telephone numbers, versions, lists of numbers, feet and inches, minutes of a degree
    rf"{AMOUNT}-{AMOUNT}|\d+(?:[-/:]\d+){{2,}}|(?!\d{{1,3}}(?:\.\d{{3}})+$)\d+(?:\.\d+){{2,}}|\d+(?:\s+\d+)+"
    r"|\d+\s*'(?:\s*\d+\s*(?:\"|''))?|\d+\s*\^\{?\\circ\s*\}?\s*\d+\s*'(?:\s*\d+\s*(?:\"|''))?"
)
LETTER = r"(?![\u0370-\u03ff])[^\W\d_]"  # of any script but Greek, in which formulas are written
WORDS = re.compile(rf"{LETTER}(?:{LETTER}|[',;\s-])+")
CHOICES = re.compile(r"(?:(?:\([A-Z]\)|[A-Z][).]?)(?:\s*(?:,|;|&|,?\s*\band\b)\s*|$))+")
LABEL = re.compile(  # a choice before its value, as in \text{(C) } 12
    rf"(?:(?:{TEXT}|\\textbf\s*\{{)\s*)?\(?(?P<choice>[A-J])[).:]\)?\s*\}}?{SPACE}(?P<value>(?:-?(?:\d|\\?\$|\\[dt]?frac|\\sqrt|\\pi)|[A-Za-z]{{2}}).*)",
    re.DOTALL,
)
FRACTION = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d*)\s*\\[dtc]?frac\s*\{?(?P<over>\d+?)\}?\s*\{?(?P<under>\d+)\}?")
REPEATING = re.compile(r"(?P<sign>[+-]?)(?P<whole>\d*)\.(?P<once>\d*)(?:\\overline\s*\{(?P<bar>\d+)\}|\((?P<again>\d+)\))")
GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?=,\s|\s*(?:\\text\s*\{\s*)?(?:and|or)\b|$)|(?<![\d.])\d{1,3}(?:\\,\d{3})+(?!\d)")
FUNCTIONS = "pi|log|ln|a?(?:rc)?(?:sin|cos|tan)h?|cot|sec|csc|exp"
SCIENTIFIC = re.compile(r"(?<![\w.\\])(?P<digits>\d+(?:\.\d*)?|\.\d+)[eE](?P<e>[+-]?\d{1,3})(?!\w|\.\d)")

SIGNS = str.maketrans(
    dict.fromkeys("−–‑－﹣‒‐—", "-")
    | dict.fromkeys("\u00a0\u2009\u202f~", " ")
    | dict.fromkeys("°º˚", r"^\circ ")
    | {"’": "'", "′": "'", "″": '"', "…": "...", "≈": r"\approx ", "∞": r"\infty ", "·": r"\cdot ", "∪": r"\cup ", "∩": r"\cap "}
    | {half: f"\\frac{{{over}}}{{{under}}}" for half, over, under in ("½12", "¼14", "¾34", "⅓13", "⅔23", "⅕15", "⅛18")}
)
RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
BARE = re.compile(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])")
GLUED = re.compile(f"(?:{FUNCTIONS}|sqrt)[a-z]")
INFINITE = ("inf", "infinity", "infty")
ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt(?:\s*\(([^()]*)\))?(?![A-Za-z])")
OPAQUE = ("\\text", "\\mathrm", "\\operatorname", "\\mbox")
LISTED = re.compile(r"\s*\[\s*[\"'].*\]\s*", re.DOTALL)
WRAPPERS = re.compile(r"\*\*(?P<bold>.+)\*\*|\\(?:textbf|mathbf|boldsymbol|bm|text|mathrm)\s*\{(?P<inner>[^{}]*)\}", re.DOTALL)
SPANS = (
    re.compile(r"\$\$?(?P<math>[^$\\]*(?:\\.[^$\\]*)*)\$\$?", re.DOTALL),
    re.compile(r"\\\((?P<math>.+)\\\)"),
    re.compile(r"\\\[(?P<math>.+)\\\]"),
)
FAULTS = (
    (re.compile(r"[+-]?[\d.]+[eE][+-]?\d+"), f"is beyond the limit of 10^{LARGEST_POWER}"),
    (re.compile(r"\D*(?:\d+,\d+\s?[eE][+-]?\d+|\d{1,3}(?:\.\d{3})+,\d+)"), "has a decimal comma, which is unclear"),
    (re.compile(r".*\d,\s?0\d.*", re.DOTALL), "has zeros after a comma, which is unclear"),
    (GLUED, "joins the name of a function and a letter, which is unclear"),
    (LABEL, "has a choice and its value, which is unclear"),
    (re.compile(r"(?!.*\d\.\d+\s*(?:\.\.\.|\\l?dots)$).*(?:\.\.\.|\\[lc]?dots).*", re.DOTALL), "leaves out something, which is unclear"),
)


class BadGold(ValueError):
    """A reference answer that the verifier cannot read, or does not read as it is written."""


@dataclass(frozen=True)
class Meaning:
    """What a text says."""

    kind: Literal["text", "number", "formula", "unclear"]
    value: str  # the text in its normal form, the number's digits, the formula, or why it is unclear
    plain: str  # the text without what only surrounds it, and without its unit
    unit: str | None = None

    @property
    def number(self) -> Fraction:
        """Return the value of a number."""
        return value_of(self.value)

    @property
    def latex(self) -> str:
        """Return the text as math-verify reads its value."""
        return (self.value if self.kind == "number" else _latex(self.plain)) + (r"\%" if self.unit == "percent" else "")


def read(text: str) -> Meaning:
    """Return what an answer says, whether it is a gold or a response.

    Words and lists of letters are texts, in their order, in upper or lower case; so are codes of digits, and numerals with a base. Currency
    signs, units, thousands separators, powers of ten and words such as million belong to a number.
    """
    text = _plain(text)
    if (words := _text(text)) is not None:
        return Meaning("text", words, text)
    plain, unit = _split_unit(text) if len(text) <= MAX_CHARS else (text, None)
    left, equals, right = plain.rpartition("=")
    if (digits := _digits(right.strip())) is not None:
        plain = f"{left}{equals} {digits}" if equals else digits
        return Meaning("formula" if equals else "number", plain, plain, unit)
    fault = next((fault for pattern, fault in FAULTS if pattern.fullmatch(plain)), None) if text else "is empty"
    return Meaning("formula", plain, plain, unit) if fault is None else Meaning("unclear", fault, plain, unit)


def same_number(gold: Meaning, response: Meaning, decimals: int) -> bool:
    """Return whether two numbers are the same, as fractions to so many decimals; 50% is 0.5, and 50 too.

    Args:
        gold: the right number.
        response: a number.
        decimals: to which two fractions are compared.
    """
    a, b = gold.number, response.number
    pairs = [(a, b)]
    if gold.unit == "percent" != response.unit:
        pairs.append((a / 100, b))
    elif response.unit == "percent" != gold.unit:  # 0.5% is not 0.5
        pairs = [(a, b / 100)] + ([(a, b)] if b >= 1 else [])
    rounded = "." in gold.value + response.value
    return any(x == y or (rounded and 1 not in (x.denominator, y.denominator) and round(x - y, decimals) == 0) for x, y in pairs)


def decimals_of(size: Fraction) -> int:
    """Return to how many decimals numbers of this size are compared: math-verify's six, or six significant digits of small ones."""
    return DECIMALS - floor(log10(size.numerator) - log10(size.denominator)) if 0 < size < SMALL else DECIMALS


def bad(answer: Any, fault: str) -> BadGold:
    """Return the error for an answer; `fault`: what is wrong, after "the answer ..."."""
    return BadGold(f"the answer {answer!r:.{SHOWN}} {fault}")


def texts_of(answer: Answer) -> list[str]:
    """Return the acceptable answers of a row, each as text. Raises BadGold for what has no text."""
    answers = answer if isinstance(answer, list) else [answer]
    for one in answers:
        if isinstance(one, bool | list | dict) or one is None:
            raise bad(one, "is neither a text nor a number, nor a list of them")
        if isinstance(one, int) and abs(one) >= 10**MAX_CHARS:  # of which Python may refuse to make a text
            raise BadGold(f"the answer is a number of more than {MAX_CHARS} digits")
    return [text_of(one) for one in answers]


def golds_of(answer: Answer) -> list[str]:
    """`texts_of`, but a text that is a list of quoted texts, as `["34"]` in JSON or Python, is that list.

    Skywork-OR1 has all its answers so. Of a list without quotes, as [1, 2], the brackets may be an interval's. Raises BadGold also where a
    backslash is not doubled: JSON reads that of a fraction as a form feed.
    """
    if not isinstance(answer, str) or LISTED.fullmatch(answer) is None:
        return texts_of(answer)
    listed: Any = None
    for read_list in (json.loads, _python_list):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            listed = read_list(answer.strip())
            break
    if not isinstance(listed, list) or not all(isinstance(one, str) and one.isprintable() for one in listed):
        raise bad(answer, "looks like a list of quoted texts, and is none that JSON or Python writes of printable ones")
    return listed


def _python_list(text: str) -> Any:
    """Return a value as Python writes it. Raises ValueError for other spellings: of ['12' '13'], NumPy's, Python makes the text 1213."""
    value = ast.literal_eval(text)
    if "".join(str(value).split()) != "".join(text.split()):
        raise ValueError("Python writes it otherwise")
    return value


def bare(text: str) -> str:
    """Return an answer without the dollars around it and the point or comma after it."""
    text = text.strip()
    for _ in range(2):  # "$12.$" and "$12$."
        text = text[:-1].rstrip() if re.search(r"[\w})$\]][.,;]$", text) else text
        for span in SPANS:
            if (match := span.fullmatch(text)) is not None and r"\(" not in match["math"] and r"\[" not in match["math"]:
                text = match["math"].strip()
    return text


def numeral(text: str) -> str | None:
    r"""Return the number that an answer is certain to mean, in the digits in which it is written: `0.00001`, or `\frac{1}{3}`."""
    reading = read(text)
    return reading.value if reading.kind == "number" else None


def value_of(digits: str) -> Fraction:
    """Return the value of what `numeral` has returned."""
    if (match := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", digits)) is not None:
        return Fraction(int(match[1] + match[2]), int(match[3]))
    return Fraction(digits)


def plain_powers(text: str) -> str:
    """Return a text with plain digits instead of each number such as 6.02e23 or 2e-5, which is no product with e."""
    return SCIENTIFIC.sub(lambda match: _digits(match[0]) or match[0], text)


def certain(answer: Answer) -> bool:
    """Return whether a row's answer is a number in digits, or a list of such, of which nothing remains to be checked.

    Raises BadGold for what has no text.
    """
    texts = [text.rpartition("####")[2] for text in texts_of(answer)]
    return all(len(text) <= MAX_CHARS and read(bare(text)).kind == "number" for text in texts)


def _plain(text: str) -> str:
    """Return a text without what only surrounds it, with LaTeX for Unicode's signs."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda run: f"^{{{run[0].translate(RAISED)}}}", text.translate(SIGNS))
    text = bare(re.sub(r"(?<!\\)\\ ", " ", text.replace("{-}", "-")))
    while (wrapped := WRAPPERS.fullmatch(text)) is not None:
        text = bare(wrapped["bold"] or wrapped["inner"] or "")
    if CHOICES.fullmatch(text):
        return ", ".join(re.findall(r"\b[A-Z]\b", text))
    return GROUPS.sub(lambda groups: re.sub(r"\D", "", groups[0]), text)


def _text(text: str) -> str | None:
    """Return an answer that is compared as text in its normal form; None for one that is mathematics."""
    if (time := TIME.fullmatch(text)) is not None and (time["minute"] or time["half"]):  # a ratio is 2:5, and 12:30 is none
        hour, minute = time["hour"], time["minute"] or "00"
        clock = time["half"] or (int(hour) <= 24 and (minute[0] == "0" or gcd(int(hour), int(minute)) > 1))
        return f"{hour}:{minute}{(time['half'] or '').lower()}" if clock else None
    text = re.sub(r"(?<=[A-Za-z])\s*\\cdot\s*(?=[A-Za-z])", " ", text)
    words = WORDS.fullmatch(text) and not BARE.search(text) and text.lower() not in INFINITE and not GLUED.fullmatch(text)
    if not words and not BASE.fullmatch(text) and (not CODE.fullmatch(text) or re.fullmatch(DIGITS, text)):
        return None
    text = re.sub(r"\\|%(?=-)|(?<=-)[$€£]", "", re.sub(r",?\s+and\s+", ",", re.sub(r"\s+", " ", text)))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)|[{}]", "", text).casefold()


def _split_unit(text: str) -> tuple[str, str | None]:
    r"""Return a text without its unit, and the unit's name, as in ("12", "m^2") for `12 \text{ m}^2`; None if it has none of `UNITS`."""
    money = None
    match = re.fullmatch(rf"(?P<sign>[+-]?)\s*{CURRENCY}{SPACE}(?P<rest>[+-]?[\d.].*)", text, re.DOTALL)
    if match is not None and not (match["sign"] and match["rest"][0] in "+-"):
        money = _currency(match)
        text = match["sign"] + re.sub(r"(?<=\d)\s?([kmb])n?$", lambda short: SHORT[short[1].lower()], match["rest"], flags=re.IGNORECASE)
    for pattern, mark in MARKS:
        text = pattern.sub(mark, text)
    unit = money
    if (match := TAIL.search(text)) is not None and (name := _unit(match["unit"])) is not None and money in (None, name):
        before = text[: match.start()]
        plain = re.sub(r"\\[a-z]+|pi|\^\{?-?\d+|[eE][+-]?\d+", "", before.rpartition("=")[2].strip())
        if match["inner"] is not None or NOT_PLAIN.search(plain) is None:
            text, unit = f"{before} {match['scale'] or ''}".strip(), name
    if (match := re.fullmatch(rf"(?P<rest>.*\d){SPACE}{CURRENCY}", text, re.DOTALL)) is not None and unit in (None, _currency(match)):
        text, unit = match["rest"], _currency(match)
    return text, unit


def _currency(match: re.Match[str]) -> str:
    return MONEY[re.sub(r"\\text|[\\{}]", "", match["money"])]


def _unit(text: str) -> str | None:
    """Return the name of a unit, the same for all its spellings; None if it is none of `UNITS`."""
    parts = list[str]()
    for part in re.sub(r"\bper\b", "/", re.sub(MARKED, r"\g<inner>", text).strip("()")).split("/"):
        match = re.fullmatch(r"(?:(?P<kind>square|sq|cubic|cu)\.?\s+)?(?P<name>[A-Za-z]+)\.?\s*(?:\^\{?(?P<power>[23])\}?)?", part.strip())
        name = None if match is None else NAMES.get(match["name"]) or (NAMES.get(match["name"].lower()) if len(match["name"]) > 2 else None)
        if match is None or name is None:
            return None
        power = match["power"] or {"s": "2", "c": "3"}.get((match["kind"] or " ")[0])
        parts.append(name if power is None else f"{name}^{power}")
    return "/".join(parts)


def _digits(text: str) -> str | None:
    """Return the digits of a numeral without a unit; None if it is none."""
    if len(text) > MAX_CHARS:
        return None
    fraction = re.sub(r"(?:^|(?<=[\s+-]))(\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    if (match := FRACTION.fullmatch(fraction)) is not None and int(match["under"]):
        whole, over, under = (int(match[name] or 0) for name in ("whole", "over", "under"))
        return f"{match['sign'].strip('+')}\\frac{{{whole * under + over}}}{{{under}}}"
    if (match := REPEATING.fullmatch(text)) is not None:
        once, again = (match["whole"] or "0") + match["once"], match["bar"] or match["again"]
        value = Fraction(int(once + again) - int(once), (10 ** len(again) - 1) * 10 ** len(match["once"]))
        return f"{match['sign'].strip('+')}\\frac{{{value.numerator}}}{{{value.denominator}}}"
    if (match := NUMERAL.fullmatch(text)) is None:
        return None
    power = int((match["e"] or match["ten"] or "0").strip("{}()")) + SCALES.get(match["scale"] or "", 0)
    if abs(power) > LARGEST_POWER:
        return None
    digits = re.sub(r"[^\d.]", "", match["digits"]).rstrip(".")
    number = Decimal(digits).scaleb(power) if power else Decimal(digits)
    return match["sign"].strip("+") + format(number, "f")


def _latex(text: str) -> str:
    """Return LaTeX, rewritten for math-verify: powers of ten, roots, names of functions; the rest as it is."""
    text = re.sub(r"√\s*(\d+|[A-Za-z]|\([^()]*\))", lambda root: f"\\sqrt{{{root[1].strip('()')}}}", text)
    text = re.sub(r"\^\s*(-\d+)", r"^{\1}", text.replace("**", "^").replace(r"\varnothing", r"\emptyset"))
    if not any(name in text for name in OPAQUE):
        text = ROOT.sub(lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "\\sqrt", text)
        text = BARE.sub(r"\\\1 ", text)
    return plain_powers(text)
