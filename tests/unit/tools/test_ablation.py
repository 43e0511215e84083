"""tools/ablation.py: the variants of a configuration side by side, and those of VAPO."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, dump
from megarl.observe.writers import JsonLines
from tools import ablation as tool

ROOT = Path(__file__).parents[3]
VAPO = ROOT / "examples" / "vapo_ablation" / "variants.yaml"


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {key: tree}
    return {name: value for part, below in tree.items() for name, value in flat(below, f"{key}.{part}".lstrip(".")).items()}


def test_each_variant_of_vapo_leaves_out_its_part_alone() -> None:
    whole, *variants = tool.trials(VAPO, [1], [])
    assert whole.variant == "vapo" and len(variants) == 7, "the seven parts"
    base = flat(whole.config.model_dump())
    changed = {
        trial.variant: {name: value for name, value in flat(trial.config.model_dump()).items() if value != base[name] and name != "name"}
        for trial in variants
    }
    assert changed == {
        "no value pretraining": {"critic.pretrain_steps": 0},
        "no decoupled GAE": {"algorithm.lambda_critic": None},
        "no length-adaptive GAE": {"algorithm.alpha": None},
        "no clip-higher": {"algorithm.clip_high": 0.2},
        "no token-level loss": {"algorithm.aggregation": "seq-mean-token-mean"},
        "no positive-example loss": {"algorithm.mu": 0.0},
        "no group sampling": {"rollout.samples_per_prompt": 1, "train.prompts_per_step": 256},
    }
    responses = {trial.config.rollout.samples_per_prompt * trial.config.train.prompts_per_step for trial in (whole, *variants)}
    assert responses == {256}, "every variant sees as many responses"


def test_stale_responses_are_weighed_or_not_and_all_else_is_the_same() -> None:
    trials = tool.trials(VAPO.parents[1] / "async" / "variants.yaml", [1], [])
    trees = {trial.variant: trial.config.model_dump(exclude={"name"}) for trial in trials}
    for tree in trees.values():
        tree["algorithm"]["correction"] = None
    without_lag = trees.pop("uncorrected without lag")
    assert len(trees) == 3 and all(tree == trees["uncorrected"] for tree in trees.values())
    without_lag["rollout"] |= {name: trees["uncorrected"]["rollout"][name] for name in ("mode", "max_lag")}
    assert without_lag == trees["uncorrected"]


def finished(trial: Any, rate: float) -> None:
    """What a run of the trial leaves: two steps of value pretraining, two of the policy."""
    directory = trial.config.directory
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(dump(trial.config))
    writer = JsonLines(directory / "metrics.jsonl")
    writer.write(0, {"eval/heldout/avg@1": 0.25})
    for step in (1, 2, 3, 4):
        learned = {"actor/grad_norm": 1.0, "eval/heldout/avg@1": rate} if step > 2 else {}
        writer.write(step, {"reward/mean": rate * step / 4, "critic/explained_variance": 0.1 * step, **learned})
    writer.close()
    rates = {"sampled": rate, "greedy": rate + 0.1}
    summary = {"pass_rate_end": rates, "wall_s": {"update": 30.0, "rollout": 60.0}}
    (directory / "summary.json").write_text(json.dumps(summary))


def test_runs_that_are_done_are_put_side_by_side_and_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"run_dir={tmp_path}"
    for trial in tool.trials(VAPO, [1, 2], [place]):
        finished(trial, 0.5 + 0.2 * (trial.variant == "vapo") + 0.1 * (trial.seed == 2))
    monkeypatch.setattr(sys, "argv", ["ablation.py", str(VAPO), place, "--seeds", "1", "2"])
    assert tool.main() == 0
    table = (tmp_path / "vapo-ablation" / "table.md").read_text()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines() if "|" in line}
    assert len(rows) == 2 + 8 and rows["vapo"][:3] == ["", "0.750 (0.700 - 0.800)", "0.850 (0.800 - 0.900)"]
    assert rows["no clip-higher"][3:] == ["0.481 (0.438 - 0.525)", "0.481 (0.438 - 0.525)", "0.350 (0.350 - 0.350)", "1.5 (1.5 - 1.5)"]
    assert len((tmp_path / "vapo-ablation" / "runs.csv").read_text().splitlines()) == 1 + 16
    assert (tmp_path / "vapo-ablation" / "curves.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["ablation.py", str(VAPO), place, "optimizer.lr=0.1"])
    assert tool.main() == 2
    assert "vapo-ablation/vapo-seed1: was run with other settings (config.yaml); delete it" in capsys.readouterr().err


def test_bad_variants_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^config: no such file: .*none.yaml$"):
        tool.trials(tmp_path / "none.yaml", [1], [])
    (tmp_path / "odd.yaml").write_text("base: x.yaml\n")
    with pytest.raises(ConfigError, match="^config: .*odd.yaml must hold"):
        tool.trials(tmp_path / "odd.yaml", [1], [])
    with pytest.raises(ConfigError, match="^algorithm.alpa: unknown key"):
        tool.trials(VAPO, [1], ["algorithm.alpa=1"])
