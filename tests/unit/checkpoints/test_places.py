"""Models and data that have moved are known by what they hold; others in their place are refused."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints import places
from megarl.checkpoints.may_differ import compare, held_by
from megarl.checkpoints.places import fingerprint
from megarl.config import TrainConfig, load
from tests.e2e.job import RL


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a model with a file of which pieces are read."""
    monkeypatch.setattr(places, "WHOLE", 1000)
    (path := tmp_path / "model").mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(os.urandom(1_000_000))
    return path


def test_fingerprints_of_copies_are_equal_and_of_other_files_are_not(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere" / "copy")
    (copy / "README.md").write_text("a page")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "download.json").write_text("{}")
    assert fingerprint(model) == fingerprint(copy) is not None
    weights = (copy / "model.safetensors").read_bytes()
    for name, content in (
        ("model.safetensors", os.urandom(1_000_000)),
        ("model.safetensors", weights[:-1]),
        ("model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1])),
        ("model.safetensors", bytes([weights[0] ^ 1]) + weights[1:]),
        ("tokenizer.json", b'{"a": 1}'),
        ("chat_template.jinja", b"{{ messages }}"),
    ):
        other = shutil.copytree(model, tmp_path / "other")
        (other / name).write_bytes(content)
        assert fingerprint(other) not in (None, fingerprint(model)), name
        shutil.rmtree(other)
    assert fingerprint(tmp_path / "nowhere") is None
    (tmp_path / "a.jsonl").write_text("rows")
    (tmp_path / "b.jsonl").write_text("rows")
    assert fingerprint(tmp_path / "a.jsonl") == fingerprint(tmp_path / "b.jsonl") != fingerprint(model)


def test_a_run_resumes_with_moved_models_and_data_and_refuses_others(model: Path, tmp_path: Path) -> None:
    (rows := tmp_path / "rows.jsonl").write_text("1\n2\n")
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=model))

    def tree(where: Path, mode: Any = "json") -> dict[str, Any]:
        part = f"{{source: {{type: file, path: {where / 'rows.jsonl'}}}}}"
        given = [f"data.train={{type: mixture, parts: [{part}]}}", f"model.path={where / 'model'}", f"data.eval.seed={len(str(where))}"]
        return load(tmp_path / "job.yaml", given, TrainConfig).model_dump(mode=mode)

    before, held = tree(tmp_path), held_by(tree(tmp_path, "python"))
    assert sorted(held) == ["data.train.parts.0.source.path", "model.path"]
    there = tmp_path / "moved"
    shutil.copytree(model, there / "model")
    shutil.copy(rows, there)
    assert compare(before, tree(there), held) == [] and len(compare(before, tree(there))) == 2
    (there / "rows.jsonl").write_text("1\n3\n")
    [line] = compare(before, tree(there), held)
    assert line.startswith("data.train.parts.0.source.path: ") and line.endswith("a resumed run cannot change it")
    shutil.rmtree(there)
    assert len(compare(before, tree(there), held)) == 2, "and what is not there is not what was"


def test_other_contents_at_the_same_path_are_refused_and_named(model: Path, tmp_path: Path) -> None:
    (rows := tmp_path / "rows.jsonl").write_text("1\n2\n3\n")
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=model))
    given = [f"data.train={{type: file, path: {rows}}}", f"data.eval={{type: file, path: {rows}}}"]
    config = load(tmp_path / "job.yaml", given, TrainConfig)
    now, held = config.model_dump(mode="json"), held_by(config.model_dump())
    assert compare(now, now, held) == [] and json.loads(json.dumps(held)) == held

    def says() -> str:
        [line] = compare(now, now, held)
        assert line.endswith(": a resumed run cannot change it")
        return line

    rows.write_text("3\n2\n1\n")  # in another order
    assert says().startswith(f"data.train.path: {rows} has other contents than when the checkpoint was saved")
    rows.unlink()
    assert says().startswith(f"data.train.path: {rows} was read by the run, and cannot be read any more")
    rows.write_text("1\n2\n3\n")  # as before
    assert compare(now, now, held) == []
    for name, content in (("config.json", '{"model_type": "qwen3_moe", "rope_theta": 5}'), ("chat_template.jinja", "{{ messages }}")):
        before = (model / name).read_text() if (model / name).exists() else None
        (model / name).write_text(content)
        assert says().startswith(f"model.path: {model} is not what it was when the checkpoint was saved ({name})")
        (model / name).unlink() if before is None else (model / name).write_text(before)
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").unlink()
    assert "(config.json and 1 more files there)" in says()
    assert compare(now, now, {"model.path": "what an earlier version has saved"}) == []


def test_a_reordered_large_file_has_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which only pieces are read, far apart."""
    monkeypatch.setattr(places, "WHOLE", 1000)
    monkeypatch.setattr(places, "PIECE", 16)
    lines = [f"{number:07d}\n" for number in range(100_000)]
    (one := tmp_path / "one.jsonl").write_text("".join(lines))
    (two := tmp_path / "two.jsonl").write_text("".join(lines[1:] + lines[:1]))
    assert fingerprint(one) != fingerprint(two)
    two.write_text("".join(lines))
    assert fingerprint(one) == fingerprint(two)
