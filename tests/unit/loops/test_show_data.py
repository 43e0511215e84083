"""`megarl data`: the sources that a run reads, the rows that are asked for, what was left out; and the same at a run's start."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.checks.without_engines import check_sft
from megarl.cli import command as cli
from megarl.config import SftConfig, load
from megarl.data.supervised import load_demonstrations
from megarl.data.tokenizer import load_tokenizer
from megarl.loops.show_data import tell_first, verb_of
from megarl.observe.run import Run
from tests.unit.bad_input.cases import VERBS
from tests.unit.data.written import written

USER = {"role": "user", "content": "17 + 17?"}
GOOD = [{"messages": [USER, {"role": "assistant", "content": f"34 {word}"}]} for word in ("one", "two", "four", "six")]
BAD = {"messages": [{"role": "user", "content": "17 + 17?"}]}
LONG = {"messages": [USER, {"role": "assistant", "content": "34 " * 100}]}
ROWS = [GOOD[0], GOOD[1], BAD, GOOD[2], LONG, GOOD[3]]
DROP = ("data.on_bad_row=drop", "data.overlong=drop")


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path) -> Path:
    """A supervised run of ROWS, whose model directory has nothing but the tokenizer."""
    (tmp_path / "model").mkdir()
    for file in tiny_model.iterdir():
        if file.name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    written(tmp_path / "rows.jsonl", *ROWS)
    data = f"data: {{train: {{type: conversations, path: {tmp_path}/rows.jsonl}}}}\nsft: {{steps: 1, max_tokens: 64}}\n"
    (tmp_path / "job.yaml").write_text(f"name: job\nmodel: {{path: {tmp_path}/model}}\nrun_dir: {tmp_path}/runs\n{data}")
    return tmp_path / "job.yaml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert cli.main(["data", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["data", *map(str, arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("megarl: error: ")


def rows(lines: list[str], path: Path) -> list[int]:
    """The numbers of the rows that have headings."""
    start = f"data.train.path: {path.parent}/rows.jsonl:"
    return [int(line.removeprefix(start).partition(":")[0]) for line in lines if line.startswith(start)]


def test_data_shows_the_first_rows_and_those_left_out(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, job, *DROP, "--rows", "3")
    assert lines[0].startswith(f"data.train: {job.parent}/rows.jsonl: 4 rows, 4 samples, ") and rows(lines, job) == [1, 2, 4]
    assert [line for line in lines if line.startswith("learned | ")] == [f"learned | 34 {word}<|end|>" for word in ("one", "two", "four")]
    assert "data.train: 1 of 5 are longer than sft.max_tokens=64, and left out (data.overlong=drop)" in lines
    assert "data.train: 1 bad row is left out (data.on_bad_row=drop)" in lines
    reasons = [line for line in lines if line.startswith("left out: ")]
    assert [f"rows.jsonl:{number}: " in reason for number, reason in zip((3, 5), reasons, strict=True)] == [True, True]
    assert not (job.parent / "runs").exists()


def test_data_refuses_a_bad_row_unless_another_row_is_requested(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, job).startswith(
        f"data.train.path: {job.parent}/rows.jsonl:3: the conversation has no message of the assistant's"
    )
    assert refused(capsys, job, "--row", 3).startswith(f"data.train.path: {job.parent}/rows.jsonl:3: ")
    for name in ("4", "rows.jsonl:4", f"{job.parent}/rows.jsonl:4", f"data.train.path: {job.parent}/rows.jsonl:4"):
        lines = shown(capsys, job, "--row", name)
        assert rows(lines, job) == [4] and "learned | 34 four<|end|>" in lines


def test_a_row_that_is_left_out_shows_its_reason(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, job, *DROP, "--row", 5)
    assert rows(lines, job) == [] and lines[-1].startswith(f"left out: data.train.path: {job.parent}/rows.jsonl:5: the conversation has ")


def test_a_line_that_is_no_row_does_not_hide_those_behind_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job.parent / "rows.jsonl"
    path.write_text('{"messages\n' + path.read_text())
    assert refused(capsys, job, "--row", 1).startswith(f"data.train.path: {path}:1: not JSON: ")
    assert shown(capsys, job, *DROP, "--row", 1)[-1].startswith(f"left out: data.train.path: {path}:1: not JSON: ")
    assert "learned | 34 one<|end|>" in shown(capsys, job, "--row", 2)


def test_a_row_shows_what_the_run_trains_on(job: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are those of the run's own samples, for each row alone as in the whole file."""
    config = load(job, [*DROP, f"model.path={tiny_model}", "cluster.gpus=false", "sft.batch_size=2"], SftConfig)
    samples = check_sft(config).train
    capsys.readouterr()
    for number, sample in zip((1, 2, 4, 6), samples, strict=True):
        head = shown(capsys, job, *DROP, "--row", number)[0]
        tokens, read = len(sample.tokens), sample.prompt_length
        assert head.endswith(f"rows.jsonl:{number}: {tokens} tokens: {read} read, {tokens - read} learned, 0 masked")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--row", "7"], r"data: --row 7: HERE/rows.jsonl has 6 rows"),
        (["--row", "0"], "data: --row 0: data.train takes rows 1 and up of HERE/rows.jsonl"),
        (["--row", "4", "data.train.rows=3"], "data: --row 4: data.train takes rows 1 to 3 of HERE/rows.jsonl"),
        (["--row", "1", "data.train.skip=1"], "data: --row 1: data.train takes rows 2 and up of HERE/rows.jsonl"),
        (["--row", "other.jsonl:1"], "data: --row other.jsonl:1: no source reads this file"),
        (["--row", "first"], "data: --row 'first': must be a row's number, or a file and a number as in rows.jsonl:17"),
        (["--rows", "0"], "data: --rows 0: must be 1 or more"),
        (["data.train.path=nowhere.jsonl"], "data.train.path: no such file: "),
        (["data.train.path=empty.jsonl"], "data.train.path: HERE/empty.jsonl holds no conversations"),
        (["data.train.path=empty.jsonl", "--row", "1"], "data: --row 1: HERE/empty.jsonl has 0 rows"),
        (["sft.steps=0"], "data: job reads no data: it takes no steps and has no data.eval"),
        (["model.path=nowhere"], "model.path: no tokenizer in HERE/nowhere"),
        (["sft.max_token=3"], "sft.max_token: unknown key (did you mean 'max_tokens'?)"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], line: str, job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    Path("empty.jsonl").touch()
    assert refused(capsys, job, *arguments).startswith(line.replace("HERE", str(job.parent)))


@pytest.mark.parametrize(
    ("verb", "marks"),
    [
        ("train", {"read", "answer"}),
        ("value", {"read", "answer"}),
        ("eval", {"read", "answer"}),
        ("pairs", {"read", "answer"}),
        ("sft", {"read", "learned"}),
        ("rm", {"read", "scored"}),
        ("dpo", {"read", "learned"}),
    ],
)
def test_the_configuration_of_every_verb_shows_all_its_sources(
    verb: str, marks: set[str], tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text(json.dumps({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}) + "\n")
    Path("job.yaml").write_text(VERBS[verb].format(runs=tmp_path / "out", model=tiny_model))
    lines = shown(capsys, "job.yaml", "--rows", 1)
    keys = {"sft": ["data.train"], "eval": ["data.eval"]}.get(verb, ["data.train", "data.eval"])
    assert [line.partition(":")[0] for line in lines if line.startswith(tuple(f"{key}: " for key in keys)) and " item" not in line] == keys
    assert {line.partition(" |")[0].strip() for line in lines if " | " in line} == marks


def test_the_parts_of_a_mixture_and_generated_items_have_their_own_rows(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(VERBS["train"].format(runs=tmp_path / "out", model=tiny_model))
    gym: dict[str, Any] = {
        "type": "reasoning_gym",
        "dataset": "spell_backward",
        "params": {"min_word_len": 3, "max_word_len": 5},
        "seed": 1,
    }
    parts = [{"source": {**gym, "items": 3}, "weight": 0.5}, {"source": {**gym, "items": 5, "seed": 9}}]
    data = f"data.train={json.dumps({'type': 'mixture', 'parts': parts})}"
    lines = shown(capsys, tmp_path / "job.yaml", data, "--rows", 2)
    heads = [line for line in lines if line.startswith("data.train")]
    keys = [f"data.train.parts.{number}.source" for number in (0, 1)]
    assert heads[0] == f"{keys[0]}: spell_backward (weight 0.5): 3 prompts" and heads[3] == f"{keys[1]}: spell_backward: 5 prompts"
    assert [head.rpartition(":")[0] for head in heads[1:3]] == [f"{keys[0]}: item {number}" for number in (0, 1)]
    one = shown(capsys, tmp_path / "job.yaml", data, "--row", f"{keys[1]}: item 1")
    assert one == lines[lines.index(heads[5]) : lines.index(heads[5]) + len(one)]
    limit = refused(capsys, tmp_path / "job.yaml", data, "--row", f"{keys[0]}: item 3")
    assert limit == f"data: --row {keys[0]}: item 3: {keys[0]} takes rows 0 to 2 of spell_backward"


def test_episodes_have_nothing_to_show_before_they_begin(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(VERBS["train"].format(runs=tmp_path / "out", model=tiny_model))
    source = "data.train={type: episodes, seed: 5, items: 1000000000}"
    lines = shown(capsys, tmp_path / "job.yaml", source, "data.eval=null", "eval=[{name: a, source: {type: episodes, seed: 1, items: 2}}]")
    assert lines == [
        "data.train: episodes: 1,000,000,000 episodes",
        "episode 5: the environment writes what is read",
        "eval.0.source: episodes: 2 episodes",
        "episode 1: the environment writes what is read",
    ]


@pytest.mark.parametrize(
    ("tree", "verb"),
    [
        ({"algorithm": {}, "train": {}, "eval": []}, "train"),
        ({"algorithm": {}, "dpo": {}}, "dpo"),
        ({"algorithm": {}, "reward": {}}, "train"),
        ({"reward": {}, "data": {"train": {}}}, "pairs"),
        ({"reward": {}, "eval": []}, "eval"),
        ({"serve": {}}, "serve"),
    ],
)
def test_the_verb_follows_from_the_sections(tree: dict[str, Any], verb: str) -> None:
    assert verb_of(tree) == verb


def test_a_configuration_without_data_says_so(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(VERBS["serve"].format(runs=tmp_path / "out", model=tiny_model))
    assert refused(capsys, tmp_path / "job.yaml") == "data: `megarl serve` reads no data: its clients send the prompts"
    (tmp_path / "job.yaml").write_text("name: job\n")
    assert refused(capsys, tmp_path / "job.yaml").startswith("data: the configuration has no section of a verb that reads data")


def test_megarl_data_imports_neither_torch_nor_ray_and_survives_a_closed_pipe(job: Path) -> None:
    code = f"import sys; from megarl import cli; cli.main(['data', {str(job)!r}, {DROP[0]!r}, {DROP[1]!r}])"
    code += "; print(sorted({'torch', 'ray', 'megatron', 'vllm'} & set(sys.modules)), file=sys.stderr)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == "[]\n" and process.wait() == 0


def test_a_run_shows_its_first_row_at_the_start_unless_it_keeps_no_samples(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*overrides: str) -> list[str]:
        config = load(job, [*overrides, "log.tensorboard=false"], SftConfig)
        with Run(config) as run:
            capsys.readouterr()
            tell_first(run, config, [])
            tell_first(run, config, items)
            return capsys.readouterr().err.splitlines()

    config = load(job, [*DROP], SftConfig)
    items = load_demonstrations(config.data.train, load_tokenizer(config.model.path), config.data, 64, "data.train")
    lines = told()
    assert lines[0].startswith(f"job: data.train.path: {job.parent}/rows.jsonl:1: ") and lines[-1] == "job: learned | 34 one<|end|>"
    assert told("log.samples=0") == []
