r"""Which responses to an answer are right, by kinds of answers: what an attacker has tried, one row for each response."""

import json
from collections.abc import Iterator

import pytest

from megarl.rewards.golds import BadGold, read
from megarl.rewards.mathematics import MathVerify

MATH = MathVerify()

KINDS: dict[str, tuple[list[str], list[str]]] = {  # answer: right responses, wrong ones
    "12": (
        # equations and approximations
        ["x = 12", "x = 3 \\cdot 4 = 12", "f(2) = 12", "3 \\cdot 4", "x \\approx 12", "≈ 12", "\\approx 12", "\\frac{36}{3} \\approx 12"]
        # forms of a number, units that the answer leaves out, a choice before the value
        + ["012", "12.00", "１２", "12\\%", "12,", "12 (cm)", "12^{\\text{th}}", "\\text{(C) }12", "(C) 12", "C) 12", "\\textbf{(C)}\\ 12"],
        ["13=12", "1+1=12", "x=13=12", "13 = x = 12", "12=13", "12 \\approx 13", "13 \\approx 12", "\\ge 12", "\\ne 12", "x > 12", "<12"]
        + ["\\pm 12", "12 or 13", "1 2", "12!", "12_8", "not 12", "(C) 13", "12\\ldots 13", "12 A 3", "-12", "nan", "\\infty", "None"],
    ),
    "1": (["x=1", "100%", "\\frac{5}{5}"], ["2=1", "0=1", "0.9999999", "I"]),
    "x = 5": (["5", "x=\\frac{10}{2}"], ["x=6=5", "y=5"]),
    "1/2 = 0.5": (["0.5", "1/2"], ["1"]),
    "2.75": (["x = 2 3/4", "x=2\\frac34"], ["x=5/4"]),
    "1.414": (["\\sqrt{2} \\approx 1.414", "x = \\sqrt{2} \\approx 1.414", "≈1.414"], ["\\sqrt{3} \\approx 1.414", "2 \\approx 1.414"]),
    "\\sqrt{2}": (["\\sqrt{2} \\approx 1.414", "√2"], ["1.414", "\\sqrt{2} = 2"]),
    "\\pi \\approx 3.14": (["\\pi", "3.14"], ["3", "22/7"]),
    "12345": (["12345 \\approx 12000"], ["12000"]),
    # sets, tuples, lists, intervals
    "\\{1,2\\}": (["\\{2,1\\}", "2,1", "x = 1, 2", "x \\in \\{1,2\\}", "x=1 or x=2"], ["(2,1)", "(1,2)", "[1,2]", "1", "\\{1,2,3\\}"]),
    "(2,1)": (["(2, 1)", "2,1", "(x,y)=(2,1)"], ["(1,2)", "1,2", "\\{2,1\\}", "\\{1,2\\}"]),
    "(1,2)": (["\\left(1,2\\right)", "1,2", "1<x<2", "x \\in (1,2)"], ["(2,1)", "2,1", "\\{1,2\\}", "[1,2]", "(1,2]"]),
    "(x,y) = (1,2)": (["(1,2)", "1,2"], ["(2,1)", "\\{1,2\\}"]),
    "1, 2": (["2,1", "\\{2,1\\}", "(1,2)", "2 and 1"], ["(2,1)", "1", "1,2,3"]),
    "(1,2,3)": (["1,2,3"], ["(3,2,1)", "\\{1,2,3\\}"]),
    "\\{1,2,3\\}": (["3,1,2"], ["(1,2,3)", "(3,2,1)"]),
    "3, 3, 5": (["3,5,3"], ["3,5", "3,5,5"]),
    "\\{(1,2),(3,4)\\}": (["(3,4),(1,2)"], ["\\{(2,1),(4,3)\\}"]),
    "[0,1)": (["0 \\le x < 1"], ["(0,1)", "[0,1]", "\\{0,1\\}", "0 < x < 1"]),
    "(-\\infty,2)\\cup(3,\\infty)": (["(3,∞) ∪ (−∞,2)"], ["(-\\infty,2]\\cup[3,\\infty)", "(2,3)"]),
    "\\emptyset": (["\\varnothing", "∅", "\\{\\}"], ["0", "\\{0\\}"]),
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}": (["\\begin{bmatrix}1\\\\ 2\\end{bmatrix}"], ["\\begin{pmatrix}1&2\\end{pmatrix}", "\\{1,2\\}"]),
    # percent, money, thousands, powers
    "50%": (["50 \\text{ percent}", "50\\,\\%", "0.5", "50"], ["$50", "50 dollars", "0.5%", "5"]),
    "12.5\\%": (["12.5", "0.125", "\\frac{25}{2}\\%"], ["1.25", "12.5 cm"]),
    "0.5%": (["0.005", "\\frac{1}{2}\\%"], ["50%", "0.05"]),
    "0.1": (["10%", "10^-1"], ["0.1%", "10"]),
    "33\\frac{1}{3}\\%": (["1/3", "33 1/3 percent", "33.333333%"], ["33%", "0.33"]),
    "$1.5M": (["1.5 million", "1500000"], ["1.5", "1.5 billion"]),
    "$18.90": (["US$18.90", "18.90 USD", "\\text{\\$}18.90"], ["€18.90", "18.90 cents", "18.90%"]),
    "1,000": (["1'000", "1’000", "1\\ 000", "x = 1,000"], ["1.000", "1,00", "1,0000"]),
    "1,000 and 2,000": (["1000, 2000", "2,000, 1,000"], ["1, 2", "3000"]),
    "2^{10}": (["2**10", "1024"], ["210"]),
    "1e-400": (["10^{-400}"], ["2e-400", "0"]),
    # signs, degrees, units
    "-5": (["﹣5", "‒5", "—5", "{-}5", "－5"], ["5", "±5", "--5"]),
    "90°": (["90º", "90˚", "\\angle ABC = 90^\\circ"], ["90 radians", "90°C"]),
    "30°15'": (["30^{\\circ}15'"], ["45", "30.15"]),
    "60 km/h": (["60\\,\\frac{\\text{km}}{\\text{h}}", "60 \\text{ km}/\\text{h}", "60 km per hour"], ["60 mph", "60 km"]),
    "25 degrees Celsius": (["25 degrees C", "25°C"], ["25°F", "25 degrees Fahrenheit"]),
    "12 V": (["12", "12 volts"], ["12 amps", "12 W"]),
    "5th": (["5^{th}", "5"], ["6th"]),
    # choices, words, dates, codes
    "A": (["A)", "\\textbf{(A)}", "a"], ["A, B", "not A", "AA"]),
    "C": (["(C) 12", "C. Paris"], ["(D) 12", "12"]),
    "A, C": (["A and C", "(A), (C)", "\\text{A, C}"], ["C", "A, C, D"]),
    "salt and pepper": (["salt, pepper"], ["salt or pepper"]),
    "北京": (["\\text{北京}"], ["京北"]),
    "True": (["true", "\\text{True}"], ["False", "1"]),
    "nan": (["NaN"], ["0"]),
    "infinity": (["\\infty", "inf"], ["-\\infty", "1e308"]),
    "7:05": (["7:05"], ["7/5"]),
    "12 AM": (["12:00 a.m."], ["12 PM", "12"]),
    "10-20%": (["10\\%–20\\%"], ["9.8", "-10"]),
    # long numbers
    "9007199254740993": (["9,007,199,254,740,993", "2^{53}+1"], ["9007199254740992", "9.007199254740992e15"]),
    "1" * 900: (["1" * 900], ["1" * 899 + "2", "1" * 5000]),
    "\\frac{355}{113}": (["355/113"], ["\\frac{103993}{33102}", "\\pi"]),
}  # fmt: skip
REFUSED = {
    "13=12": "equates numbers that differ",
    "\\sqrt{3} \\approx 1.414": "equates numbers that differ",
    "\\ge 12": "is read by math-verify as 12",
    "\\langle 1,2 \\rangle": "is read by math-verify as 1.20000000000000",
    "12 & 13": "is read by math-verify as 13",
    "1/0": "is read by math-verify as zoo",
    "7 R 2": "is read by math-verify as 7*r*2",
    "5 ft 10 in": "is read by math-verify as 5*f*t*10*i*n",
    "Jan 5": "is read by math-verify as j*a*n*5",
    "\\textbf{(C)}\\ 12": "has a choice and its value, which is unclear",
    "1,00,000": "has zeros after a comma, which is unclear",
    "1,2,\\ldots,10": "leaves out something, which is unclear",
    "1" * 5000: "is no mathematical expression that math-verify can read",
}


def rows() -> Iterator[tuple[str, str, float]]:
    for gold, (right, wrong) in KINDS.items():
        yield from ((gold, response, 1.0) for response in (gold, *right))
        yield from ((gold, response, 0.0) for response in wrong)


@pytest.mark.parametrize(("gold", "response", "value"), [pytest.param(*row, id="-".join(map(str, row))[:60]) for row in rows()])
def test_a_response_is_right_or_wrong(gold: str, response: str, value: float) -> None:
    assert MATH("", f"We have $n = 3$ and \\boxed{{{response}}}.", gold, {})[0] == value


@pytest.mark.parametrize("gold", [pytest.param(gold, id=gold[:40]) for gold in KINDS])
def test_readable_answers_are_accepted(gold: str) -> None:
    MATH.check_gold(gold)


@pytest.mark.parametrize("gold", [pytest.param(gold, id=gold[:40]) for gold in REFUSED])
def test_an_unclear_answer_is_refused_in_one_line(gold: str) -> None:
    with pytest.raises(BadGold) as refused:
        MATH.check_gold(gold)
    assert str(refused.value).endswith(f" {REFUSED[gold]}") and "\n" not in str(refused.value) and len(str(refused.value)) < 250


@pytest.mark.parametrize(("response", "value"), [("$12$", 1.0), ("It is $13 = 12$.", 0.0), ("12 dollars", 1.0), ("It is $x = 12$.", 1.0)])
def test_an_equation_of_numbers_that_differ_is_not_right_without_a_box(response: str, value: float) -> None:
    assert MATH("", response, "12", {})[0] == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("C", 1.0),
        ("(C)", 1.0),
        ("**C**", 1.0),
        ("D", 0.0),
        ("A, C", 0.0),
        ("<think>C</think>D", 0.0),
        ("<think>\\boxed{C}", 0.0),
    ],
)
def test_a_choice_needs_no_box_where_it_is_all_that_is_said(response: str, value: float) -> None:
    assert MATH("", response, "C", {})[0] == value


@pytest.mark.parametrize(
    "opened_by_the_prompt_or_by_itself",
    [
        ("{}</think>\n\n{}", "<think>\n{}</think>\n\n{}", "<think>{}", "{}</think>"),
        ("{}[/THINK]{}", "[THINK]{}[/THINK]{}", "[THINK]{}", "{}[/THINK]"),
        (
            "{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
            "<|channel|>analysis<|message|>{}",
            "{}<|channel|>final<|message|>",
        ),
    ],
    ids=["think", "Ministral", "gpt-oss"],
)
def test_what_is_reasoned_is_no_answer(opened_by_the_prompt_or_by_itself: tuple[str, ...]) -> None:
    *whole, unclosed, silent = opened_by_the_prompt_or_by_itself
    right, wrong = ("\\boxed{12}", "So it is 12."), ("\\boxed{13}", "So it is 13.")
    for form in whole:
        for thought in (*right, *wrong):
            assert [MATH("", form.format(thought, said), "12", {})[0] for said in (*right, *wrong)] == [1.0, 1.0, 0.0, 0.0]
    assert [MATH("", form.format(thought), "12", {})[0] for form in (unclosed, silent) for thought in right] == [0.0] * 4


@pytest.mark.parametrize("gold", ["12", "C", "1,234", "50\\%", "10\\text{ cm}", "1,2,3", "\\{1,2\\}", "\\pm 3", "[0,1)", "2:5", "x=5"])
def test_a_list_of_texts_that_is_itself_a_text_is_that_list(gold: str) -> None:
    """Skywork-OR1 has each answer as `["..."]`."""
    for written in (json.dumps([gold]), str([gold]), json.dumps(["77", gold]), f" {json.dumps([gold])}\n"):
        MATH.check_gold(written)
        right, wrong = KINDS.get(gold, ([], []))
        for response in (gold, *right, *wrong):
            assert MATH("", f"\\boxed{{{response}}}", written, {}) == MATH(
                "", f"\\boxed{{{response}}}", json.loads(json.dumps(["77", gold])), {}
            )
        assert MATH("", f"\\boxed{{{gold}}}", written, {})[0] == 1.0


@pytest.mark.parametrize("gold", ['["\\frac{1}{2}"]', '["\\text{Yes}"]', '["12", 13]', '["12" "13]', "['12' '13']"])
def test_a_text_that_is_nearly_a_list_is_refused(gold: str) -> None:
    with pytest.raises(BadGold, match="looks like a list of quoted texts"):
        MATH.check_gold(gold)


def test_a_number_that_python_cannot_print_is_refused() -> None:
    with pytest.raises(BadGold, match="^the answer is a number of more than 1000 digits$"):
        MATH.check_gold(10**5000)


@pytest.mark.parametrize(
    ("text", "kind", "value", "unit"),
    [
        ("$1,250.50 \\text{ cm}$.", "number", "1250.50", "cm"),
        ("\\text{Paris}", "text", "paris", None),
        ("2\\sqrt{3} m^2", "formula", "2\\sqrt{3}", "m^2"),
        ("50\\%", "number", "50", "percent"),
        ("1,5e3", "unclear", "has a decimal comma, which is unclear", None),
    ],
)
def test_one_classifier_reads_golds_and_responses(text: str, kind: str, value: str, unit: str | None) -> None:
    reading = read(text)
    assert (reading.kind, reading.value, reading.unit) == (kind, value, unit)
