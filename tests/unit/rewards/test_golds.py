r"""What math-verify is given to read: an answer's value is that of what was written, in every notation of it."""

from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megarl.config import ConfigError, FileSource, FunctionReward, MathReward, ReasoningGymReward, RewardSettings, SourceFormat, SumReward
from megarl.config.rewards import RewardPart
from megarl.data import large
from megarl.data.answers import Answer, text_of
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards import gold_checks
from megarl.rewards.gold_checks import answer_faults
from megarl.rewards.golds import BadGold, certain, numeral, value_of
from megarl.rewards.mathematics import MathVerify
from tests.unit.data.written import ROW, write

MATH = MathVerify()


def score(answer: Answer, boxed: str) -> float:
    return MATH("", f"We have $n = 3$ and \\boxed{{{boxed}}}.", answer, {})[0]


RIGHT: list[tuple[Answer, str]] = [
    *((0.00001, boxed) for boxed in ("0.00001", "1e-5", "1e-05", "10^{-5}", "1 \\times 10^{-5}", "\\frac{1}{100000}", "0.0000100")),
    *((1e-7, boxed) for boxed in ("0.0000001", "10^{-7}", "1e-7")),
    *(
        (answer, boxed)
        for answer in (1e16, "1e16", 10**16)
        for boxed in ("10000000000000000", "10^{16}", "1e16", "10{,}000{,}000{,}000{,}000{,}000")
    ),
    *(("6.02e23", boxed) for boxed in ("6.02e23", "6.02E+23", "6.02 \\times 10^{23}", "602000000000000000000000", "602 \\cdot 10^{21}")),
    *(
        (answer, boxed)
        for answer in ("2e-5", 2e-5, "2E-05")
        for boxed in ("2e-5", "2e-05", "0.00002", "2 \\times 10^{-5}", "\\frac{1}{50000}")
    ),
    *((answer, boxed) for answer in ("1E5", "1e5", 1e5) for boxed in ("1E5", "100000", "100{,}000", "10^5")),
    *((answer, boxed) for answer in ("-3.5e+2", -350) for boxed in ("-3.5e+2", "-350", "-3.5 \\times 10^2")),
    *(("\\$18.90", boxed) for boxed in ("18.90", "18.9", "\\$18.90", "18.90 dollars")),
    *(("$1,234.50", boxed) for boxed in ("1234.5", "\\$1,234.50", "1{,}234.50")),
    *(
        (answer, "10")
        for answer in ("10 dollars", "10 \\text{ dollars}", "€10", "10 km/h", "10 cm^2", "10°", "10^\\circ", "10.", "$10$.", "**10**")
    ),
    *(("10", boxed) for boxed in ("10 dollars", "\\$10", "10.", "10 \\text{ cm}^2", "\\textbf{10}")),
    *((answer, "1000") for answer in ("1 000", "1_000", "1\\,000", "1{,}000", "1,000", "1 thousand", "#### 1,000", "so \\boxed{1\\,000}")),
    *((answer, boxed) for answer in ("50%", "50\\%", "50 percent") for boxed in ("50\\%", "50", "0.5", "\\frac{1}{2}")),
    *((answer, boxed) for answer in ("0.\\overline{3}", "0.(3)", "\\frac13", "1/3") for boxed in ("1/3", "0.\\overline{3}", "0.333333")),
    *((answer, boxed) for answer in ("1 1/2", "1½", "1\\frac12", "3/2", 1.5) for boxed in ("1\\frac{1}{2}", "1.5", "\\frac{3}{2}")),
    *(("\\boxed{\\boxed{\\frac{1}{2}}}", boxed) for boxed in ("0.5", "1/2")),
    *(("\\pi r^2 h", boxed) for boxed in ("\\pi r^2 h", "h\\pi r^2")),
    *(("2pi", boxed) for boxed in ("2\\pi", "2π")),
    *(("(−∞, 3]", boxed) for boxed in ("(-\\infty, 3]", "(-\\infty,3]")),
    *(("\\{1, 2\\}", boxed) for boxed in ("2, 1", "\\{1,2\\}")),
    *(("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", boxed) for boxed in ("\\begin{bmatrix}1 & 2\\\\ 3 & 4\\end{bmatrix}",)),
    *((answer, boxed) for answer in ("Paris", "\\text{Paris}") for boxed in ("Paris", "paris", "\\text{Paris}")),
    *((["3", "x^2+1", 0.5], boxed) for boxed in ("3", "1+x^2", "1/2")),
    ("x = 5 m", "5"),
    ("The cost is $5", "5"),
    *(
        (answer, "5000000")
        for answer in ("5 million", "$5 million", "5 \\text{ million}", "5 million dollars", "5{,}000 \\text{ thousand}")
    ),
    *((answer, "\\frac{3}{4}") for answer in ("3/4 cups", "\\frac{3}{4} miles", "0.75 km/h", "¾ ton")),
    *((answer, "3.5") for answer in ("3 1/2 hours", "3½ hours", "3\\frac{1}{2} \\text{ hours}")),
    *(("6.02×10²³", boxed) for boxed in ("6.02 \\times 10^{23}", "6.02e23", "6.02x10^23")),
    *(("1.6×10⁻¹⁹", boxed) for boxed in ("1.6 \\times 10^{-19}", "1.6e-19")),
    *(("USD 18.90", boxed) for boxed in ("18.9", "\\$18.90")),
    *(("2:30 PM", boxed) for boxed in ("2:30 pm", "2:30 p.m.", "\\text{2:30 PM}")),
    *(("3:2", boxed) for boxed in ("3:2", "3/2", "6:4")),
    ("So the answer is $\\frac{1}{2}$.", "0.5"),
    ("-$5", "-5"),
    *(("2e - 5", boxed) for boxed in ("2e - 5", "-5 + 2e")),
    ("C.", "C"),
    ("x²", "x^2"),
    ("3√2", "3\\sqrt{2}"),
    (123456789012345678, "123456789012345678"),
]
WRONG: list[tuple[Answer, str]] = [
    *((0.00001, boxed) for boxed in ("e-5", "0", "0.0", "0.0000104", "0.00002")),
    *((answer, boxed) for answer in (1e-7, "10^{-7}") for boxed in ("0", "0.0", "0.0000002")),
    *(("6.02e23", boxed) for boxed in ("6.03 \\times 10^{23}", "e^{23}", "6.02")),
    *(("2e-5", boxed) for boxed in ("e-5", "2e - 5", "0.00003", "2", "-3", "0.0000204")),
    *(("1E5", boxed) for boxed in ("E5", "5", "10000")),
    ("-3.5e+2", "350"),
    *((answer, "0") for answer in ("1 000", "1_000", "1\\,000")),
    *(("\\pi r^2 h", boxed) for boxed in ("\\pi r^2", "\\pi r^2 l")),
    *((["3", "4"], boxed) for boxed in ("5", "34", "3, 4")),
    ("x + 2t", "x + 2"),
    ("1.6×10⁻¹⁹", "0"),
    ("2:30 PM", "1:15 PM"),
    ("2:30 PM", "2:30 AM"),
    ("12:30", "2:5"),
    ("3 1/2 hours", "3"),
    ("(−∞, 3)", "3"),
    ("Paris", "Pairs"),
    ("no", "on"),
    ("[0,1]", "(0,1)"),
    ("1 1/2", "1"),
    (123456789012345678, "123456789012345680"),
    ("\\$18.90", "18"),
]


@pytest.mark.parametrize(("answers", "value"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_a_response_scores_by_the_value_of_the_answer(answers: list[tuple[Answer, str]], value: float) -> None:
    assert [(answer, boxed) for answer, boxed in answers if score(answer, boxed) != value] == []


def test_every_readable_answer_is_right_itself() -> None:
    for answer, _ in RIGHT + WRONG:
        MATH.check_gold(answer)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_decimal_numbers_are_compared_exactly(number: float) -> None:
    for text in (text_of(number), repr(number), f"${text_of(number)} \\text{{ cm}}$"):
        digits = numeral(text.strip("$"))
        assert digits is not None and value_of(digits) == Fraction(repr(number))


KINDS: dict[str, tuple[list[str], list[str]]] = {  # gold: right responses, wrong ones
    "12": (
        ["12 m^2", "12 \\text{ cm}^3", "12 \\text{ people}", "12\\%"],
        ["12 tenths", "12\\text{ not}", "12\\mathrm{x}", "12\\text{x}", "12\\mathrm{e}^2", "12 sinx", "12 zyxw", "12 lakh", "12_3"],
    ),
    "500 g": (["500", "500 grams", "500\\text{ g}"], ["500 kg", "500 mg"]),
    "5 hours": (["5", "5 h"], ["5 minutes"]),
    "$5": (["5", "5 dollars"], ["€5", "5 cents"]),
    "12 m^2": (["12", "12\\text{ m}^2", "12 square meters"], ["12 m", "12 m^3"]),
    "25°C": (["25", "25^{\\circ}C", "25^\\circ\\text{C}"], ["24", "25°F"]),
    "-5 °C": (["-5", "-5^\\circ C"], ["5"]),
    "2\\sqrt{3} cm": (["2\\sqrt{3}"], ["2\\sqrt{3} m"]),
    "4m": (["4m", "4"], ["4n"]),
    "xy": (["xy", "x \\cdot y"], ["yx"]),
    "BCA": (["BCA"], ["ABC"]),
    "CO": (["CO"], ["OC"]),
    "B, A, C": (["B,A,C"], ["A, B, C"]),
    "cat": (["cat", "\\text{cat}"], ["act"]),
    "1010": (["1010"], ["1010_2"]),
    "1010_2": (["1010_2", "1010_{2}"], ["1010", "1010_3"]),
    "2024-01-15": (["2024-01-15"], ["2008", "2024-15-01"]),
    "3/4/2024": (["3/4/2024"], ["3/8096", "4/3/2024"]),
    "3/4": (["0.75"], ["4/3"]),
    "12-5": (["12-5"], ["7"]),
    "100 - 50": (["50"], ["100"]),
    "555-1234": (["555-1234"], ["-679"]),
    "1 2 3": (["1 2 3"], ["123", "6"]),
    "1.2.3": (["1.2.3"], ["0.36", "1.2"]),
    "5'10\"": (["5'10\""], ["510"]),
    "1 e5": (["100000"], ["5"]),
    "$3$ or $4$": (["3 or 4", "4, 3"], ["3", "4"]),
    "$x=1$ and $y=2$": (["x=1, y=2"], ["2"]),
    "$\\frac{1}{2}$ cm": (["0.5"], ["1"]),
}


def test_texts_units_and_lists_keep_what_was_written() -> None:
    """The kinds of golds that math-verify alone would take for others."""
    for gold, (right, wrong) in KINDS.items():
        MATH.check_gold(gold)
        assert [boxed for boxed in right if score(gold, boxed) != 1.0] == [], gold
        assert [boxed for boxed in wrong if score(gold, boxed) != 0.0] == [], gold


@pytest.mark.parametrize("before", ["\\boxed{13}. Wait, ", "\\boxed{13}, ", "$\\boxed{13}$ or "])
def test_the_answer_is_the_last_box(before: str) -> None:
    for last, value in (("\\boxed{12}", 1.0), ("\\boxed{14}", 0.0), ("\\boxed{12", 0.0)):
        assert MATH("", before + last, "12", {})[0] == value


UNREADABLE: dict[str, tuple[Answer, str]] = {
    "empty": ("", "is empty"),
    "no mathematics": ("???", "is no mathematical expression that math-verify can read"),
    "words and numbers": ("June 5", "is read by math-verify as j*u*n*E*5"),
    "groups of digits": ("1.000.000", "is read by math-verify as 1.0*0.0"),
    "hexadecimal": ("0x1F", "is read by math-verify as 0*x*1*f"),
    "a system of equations": ("\\begin{cases} x=1 \\\\ y=2 \\end{cases}", "is read by math-verify as 2"),
    "too large": ("1e999999", "is beyond the limit of 10^1000"),
    "one of a list": (["3", ""], "is empty"),
    "an operator": ("7 mod 3", "is read by math-verify as 7*m*o*d*3"),
    "a function": ("2 sinx", "is read by math-verify as 2*i*n*s*x"),
    "a function alone": ("sinx", "joins the name of a function and a letter, which is unclear"),
    "a decimal comma": ("1,5e3", "has a decimal comma, which is unclear"),
    "several boxes": ("\\boxed{3}, \\boxed{4}", "has several answers, each in a \\boxed{}"),
    "several formulas": ("$a$ if $b > 1$", "has several formulas"),
    "an object": ({"target": 24}, "is neither a text nor a number, nor a list of them"),
    "a boolean": (True, "is neither a text nor a number, nor a list of them"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_answer_that_cannot_be_read_says_what_is_read(kind: str) -> None:
    answer, fault = UNREADABLE[kind]
    for action in (MATH.check_gold, lambda one: score(one, "1")):
        with pytest.raises(BadGold) as refused:
            action(answer)
        assert str(refused.value).endswith(f" {fault}")
    with suppress(BadGold):
        assert not certain(answer)


MATHEMATICS = RewardSettings(source=MathReward(), workers=2)


def test_the_answers_of_a_run_are_parsed_before_it_starts_in_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Answer] = [72, "x^2", "June 5", "\\frac{1}{2}", "", "June 5", ["1", "???"], "2e-5"]
    assert answer_faults(MATHEMATICS, answers) == {
        2: "the answer 'June 5' is read by math-verify as j*u*n*E*5",
        4: "the answer '' is empty",
        5: "the answer 'June 5' is read by math-verify as j*u*n*E*5",
        6: "the answer '???' is no mathematical expression that math-verify can read",
    }
    half = SumReward(parts=[RewardPart(name="a", source=FunctionReward(path="x:y")), RewardPart(name="b", source=MathReward())])
    assert list(answer_faults(RewardSettings(source=half), ["x", "???"])) == [1]
    monkeypatch.setattr(gold_checks, "CHECKED", 2)
    assert list(answer_faults(MATHEMATICS, ["a^2", "b^2", "???", "c^2"])) == [2], "a sample from all over"


def test_numbers_start_no_process_and_functions_take_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gold_checks, "ProcessScorer")
    assert answer_faults(MATHEMATICS, [72, 1e-05, "2e-5", "1,234", "\\$18.90", "so it is\n#### 72", ["1", 2.5]] * 1000) == {}
    assert answer_faults(RewardSettings(source=FunctionReward(path="x:y")), ["???", {"a": 1}, True]) == {}
    assert list(answer_faults(RewardSettings(source=ReasoningGymReward()), ["???", {"a": 1}, True, ["a", 1]])) == [1, 2]


def test_an_answer_that_takes_too_long_is_named_with_the_limit() -> None:
    [fault] = answer_faults(RewardSettings(source=MathReward(), timeout_s=0.5), ["10^{10^{10}}!"]).values()
    assert fault == "the answer '10^{10^{10}}!' is not read within reward.timeout_s=0.5 s"


def test_a_row_whose_answer_cannot_be_read_is_refused_by_its_place_or_left_out(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(*golds: Any) -> FileSource:
        return write(tmp_path / "a.jsonl", *({**ROW, "reward_model": {"ground_truth": gold}} for gold in golds))

    def load(source: FileSource, **data: Any) -> list[Any]:
        tokenizer, faults = load_tokenizer(tiny_model), lambda answers: answer_faults(MATHEMATICS, answers)
        return [prompt.answer for prompt in load_prompts(source, tokenizer, SourceFormat(**data), 64, "data.train", faults=faults)]

    with pytest.raises(ConfigError, match=r"^data\.train\.path: .*a\.jsonl:2: the answer 'June 5' is read by math-verify as .*$"):
        load(rows(34, "June 5", "???"))
    assert load(rows(34, "June 5", "x^2", "???"), on_bad_row="drop") == [34, "x^2"]
    assert "2 bad rows are left out (data.on_bad_row=drop): data.train.path: " in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nothing is left"):
        load(rows("June 5"), on_bad_row="drop")
    monkeypatch.setattr(large, "LARGE", 2)
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "answer": ["34", "June 5", "x^2"]}), tmp_path / "a.parquet")
    assert load(FileSource(path=tmp_path / "a.parquet", answer_key="answer"), on_bad_row="drop") == ["34", "x^2"]
