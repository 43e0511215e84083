"""The verifiers as the functions that they are, called without a scoring process."""

import importlib
import inspect
import re
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.rewards.score import Score
from megarl.rewards.verifiers import EVALUATING, Abstained, BadReturn, load, read_return

WORKED = {
    "gsm8k": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether she sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
    "thousands": "He has $2,125 left, of $3,000.\n#### 2,125",
    "math": r"Since $2 + 2 = 4$, we have $x^2 = 4$ and hence $\frac{x}{4} = \boxed{\frac{1}{2}}$. So $x = 2$ for $n = 7$.",
    "aime": "204",
    "bare": "x^2+1",
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("gsm8k", "72", "24"), ("thousands", "2125", "3000"), ("math", "1/2", "7"), ("aime", "204", "20"), ("bare", "x^2+1", "1")],
)
def test_the_answers_of_known_sets_are_read_as_they_are(name: str, right: str, wrong: str) -> None:
    verify = load({"type": "math_verify"})
    for said, value in ((right, 1.0), (wrong, 0.0)):
        assert verify("", f"Let us see. The answer is $\\boxed{{{said}}}$.", WORKED[name], {})[0] == value


SPELL = {"source_dataset": "spell_backward", "source_params": {}}


def test_a_last_match_without_the_extract_group_is_no_answer() -> None:
    verify = load({"type": "reasoning_gym", "threshold": 1.0, "extract": r"answer: (\w+)|none"})
    for response, value in (("answer: esroh", 1.0), ("none, or answer: esroh", 1.0), ("answer: esroh, or none", 0.0), ("none", 0.0)):
        assert verify("q", response, "esroh", SPELL) == (value, {"raw": value}), response


@pytest.mark.parametrize("extract", [None, r"<answer>(.*?)</answer>"])
@pytest.mark.parametrize(("thought", "said"), [("34", "43"), ("43", "34")])
def test_what_is_reasoned_is_no_answer_for_reasoning_gym(extract: str | None, thought: str, said: str) -> None:
    verify = load({"type": "reasoning_gym", "threshold": 1.0, "extract": extract})
    thought, answer = (text if extract is None else f"<answer>{text}</answer>" for text in (thought, said))
    meta = {"source_dataset": "basic_arithmetic", "source_params": {}}
    assert verify("17 + 17", f"<think>{thought}</think>\n{answer}", "34", meta)[0] == float(said == "34")
    assert verify("17 + 17", f"<think>{thought}", "34", meta)[0] == 0.0


def test_a_number_that_is_no_score_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import reasoning_gym

    verify = load({"type": "reasoning_gym", "threshold": 1.0, "extract": None})
    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda _: SimpleNamespace(score_answer=lambda *_: float("nan")))
    with pytest.raises(BadReturn, match=r"^reasoning-gym's scorer returned nan \(float\), not a finite number$"):
        verify("q", "esroh", "esroh", SPELL)


def test_the_scorers_that_evaluate_a_response_are_those_that_are_refused() -> None:
    """Of the installed reasoning-gym: a data set that comes to do so with another version fails here, and one that no longer does."""
    importlib.import_module("reasoning_gym")  # all of them, whatever was imported alone
    from reasoning_gym.factory import DATASETS

    call = re.compile(r"\b(eval|exec|parse_expr|sympify)\((answer|response|user\w*)\b")
    modules = {name: inspect.getsource(sys.modules[dataset.__module__]) for name, (dataset, _) in DATASETS.items()}
    assert {name for name, text in modules.items() if call.search(text)} == EVALUATING


def test_a_prompt_file_cannot_choose_a_scorer_that_evaluates_python(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    meta = {"source_dataset": "string_insertion", "source_params": {}}
    with pytest.raises(ValueError, match="the scorer of string_insertion evaluates the response as Python, which is refused"):
        load({"type": "reasoning_gym", "threshold": 1.0, "extract": None})("q", f"[open({str(touched)!r}, 'w')]", "a", meta)
    assert not touched.exists()


SCALARS = [np.float32(0.5), np.array(0.5), np.array([0.5]), np.float64(0.5), torch.tensor(0.5), torch.tensor([[0.5]], dtype=torch.bfloat16)]


@pytest.mark.parametrize("half", SCALARS, ids=lambda one: type(one).__name__)
def test_a_scalar_of_numpy_or_torch_is_a_score_and_a_part(half: Any) -> None:
    assert read_return(half) == (0.5, {})
    assert read_return({"score": half, "part": half, "text": "0.5"}) == (0.5, {"part": 0.5})


def test_a_text_under_feedback_is_kept_and_no_other() -> None:
    returned = {"score": 1, "feedback": "x" * 5000, "pred": "x"}
    assert read_return(returned) == (1.0, {"feedback": "x" * 4000})
    assert read_return({"score": 1, "feedback": 2}) == (1.0, {"feedback": 2.0})
    score = Score.of(0.5, {"tests/feedback": "line 3", "tests": 0.5, "style/feedback": "long", "empty/feedback": " "})
    assert score == Score(0.5, {"tests": 0.5}, feedback="line 3\n\nlong")


def test_what_is_a_score_what_abstains_and_what_is_neither() -> None:
    for one in (True, 1, np.bool_(True), np.int64(1), torch.tensor(True), Fraction(1), Decimal(1)):
        assert read_return(one) == (1.0, {})
    for none in (None, {"score": None, "part": 1.0}):
        with pytest.raises(Abstained):
            read_return(none)
    strange = (np.ma.masked, np.ma.array([0.5], mask=[True]), np.datetime64("2020"))
    for bad in (
        *strange,
        "1",
        np.array([1.0, 2.0]),
        np.array([]),
        torch.ones(2),
        np.array("1"),
        np.float32("nan"),
        torch.tensor(1j),
        [1.0],
    ):
        with pytest.raises(BadReturn, match="not a finite number$"):
            read_return(bad)


@pytest.mark.parametrize("number", [10**5000, -(10**400), Fraction(10**5000)], ids=["long", "negative", "fraction"])
def test_a_number_that_no_float_holds_is_no_score(number: Any) -> None:
    """Nor is it printed, which Python refuses beyond 4300 digits."""
    with pytest.raises(BadReturn, match=r"^the reward function returned a number beyond the limit of 1e\+09$"):
        read_return(number)


KEEPING = """
kept = []

def ours(answer):
    kept.append(answer)
    return 1

def verls(solution_str, ground_truth):
    return ours(ground_truth)
"""


GOLDS = [0.00001, 34, "34", "2e-5", True, ["a", 2.5], {"target": 24, "numbers": [1, 2]}]


@pytest.mark.parametrize("gold", GOLDS, ids=str)
def test_a_function_gets_the_answer_of_the_row(gold: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our keywords as with verl's: one rule for a number in an answer."""
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(KEEPING)
    monkeypatch.syspath_prepend(tmp_path)
    for function in ("ours", "verls"):
        load({"type": "function", "path": f"{name}:{function}"})("q", "r", gold, {})
    kept = sys.modules[name].kept
    assert kept == [gold, gold] and {type(one) for one in kept} == {type(gold)}


def test_of_a_list_of_answers_any_is_right_for_reasoning_gym() -> None:
    verify = load({"type": "reasoning_gym", "threshold": 1.0, "extract": None})
    assert [verify("q", response, ["esroh", "god"], SPELL)[0] for response in ("esroh", "god", "cat")] == [1.0, 1.0, 0.0]
