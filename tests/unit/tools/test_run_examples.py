"""tools/run_examples.py: the figures that examples are expected to give, and the tool that checks them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megarl.config import load
from tests.unit.examples.test_configurations import EXAMPLES, root_of
from tests.unit.rewards.scoring_server import eventually
from tools import run_examples as tool

ROOT = EXAMPLES.parent
ELSEWHERE = {
    "large",
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "qwen3_5_35b_a3b",
    "qwen3_vl_30b_a3b",
    "deepseek_v3",
    "gpt_oss_120b",
    "kimi_k2",
}  # for machines with GPUs
ABLATED = {f"{folder}.yaml" for folder in ("vapo_ablation/vapo", "vapo_ablation/variants", "async/stale", "async/variants")}
NOT_RUN = {"rlhf/serve.yaml", "own_task/eval.yaml", "expected.yaml"} | ABLATED
BASES = {"recipes/tiny.yaml"}


def configurations() -> list[tuple[Path, list[str]]]:
    """(file, overrides) of every `megarl` command of expected.yaml."""
    found = []
    for example in tool.read_expected(tool.EXPECTED):
        for command in example.commands:
            words = command.replace("{seed}", "1").split()
            if words[0] == "megarl":
                found.append((ROOT / words[2], words[3:]))
    return found


def test_every_command_of_expected_yaml_is_valid() -> None:
    for path, overrides in configurations():
        assert load(path, overrides, root_of(path)).seed == 1


def test_every_example_for_this_machine_is_expected_to_give_figures() -> None:
    expected = {path.relative_to(EXAMPLES).as_posix() for path, _ in configurations()}
    here = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.yaml")}
    assert {path.as_posix() for path in here if not ELSEWHERE & set(path.parts)} == expected | NOT_RUN | BASES


def example(name: str, limits: list[float], **spec: Any) -> Any:
    """An example whose one command writes a summary and two rows of metrics."""
    write = (
        "import json, pathlib; d = pathlib.Path('runs/it'); d.mkdir(parents=True, exist_ok=True); "
        "(d / 'summary.json').write_text(json.dumps({'rate': {'after': 0.75, 'before': 0.25}})); "
        "(d / 'metrics.jsonl').write_text(''.join(json.dumps({'step': n, 'kl': n * {seed}, 'target': 2.0}) + chr(10) for n in (1, 2, 3)))"
    )
    figure = tool.Figure("it", spec.pop("of"), limits[0], limits[1], **spec)
    return tool.Example(name, "a title", [f'python -c "{write}"'], [figure])


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ({"of": "it: rate.after"}, 0.75),
        ({"of": "it: rate.after", "less": "it: rate.before"}, 0.5),
        ({"of": "it: kl", "last": 2}, 5.0),
        ({"of": "it: kl at 3", "less": "it: kl at 1"}, 4.0),
        ({"of": "it: kl", "last": 2, "by": "it: target"}, 2.5),
    ],
)
def test_a_figure_is_read_and_compared_with_its_range(tmp_path: Path, spec: dict[str, Any], value: float) -> None:
    for limits, within in (([value, 9.0], True), ([value + 1e-6, 9.0], False), ([0.0, value - 1e-6], False)):
        one = example("one", limits, **spec)
        result = tool.run(one, tool.prepare(tmp_path, "2"), "2", "abc")
        assert result.failed is None and result.figures == {"it": pytest.approx(value)}
        assert (tool.faults(one, result) == []) == within
        assert (f"**{value:g}**" in tool.tables([one], {"one": {"2": result}})) != within


def test_a_tool_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tools import run_examples as tool
slow = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
one = tool.Example("one", "a title", [f'python -c "{{slow}}"'], [])
place = Path({str(tmp_path)!r})
tool.run(one, tool.prepare(place, "1"), "1", "abc")
"""
    pid = tmp_path / "1" / "pid"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as started:
        eventually(lambda: pid.exists() and pid.read_text() != "")
        started.kill()
    eventually(lambda: not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE)


def test_a_command_that_fails_is_a_fault(tmp_path: Path) -> None:
    failing = tool.Example("one", "a title", ['python -c "import sys; print(7); sys.exit(3)"'], [])
    result = tool.run(failing, tool.prepare(tmp_path, "1"), "1", "abc")
    assert result.failed is not None and "sys.exit(3)" in result.failed
    assert tool.faults(failing, result)[0].startswith("failed: ")
    assert (tmp_path / "1" / "logs" / "one.log").read_text() == "7\n"


def test_parts_that_are_run_one_after_another_make_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "expected.yaml"
    figures = {"rate": {"of": "it/{item}: rate", "range": [0.5, 1]}}
    path.write_text(yaml.safe_dump({"it/{item}": {"items": ["a", "b"], "title": "{item}, short", "commands": [], "figures": figures}}))
    examples = tool.read_expected(path)
    monkeypatch.setattr(tool, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(tool, "PAGE", tmp_path / "figures.md")
    tool.PAGE.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    tool.publish(examples, {("it/a", "2"): tool.Result("abc", "2026-01-02", 60, {"rate": 0.75})})
    tool.publish(
        examples,
        {
            ("it/a", "1"): tool.Result("abc", "2026-01-02", 120, {"rate": 0.25}),
            ("it/b", "1"): tool.Result("abd", "2026-01-03", 60, {}, "no"),
        },
    )
    text = tool.PAGE.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert [line for line in text.splitlines() if line.startswith(("|", "**"))] == [
        "**`it/{item}`**: each, short (2026-01-02, commit abc; 2026-01-03, commit abd)",
        "| | range | 1 | 2 |",
        "|---|---|---|---|",
        "| `a`, rate | 0.5 to 1 | **0.25** | 0.75 |",
        "| `b`, rate | 0.5 to 1 | **failed** |  |",
        "| minutes each | | 1.5 | 1.0 |",
    ]


def test_a_metric_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    result = tool.run(example("one", [0.0, 1.0], of="it: events/none", last=1), tool.prepare(tmp_path, "1"), "1", "abc")
    assert result.failed is not None and "has no metric events/none" in result.failed


def test_what_an_example_comes_after_is_run_first() -> None:
    examples = tool.read_expected(tool.EXPECTED)
    assert [one.name for one in tool.chosen(examples, ["rlhf/ppo"])] == ["quickstart", "rlhf/rm", "rlhf/ppo"]
    assert len(tool.chosen(examples, ["*"])) == len(examples)
    with pytest.raises(tool.InputError, match="--only: nothing: there is no such example"):
        tool.chosen(examples, ["nothing"])


def test_other_variants_take_the_warm_start_of_their_seed(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    name, theirs = "model.layers.0.self_attn.q_proj.weight", tmp_path / "1" / "runs" / "quickstart-seed1"
    (theirs / "sft" / "model").mkdir(parents=True)
    (theirs / "tiny").mkdir()
    save_file({name: torch.zeros(2, 2), "other": torch.ones(2)}, theirs / "sft" / "model" / "model.safetensors")
    for variant, changed in (("1-perturbed", 1), ("1-reseeded", 0)):
        tool.prepare(tmp_path, variant)
        tool.warm_start(tmp_path, variant)
        mine = load_file(tmp_path / variant / "runs" / "quickstart-seed1" / "sft" / "model" / "model.safetensors")
        assert mine[name].count_nonzero() == changed and mine["other"].tolist() == [1, 1]
    [quickstart] = tool.chosen(tool.read_expected(tool.EXPECTED), ["quickstart"])
    assert len(list(tool.commands(quickstart, "1"))) == 4
    [only] = tool.commands(quickstart, "1-reseeded")
    assert only[3] == "train" and only[-1] == "seed=101"
    with pytest.raises(tool.InputError, match="run 2 first"):
        tool.warm_start(tmp_path, "2-perturbed")


def test_a_malformed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expected.yaml"
    path.write_text(yaml.safe_dump({"one": {"title": "t", "commands": [], "figures": {}, "after": ["two"]}}))
    with pytest.raises(tool.InputError, match="one: after: there is no example 'two'"):
        tool.read_expected(path)


EXPECTED = """
one: {{title: t, commands: ["{command}"], figures: {{}}}}
two: {{title: t, after: [one], commands: [python -c pass], figures: {{}}}}
"""


def told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    commits: Sequence[str],
    capsys: pytest.CaptureFixture[str],
    variants: Sequence[str] = ("1",),
) -> tuple[int, str]:
    """Exit status and words of the tool over two examples; `commits` are what the tree is at each question, the last one from then on."""
    (tmp_path / "expected.yaml").write_text(EXPECTED.format(command=command))
    asked = iter([*commits[:-1], *([commits[-1]] * 9)])
    monkeypatch.setattr(tool, "EXPECTED", tmp_path / "expected.yaml")
    monkeypatch.setattr(tool, "commit_now", lambda: next(asked))
    monkeypatch.setattr(sys, "argv", ["run_examples.py", "--write", "--variants", *variants, "--out", str(tmp_path / "out")])
    monkeypatch.setattr(tool, "publish", lambda *_: None)
    status = tool.main()
    words = capsys.readouterr()
    return status, words.out + words.err


def test_what_is_done_is_not_done_again_and_what_failed_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, words = told(monkeypatch, tmp_path, "python -c exit(1)", ["abc"], capsys)
    assert status == 1 and "two: failed: one has failed" in words and "2 of 2 results failed or are out of range" in words
    status, words = told(monkeypatch, tmp_path, "python -c pass", ["abc"], capsys)
    assert status == 0 and "1: one ..." in words and "1: two ..." in words and "all 2 results are in range" in words
    status, words = told(monkeypatch, tmp_path, "python -c pass", ["abc"], capsys)
    assert status == 0 and "..." not in words
    status, words = told(monkeypatch, tmp_path, "python -c pass", ["abd"], capsys)
    assert status == 0 and "1: one ..." in words, "another commit"


def test_files_that_change_meanwhile_spoil_the_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, words = told(monkeypatch, tmp_path, "python -c pass", ["abc", "abc+"], capsys)
    assert status == 2 and "1: one: the files changed while it ran" in words and not (tmp_path / "out" / "abc" / "1").exists()


def test_the_picture_is_that_of_all_seeds_or_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Sequence[str]] = []
    monkeypatch.setattr(tool, "PICTURED", "one")
    monkeypatch.setattr(tool, "draw", lambda out, variants, picture: drawn.append(variants))
    told(monkeypatch, tmp_path, "python -c pass", ["abc"], capsys, ("1", "3"))
    assert drawn == []
    told(monkeypatch, tmp_path, "python -c pass", ["abc"], capsys, ("1", "3", "2"))
    assert drawn == [("1", "2", "3")]
