"""`megarl generate`: what it refuses before an engine starts, in the words of its options, and what it would ask the engine for."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cli import main
from megarl.config import ConfigError
from megarl.data.prompts import Prompt
from megarl.engines.engine import RolloutError
from megarl.engines.vllm.engine import VllmEngine
from megarl.loops.generate import CACHE_MB, RESPONSE, answer, check, parser
from tests.unit.data.written import written

REFUSED = [
    (["{model}"], "generate: give a PROMPT, --file FILE or --chat"),
    (["{model}", "x", "--chat"], "generate: give a PROMPT, --file FILE or --chat"),
    (["{here}/none", "x"], "MODEL: no such directory"),
    (["{model}", "  "], "PROMPT: the prompt is empty"),
    (["{model}", "x", "--n", "0"], "--n: Input should be greater than 0 (got 0)"),
    (["{model}", "--chat", "--n", "2"], "--n 2: a chat has one response a turn"),
    (["{model}", "x", "--top-p", "1.5"], "--top-p: Input should be less than or equal to 1 (got 1.5)"),
    (["{model}", "x", "--stop", ""], "--stop: String should have at least 1 character"),
    (["{model}", "x", "--temperature", "nan"], "--temperature nan: must be 0 or more"),
    (["{model}", "x", "--seed", "-1"], "--seed -1: must be 0 or more"),
    (["{model}", "x", "--seed", "4294967296"], "--seed 4294967296: must be 0 or more, and below 2^32"),
    (["{model}", "x\udcff"], "PROMPT: is not UTF-8"),
    (["{model}", "x", "--stop", "a", "--stop", "\udcff"], "--stop: is not UTF-8"),
    (["{model}", "x", "--max-tokens", "0"], "--max-tokens: Input should be greater than 0 (got 0)"),
    (["{model}", "x", "--max-tokens", "9999"], "--max-tokens 9999 with its prompt: 10002 tokens, and the model supports at most 512"),
    (["{model}", "x" * 600], "prompt of 602 tokens is longer than the model's room=511"),
    (["{model}", "x", "--tp", "3"], "--tp 3: does not divide the model's 4 attention heads and 2 KV heads"),
    (["{model}", "x", "--template", "no place"], "--template: 'no place' has no {{prompt}} in it"),
    (["{model}", "x", "--template", "{{prompt}}", "--system", "y"], "--system: is part of a chat"),
    (["{model}", "x", "--template-args", "[1]"], "--template-args: must be a mapping, or one as JSON, not [1]"),
    (["{model}", "x", "--template-args", '{{"a": 1}}'], "--template-args.a: the chat template reads no such argument"),
    (["{model}", "x", "--template", "{{prompt}}", "--template-args", '{{"a": 1}}'], "--template-args: the prompt goes through no chat"),
    (["{model}", "--chat", "--template", "{{prompt}}"], "--template: a chat goes through the model's chat template"),
    (["{model}", "--file", "{here}/none.jsonl"], "--file: no such file"),
    (["{model}", "--file", "{here}/rows.jsonl"], "rows.jsonl:1: no value for --prompt-key 'prompt'; the row has question"),
    (["{model}", "--file", "{here}/empty.jsonl"], "--file: {here}/empty.jsonl holds no prompts"),
    (["{model}", "x", "--out", "{here}/rows.jsonl"], "--out {here}/rows.jsonl: already exists"),
    (["{model}", "x", "--out", "{here}/none/out.jsonl"], "--out {here}/none/out.jsonl: its directory does not exist"),
    (["{model}", "x", "--top-logprobs", "4"], "--top-logprobs 4: needs --out, and 1 to "),
    (["{model}", "x", "--top-logprobs", "1000", "--out", "{here}/out.jsonl"], "--top-logprobs 1000: needs --out, and 1 to "),
    (["{model}", "x", "--top-logprobs", "0", "--out", "{here}/out.jsonl"], "--top-logprobs 0: needs --out, and 1 to "),
    (["{model}", "--chat", "--out", "{here}/out.jsonl"], "--out {here}/out.jsonl: a chat is not written"),
]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    rows = [{"question": "one?"}, {"question": "and two?"}]
    written(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[message[:24] for _, message in REFUSED])
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], message: str, here: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"here": here, "model": tiny_model}
    assert main(["generate", *(one.format(**names) for one in arguments)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message.format(**names) in line


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("hello", "leaves the prompt out"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "not done within"),
        ("{{ 'x' * 100000000000 }}", "MemoryError"),
    ],
)
def test_a_chats_template_is_tried_before_an_engine_starts(
    template: str, why: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny_model, model := tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    assert main(["generate", str(model), "--chat", "--cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "MODEL: the model's chat template" in line and why in line


def test_a_file_is_there_whole_or_not_at_all_and_nobody_elses_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two commands write into one folder; the other one's file is not finished."""
    others = tmp_path / "out.jsonl.0.partial"
    others.write_text("half")
    prompts = [Prompt(number, "one?", [1], "", {}, "one?") for number in range(2)]

    class Speaker:
        job = SimpleNamespace(prompts=prompts, sampling=SimpleNamespace(n=1))

        def responses(self, asked: list[Prompt]) -> list[Any]:
            if self.broken:
                raise RolloutError("gone")
            return [[{"response": "two", "finish_reason": "stop", "length": 3}] for _ in asked]

        broken = True

    speaker: Any = Speaker()
    with pytest.raises(RolloutError):
        answer(speaker, tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name]
    speaker.broken = False
    answer(speaker, tmp_path / "out.jsonl")
    assert [json.loads(line)["sample"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [0, 0]
    assert others.read_text() == "half" and "wrote 2 responses to 2 prompts" in capsys.readouterr().out


def test_a_missing_compiler_is_a_failure_and_an_unwritable_out_file_bad_input(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def start(*_: object, **named: object) -> None:
        subprocess.run(["no-such-compiler"])

    monkeypatch.setattr(VllmEngine, "start", start)
    assert main(["generate", str(tiny_model), "x", "--cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("megarl: failed: FileNotFoundError: ")
    with pytest.raises(ConfigError, match=r"^generate: /proc/out\.jsonl\.\w+\.partial: No such file or directory$"):
        answer(SimpleNamespace(), Path("/proc/out.jsonl"))  # type: ignore[arg-type]  # it is not asked


def test_generate_passes_its_options_to_the_engine(here: Path, tiny_model: Path) -> None:
    given = [str(tiny_model), "--file", str(here / "rows.jsonl"), "--prompt-key", "question", "--n", "3", "--top-k", "5", "--stop", "!"]
    job = check(parser().parse_args([*given, "--cpu"]))
    assert [prompt.text for prompt in job.prompts] == ["one?", "and two?"] and job.dtype == "float32" and not job.gpu
    longest = max(len(prompt.ids) for prompt in job.prompts)
    assert (job.settings.max_prompt_tokens, job.settings.max_num_seqs) == (longest, 6)
    assert job.sampling.max_tokens == 512 - longest < RESPONSE and 0 < (job.settings.kv_cache_mb or 0) <= CACHE_MB
    assert (job.sampling.n, job.sampling.temperature, job.sampling.top_k, job.sampling.stop) == (3, 1.0, 5, ["!"])
    system = check(parser().parse_args([*given, "--cpu", "--system", "Be brief."]))
    assert len(system.prompts[0].ids) > len(job.prompts[0].ids)
