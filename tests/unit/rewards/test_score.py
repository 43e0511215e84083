"""Every response gets its score, whatever a reward function does to itself, its process or the clock."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config import ConfigError, FunctionReward, MathReward, ReasoningGymReward, RewardSettings
from megarl.rewards.processes import ProcessScorer as Scorer
from megarl.rewards.score import Score, ScoreRequest, errors_by_kind
from megarl.rewards.sources import check
from megarl.sandbox import process

FUNCTIONS = '''
import ctypes, os, signal, sys, time

def plain(prompt, response, answer, meta):
    return {"score": response == answer, "length": len(response), "pred": response, "torch": "torch" in sys.modules}

def answer_only(answer, response, bonus=1.0):
    return bonus * (answer == response)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": solution_str == ground_truth, "index": extra_info["index"], "known": data_source == "sums"}

def anything(**keywords):
    return len(keywords)

def unusual(response, **_):
    """What the response says."""
    if response == "raise":
        raise KeyError("missing")
    if response == "loop":
        while True:
            pass
    if response == "swallow":
        try:
            time.sleep(60)
        except:
            pass
        return 1.0
    if response == "deaf":  # no signal gets through, as in C code that never returns
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)
    if response == "exit":
        sys.exit(3)
    if response == "vanish":
        os._exit(3)
    if response == "crash":
        ctypes.string_at(0)
    if response == "print":
        print("from a reward function")
        os.write(1, b"more of it")
        return 1.0
    nan = float("nan")
    odd = {"nan": nan, "none": None, "text": "1", "inf": float("inf"), "list": [1], "no score": {"a": 1}, "huge": -1e308}
    return (odd | {"right": 1, "wrong": 0, "true": True, "half": 0.5, "part": {"score": 1, "a": nan}})[response]

def tells(response):
    return {"score": 0.5, "feedback": response * 5000, "other": "text"}

def floods(response):
    print("x" * 99_999)
    return 1.0

async def later(response):
    return 1

def needs(response, tokens):
    return 1

not_callable = 3
'''


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "ends.py").write_text("import os; os._exit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)


def settings(name: str = "plain", **more: Any) -> RewardSettings:
    return RewardSettings(source=FunctionReward(path=f"my_rewards:{name}"), **more)


def pids(scorer: Scorer) -> list[int]:
    """The scoring processes as they are now; one that was late or died has been replaced."""
    return [one.pid for one in scorer._processes]


def ask(response: str, answer: str = "", meta: dict[str, Any] | None = None, *, finished: bool = True) -> ScoreRequest:
    return ScoreRequest("question", response, answer, meta or {}, finished)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def gym() -> Iterator[Scorer]:
    with Scorer(RewardSettings(source=ReasoningGymReward())) as scorer:
        yield scorer


def spell(response: str, answer: str, *, finished: bool = True) -> ScoreRequest:
    return ask(response, answer, {"source_dataset": "spell_backward", "source_params": {}}, finished=finished)


def test_gym_scores_whole_answers_only(gym: Scorer) -> None:
    requests = [spell("esroh", "esroh"), spell(" ESROH\n", "esroh"), spell("esrox", "esroh"), spell("esroh!", "esroh"), spell("", "esroh")]
    scores = gym.score(requests)
    assert [score.value for score in scores] == [1, 1, 0, 0, 0]  # their scorer ignores case
    assert scores[2].parts["raw"] == pytest.approx(0.8)  # partial credit, seen and not paid
    assert gym.score([spell("esroh", "esroh", finished=False)]) == [Score(0.0, scored=False)]
    assert gym.score([]) == []


def test_gym_sample_without_its_dataset_is_an_error_of_that_sample(gym: Scorer) -> None:
    scores = gym.score([spell("a", "a"), ask("a", "a"), spell("a", "a")])
    assert [score.value for score in scores] == [1, None, 1] and scores[1].error == "KeyError: 'source_dataset'"


def test_512_tiny_samples_take_under_a_fifth_of_a_second(gym: Scorer) -> None:
    requests = [spell(f"{number}", f"{number}" if number % 3 else "x") for number in range(512)]
    fastest = float("inf")
    for _ in range(50):  # one undisturbed moment is enough
        start = time.monotonic()
        scores = gym.score(requests)
        fastest = min(fastest, time.monotonic() - start)
        assert [score.value for score in scores] == [float(number % 3 > 0) for number in range(512)]
        if fastest < 0.2:
            return
    pytest.fail(f"{fastest:.2f} s")


def test_extract_takes_the_final_result_of_written_steps() -> None:
    meta = {"source_dataset": "chain_sum", "source_params": {"min_terms": 3}}
    source = ReasoningGymReward(extract=r"=(-?\d+)$", threshold=1.0)
    with Scorer(RewardSettings(source=source)) as scorer:
        responses = ["4-1=3;3-7=-4", "4-1=9;3-7=-4", "4-1=3;3-7=4", "-4", "4-1=3;3-7=-4;", ""]
        assert [score.value for score in scorer.score([ask(response, "-4", meta) for response in responses])] == [1, 1, 0, 0, 0, 0]


def test_math_is_compared_symbolically() -> None:
    cases = [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1),
        ("$x^2+2x+1$", "(x+1)^2", 1),
        ("34", "34", 1),
        ("7", "8", 0),
        ("1", "x^2+1", 0),
        ("", "3", 0),
    ]
    with Scorer(RewardSettings(source=MathReward())) as scorer:
        scores = scorer.score([ask(response, answer) for response, answer, _ in cases] + [ask("x", "")])
    assert [score.value for score in scores[:-1]] == [value for *_, value in cases]
    assert scores[-1].error is not None and scores[-1].error.startswith("BadGold: the answer '' is empty")


def test_user_functions_get_the_keywords_they_name() -> None:
    meta = {"data_source": "sums", "extra_info": {"index": 7}}
    expected = {
        "plain": Score(1.0, {"length": 2.0, "torch": 0.0}),  # a scoring process loads no torch
        "answer_only": Score(1.0),
        "compute_score": Score(1.0, {"index": 7.0, "known": 1.0}),
        "anything": Score(4.0),
    }
    for name, score in expected.items():
        check(settings(name))
        with Scorer(settings(name)) as scorer:
            assert scorer.score([ask("34", "34", meta)]) == [score]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:f", r"cannot import module 'nowhere': ModuleNotFoundError: No module named 'nowhere' \(looked .*"),
        ("broken.py:f", r"'broken.py:f' names a file, and a module is imported by its name: broken:f$"),
        ("broken:f", r"cannot import module 'broken': ModuleNotFoundError: No module named 'nowhere_to_be_found' \(looked .*"),
        ("my_rewards:f", r"module 'my_rewards' has no attribute 'f'"),
        ("my_rewards:not_callable", r"module 'my_rewards' has no function 'not_callable'"),
        ("my_rewards:later", r"my_rewards:later is a coroutine function; an ordinary one is needed"),
        ("my_rewards:needs", r"my_rewards:needs asks for 'tokens', and is given the keywords prompt, response, answer, meta .*"),
    ],
)
def test_function_that_cannot_work_is_refused_before_the_run(path: str, message: str) -> None:
    unusable = RewardSettings(source=FunctionReward(path=path))
    with pytest.raises(ConfigError, match=rf"^reward\.source\.path: {message}$"):
        check(unusable)
    with Scorer(unusable) as scorer, pytest.raises(ConfigError, match=rf"^reward\.source\.path: {message}$"):
        scorer.score([ask("a")])


def test_feedback_reaches_the_score_cut_to_what_a_message_holds() -> None:
    """4,000 characters, of all parts of a sum together, whatever they take as JSON; blank ones are none."""
    function = {"type": "function", "path": "my_rewards:tells"}
    both = {"type": "sum", "parts": [{"name": "a", "source": function}, {"name": "b", "source": function}]}
    for source, parts in ((function, {}), (both, {"a": 0.5, "b": 0.5})):
        with Scorer(RewardSettings.model_validate({"source": source})) as scorer:
            emoji, blank = scorer.score([ask("\U0001f600", ""), ask(" ", "")])
        assert emoji.feedback == "\U0001f600" * 4000 and blank.feedback is None
        assert emoji.parts == blank.parts == parts


def test_several_rewards_are_their_weighted_sum_and_each_is_told() -> None:
    def summed(*parts: dict[str, Any]) -> RewardSettings:
        return RewardSettings.model_validate({"source": {"type": "sum", "parts": list(parts)}})

    function = {"type": "function", "path": "my_rewards:unusual"}
    right, judged = {"name": "right", "source": {"type": "math_verify"}, "weight": 2.0}, {"name": "own", "source": function, "weight": -0.5}
    with Scorer(summed(right, judged)) as scorer:
        scores = scorer.score([ask("half", "1"), ask("part", "part"), ask("nan", "1"), ask("none", "1")])
    assert (scores[0].value, scores[0].parts) == (-0.25, {"right": 0.0, "own": 0.5})
    assert scores[1].parts["own"] == 1.0 and scores[1].value == 2 * scores[1].parts["right"] - 0.5
    assert scores[2].value is None and scores[2].error is not None and scores[2].error.startswith("bad return: ")
    assert scores[3] == Score(None, error="abstained"), "what one of them says nothing of has no sum"
    with pytest.raises(ConfigError, match=r"^reward\.source\.parts\.1\.source\.path: cannot import module 'nowhere'"):
        check(summed(right, {**judged, "source": {**function, "path": "nowhere:f"}}))
    with pytest.raises(ConfigError, match=r"^reward\.source\.parts\.0\.source\.extract: '\(' is not a regular expression"):
        check(summed({**right, "source": {"type": "reasoning_gym", "extract": "("}}))
    with pytest.raises(ValueError, match=r"two parts have the same name \(right, right\)"):
        summed(right, right)


def test_module_that_ends_its_process_and_bad_expression_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^reward\.source: importing it ended the process \(worker died: exit status 4\)$"):
        check(RewardSettings(source=FunctionReward(path="ends:f")))
    with pytest.raises(ConfigError, match=r"^reward\.source\.extract: '\(' is not a regular expression: .*$"):
        check(RewardSettings(source=ReasoningGymReward(extract="(")))
    check(RewardSettings(source=ReasoningGymReward(extract=r"=(\d+)")))


FAILURES = {
    "raise": "KeyError: 'missing'",
    "exit": "SystemExit: 3",
    "nan": "bad return: the reward function returned nan (float), not a finite number",
    "inf": "bad return: the reward function returned inf (float), not a finite number",
    "none": "abstained",
    "text": "bad return: the reward function returned '1' (str), not a finite number",
    "list": "bad return: the reward function returned [1] (list), not a finite number",
    "no score": "bad return: the reward function returned a dict without 'score' (keys: a)",
    "huge": "bad return: the reward function returned -1e+308, beyond the limit of 1e+09",
    "loop": "timeout",
    "swallow": "timeout",
    "deaf": "timeout",
    "vanish": "worker died: exit status 3",
    "crash": "worker died: SIGSEGV",
}
SOUND = {"right": 1.0, "wrong": 0.0, "true": 1.0, "half": 0.5, "part": 1.0}


@pytest.mark.parametrize("workers", [1, 3])
def test_each_scoring_failure_costs_only_its_own_sample(workers: int) -> None:
    responses = [name for failure in FAILURES for name in (failure, *SOUND)]  # failures amid sound samples of the same chunk
    with Scorer(settings("unusual", timeout_s=0.3, workers=workers)) as scorer:
        before = pids(scorer)
        scores = scorer.score([ask(response) for response in responses])
        for response, score in zip(responses, scores, strict=True):
            assert score == (Score(None, {}, FAILURES[response]) if response in FAILURES else Score(SOUND[response])), response
        assert errors_by_kind(scores) == {"KeyError": 1, "SystemExit": 1, "abstained": 1, "bad return": 6, "timeout": 3, "worker died": 2}
        # The same processes go on with the next call, the three that were killed or died replaced.
        assert scorer.score([ask("right")] * 40) == [Score(1.0)] * 40
        after = pids(scorer)
        assert len(after) == workers and set(after) != set(before)
    assert not any(alive(pid) for pid in before + after)


def test_interpreted_code_that_is_late_costs_no_new_process() -> None:
    with Scorer(settings("unusual", timeout_s=0.2)) as scorer:
        before = pids(scorer)
        late = Score(None, error="timeout")
        assert scorer.score([ask("loop"), ask("right"), ask("loop")]) == [late, Score(1.0), late]
        assert pids(scorer) == before


def test_time_is_per_sample_not_per_batch(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef f(response):\n    time.sleep(0.2)\n    return 1\n")
    with Scorer(RewardSettings(source=FunctionReward(path="slow:f"), timeout_s=1.0)) as scorer:
        assert scorer.score([ask("a")] * 8) == [Score(1.0)] * 8  # 1.6 s together


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_process_that_dies_or_is_stopped_between_calls_is_replaced(number: signal.Signals) -> None:
    with Scorer(settings()) as scorer:
        assert scorer.score([ask("a", "a")])[0].value == 1
        outer = psutil.Process(pids(scorer)[0])
        inner = [outer, *outer.children(recursive=True)][-1]
        inner.send_signal(number)
        if number == signal.SIGKILL:
            assert scorer._processes[0].sandboxed.ended(60.0) == "SIGKILL"  # a zombie may have a thread that has not ended yet
        while number == signal.SIGSTOP and inner.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert [score.value for score in scorer.score([ask("a", "a"), ask("a", "b")])] == [1, 0]
        assert not alive(outer.pid) and pids(scorer)[0] != outer.pid


def test_a_lost_rank_is_detected_while_functions_score() -> None:
    lost = True

    def look() -> None:
        if lost and time.monotonic() - begun > 0.5:
            raise RuntimeError("rank 1 has been stopped")

    with Scorer(settings("unusual", workers=1, timeout_s=30.0), look=look) as scorer:
        begun, before = time.monotonic(), pids(scorer)
        with pytest.raises(RuntimeError, match="rank 1"):
            scorer.score([ask("loop")])
        assert time.monotonic() - begun < 20, "not the time limit of the function"
        lost = False
        assert [one.value for one in scorer.score([ask("right"), ask("half")])] == [1.0, 0.5]
        assert before != pids(scorer)


def test_prints_of_a_reward_function_do_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with Scorer(settings("unusual")) as scorer:
        assert scorer.score([ask("print")]) == [Score(1.0)]
    out, err = capfd.readouterr()
    assert out == "" and "more of it" in err


def test_prints_go_to_the_log_of_a_run_within_its_bound(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "rewards.log"
    for bound, times in ((1 << 20, 1), (10, 1), (1 << 20, 2)):  # the log is kept on; beyond its bound nothing is added
        monkeypatch.setattr(process, "LOG_BYTES", bound)
        with Scorer(settings("unusual"), log) as scorer:
            assert scorer.score([ask("print")]) == [Score(1.0)]
        assert log.read_text().count("from a reward function") == log.read_text().count("more of it") == times
    assert capfd.readouterr() == ("", "")


def test_a_function_that_prints_works_without_a_writable_log(tmp_path: Path) -> None:
    with Scorer(settings("floods"), tmp_path / "nowhere" / "rewards.log") as scorer:  # more than a pipe holds
        assert scorer.score([ask("right")] * 3) == [Score(1.0)] * 3


def test_a_scoring_process_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    with (
        Scorer(RewardSettings(source=FunctionReward(path="ends:f")), log) as scorer,
        pytest.raises(RuntimeError, match=re.escape(f"is in {log}")),
    ):
        scorer.score([ask("right")])


DRIVER = """
from megarl.config import FunctionReward, RewardSettings
from megarl.rewards.processes import ProcessScorer
from megarl.rewards.score import ScoreRequest
scorer = ProcessScorer(RewardSettings(source=FunctionReward(path="my_rewards:unusual"), timeout_s=60, workers=2))
scorer.score([ScoreRequest("", "right", "", {}, True)])
print(*(process.pid for process in scorer._processes), flush=True)
scorer.score([ScoreRequest("", "deaf", "", {}, True)])
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_scoring_process_outlives_the_run(ending: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    time.sleep(0.3)  # into the sample that never returns
    driver.send_signal(ending)
    driver.wait(timeout=120)
    limit = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
    driver.stdout.close()


def test_feedback_is_a_text_that_a_tokenizer_takes() -> None:
    """Half a surrogate pair stands for a byte of a program's output that is not UTF-8; an error of the tokenizer would end the run."""
    score = Score.of(1.0, {"a/feedback": "line\n\udcff", "b/feedback": " ", "steps": 2})
    assert score == Score(1.0, {"steps": 2.0}, feedback="line\n?")
