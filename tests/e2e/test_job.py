"""The RL job is the same twice; evaluations."""

import json
from pathlib import Path

import yaml
from safetensors.torch import load_file

from megarl.config import SftConfig, load
from megarl.loops.sft import sft
from megarl.observe.samples import files
from tests.e2e.job import Job
from tests.e2e.lab import Lab


def test_the_same_seed_gives_the_same_run_and_keeps_the_earlier_one_of_that_name(one_rank: Job, lab: Lab) -> None:
    before = one_rank.steps()
    again = lab.run(Job(one_rank.runs, one_rank.model, one_rank.overrides))
    assert again.steps() == before
    directory = one_rank.runs / "job"
    first, second = (load_file(place / "model" / "model.safetensors") for place in (directory / "earlier-1", directory))
    assert all(bool((first[name] == second[name]).all()) for name in first)


def test_evaluation_from_the_command_line_of_what_supervised_training_left(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    examples = Path(__file__).parents[2] / "examples" / "quickstart"
    places = (f"run_dir={tmp_path}", f"model.path={tiny_model}")
    source = "data.train={type: reasoning_gym, dataset: spell_backward, seed: 2000000, items: 400}"
    sizes = ("sft.steps=3", "sft.batch_size=32", source, "data.eval.items=64", "model.dtype=bfloat16", "layout.ranks=2", "layout.ep=2")
    with lab.stage():
        sft(load(examples / "sft.yaml", ["name=sft", *places, *sizes], SftConfig))
    rows = [json.loads(line) for line in (tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["sft/loss"] for row in rows if "sft/loss" in row]
    assert len(losses) == 3 and losses[-1] < losses[0]
    measured = [(row["step"], row["eval/heldout/sft/loss"]) for row in rows if "eval/heldout/sft/accuracy" in row]
    assert [step for step, _ in measured] == [0, 3] and measured[1][1] < measured[0][1]
    trained = f"model.path={tmp_path / 'sft' / 'model'}"
    few = "eval=[{name: few, source: {type: reasoning_gym, dataset: spell_backward, seed: 7, items: 4}, n: 4, temperature: 0.5}]"
    assert lab.evaluate(examples / "eval.yaml", "name=eval", places[0], trained, "data.eval.items=16", few) == 0
    result = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert result["prompts"] == 20 and set(result) == {"model", "prompts", "sampled", "greedy", "sets"}
    assert [list(one["estimates"]) for one in result["sets"]] == [["avg@1", "greedy"], ["avg@4", "pass@2", "pass@4"]]
    kept = {file.set: list(file.records()) for file in files(tmp_path / "eval")}
    assert {name: len(records) for name, records in kept.items()} == {"heldout": 32, "few": 16}
    scored = sum(record.reward for record in kept["few"] if record.reward is not None) / 16
    assert result["sets"][1]["estimates"]["avg@4"]["value"] == scored


def test_the_policy_of_the_best_evaluation_is_left(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    best = ("train.best=eval/heldout/avg@1", "train.patience=1", "train.eval_every=1", "train.steps=4", "optimizer.lr=0.02")
    job = lab.run(Job(tmp_path, tiny_model, best))
    scores = [row["eval/heldout/avg@1"] for row in job.rows() if row["step"] and "eval/heldout/avg@1" in row]
    highest = scores.index(max(scores))
    assert len(scores) == min(4, highest + 2), "an evaluation without a better one ends the run"
    [kept] = (tmp_path / "job" / "best").iterdir()
    assert kept.name == f"{highest + 1:06d}"
    left = load_file(tmp_path / "job" / "model" / "model.safetensors")
    assert all(bool((left[name] == tensor).all()) for name, tensor in load_file(kept / "model.safetensors").items())
    words = (tmp_path / "job" / "model" / "README.md").read_text()
    facts = yaml.safe_load(words.split("---\n")[1])["megarl"]
    assert facts["steps"] == highest + 1 and facts["evaluation"]["eval/heldout/avg@1"] == max(scores) and facts["commit"]
    text = job.write().read_text()
    cut = [line for line in text.splitlines() if not line.startswith(("optimizer", "algorithm", "sync", "train", "  train"))]
    (tmp_path / "eval.yaml").write_text("\n".join(cut))
    assert lab.evaluate(tmp_path / "eval.yaml", "name=eval", f"model.path={tmp_path / 'job' / 'model'}") == 0
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["sampled"] == max(scores)
