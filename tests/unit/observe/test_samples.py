"""What a run keeps to read, and how it is shown."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.observe.samples import FOLDER, SampleRecord, files, forget_after, line, spread, write

PLAIN = SampleRecord("2+2?", "4", "is it 4", 1.0, {"raw": 0.5}, None, "stop", 3, 0, False, 1, True)
HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\u202egnp\x9b31m\nlast"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path, 3, [PLAIN, replace(PLAIN, response="5", reward=0.0, finish_reason="length")])
    write(tmp_path, 12, [replace(PLAIN, response=HOSTILE, reward=0.25)])
    write(tmp_path, 12, [replace(PLAIN, prompt=[{"role": "system", "content": "be Brief"}], reward=-1.0)], "held_out")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """First words of the samples that the command prints."""
    assert main(["samples", *map(str, arguments)]) == 0
    return [row for row in capsys.readouterr().out.splitlines() if row.startswith("---")]


def test_samples_are_chosen_by_step_set_reward_text_and_ending(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out, newest, first, cut = shown(capsys, run)
    assert held_out.startswith("--- step 12, evaluation of held_out: reward -1 (raw 0.5), 3 tokens, ended by itself")
    assert newest.startswith("--- step 12, training: reward 0.25")
    for arguments, expected in (
        (["--best"], [first, newest, cut, held_out]),
        (["--worst", "--most", "2"], [held_out, cut]),
        (["--truncated"], [cut]),
        (["--step", "3"], [first, cut]),
        (["--set", "train", "--most", "1"], [newest]),
        (["--search", "be brief"], [held_out]),
    ):
        assert shown(capsys, run, *arguments) == expected, arguments


def test_a_sample_without_a_reward_is_neither_the_best_nor_the_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, [replace(PLAIN, reward=-1.0), replace(PLAIN, reward=None, parts={}, error="timeout")])
    for order in ("--best", "--worst"):
        assert [row.split(", ")[1] for row in shown(capsys, tmp_path, order)] == ["training: reward -1 (raw 0.5)"]
    assert shown(capsys, tmp_path)[1] == "--- step 1, training: no reward, 3 tokens, ended by itself, not judged: timeout"


def test_control_characters_of_a_model_do_not_reach_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--whole"]) == 0
    written = capsys.readouterr().out
    kept = "".join(file.path.read_bytes().decode("ascii") for file in files(run))
    for text in (written, kept, line(replace(PLAIN, prompt=HOSTILE, response=HOSTILE))):
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert r"\x1b[2J\x1b]0;owned\x07\r\u202egnp\x9b31m" in written and "\n         | last\n" in written
    [file] = [file for file in files(run) if file.step == 12 and file.set is None]
    assert [record.response for record in file.records()] == [HOSTILE]


def test_a_resumed_run_drops_rows_that_it_writes_again(run: Path) -> None:
    forget_after(run, 3)
    assert [(file.step, file.set) for file in files(run)] == [(3, None)]


def test_samples_refuses_directories_without_a_run_and_malformed_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty := tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    (broken / FOLDER).mkdir(parents=True)
    (broken / FOLDER / "step_1.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")
    for arguments, message in (
        ([tmp_path / "none"], f"megarl: error: samples: no such directory: {tmp_path / 'none'}"),
        ([empty], f"megarl: error: samples: {empty} has no samples: it is not a megarl run, has taken no step, or log.samples=0"),
        ([run, "--step", "4"], f"megarl: error: samples: {run} has no such samples (steps 3 to 12, sets held_out, train)"),
        ([broken], f"megarl: error: {broken / FOLDER / 'step_1.jsonl'}:1: no sample: answer: Field required"),
    ):
        assert main(["samples", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.splitlines() == [message]


def test_kept_samples_come_from_as_many_prompts_as_possible() -> None:
    assert spread(64, 4) == [0, 21, 42, 63]  # of 16 prompts with 4 responses each: four prompts
    assert spread(512, 16)[-1] == 511 and spread(5, 1) == [0]
    assert spread(3, 8) == [0, 1, 2] and spread(3, 0) == []


def test_a_truncated_unscored_response_is_marked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = replace(PLAIN, reward=-1.0, parts={"overlong": -1.0}, finish_reason="length", scored=False)
    write(run, 13, [cut])
    said = "3 tokens, cut by the length limit and not scored (reward.require_finished)"
    assert shown(capsys, run, "--step", 13) == [f"--- step 13, training: reward -1 (overlong -1), {said}"]
    assert line(cut) == f"reward -1, {said}: 2+2? -> is it 4"


def test_a_prompt_message_with_only_a_tool_call_shows_the_call(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}]
    prompt: list[dict[str, Any]] = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "7"},
    ]
    called = replace(PLAIN, prompt=prompt)
    write(run, 13, [called])
    assert len(shown(capsys, run, "--step", 13)) == 1
    assert '"name": "add", "arguments": {"a": 3, "b": 4}' in line(called)


def test_a_shown_episode_has_its_number_of_turns(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, 13, [replace(PLAIN, turns=3)])
    assert shown(capsys, run, "--step", 13) == ["--- step 13, training: reward 1 (raw 0.5), 3 tokens, ended by itself after 3 turns"]
    [file] = [one for one in files(run) if one.step == 13]
    assert "after 3 turns: " in line(next(file.records()))
