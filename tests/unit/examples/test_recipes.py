"""The recipes: a tiny and a large one for each algorithm, the large ones with the papers' numbers; files that lie over a base.

And the examples of a new algorithm and a new preference loss in megarl/algorithms/adding_an_algorithm.md, as they stand there.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms import Algorithm, PreferenceLoss
from megarl.algorithms.dapo import Dapo
from megarl.checks.train import check_train
from megarl.config import ConfigError, DpoConfig, TrainConfig, load
from tests.rows import rows
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import LENGTHS, members, ragged, same, weighted
from tests.unit.algorithms.test_value_and_pairs import assert_formula, pairs
from tests.unit.examples.test_configurations import EXAMPLES, QWEN3_30B_A3B, root_of, write_headers

RECIPES = EXAMPLES / "recipes"
CRITICS = {"ppo", "vc_ppo", "vapo"}
PAPERS: dict[str, dict[str, Any]] = {
    "cispo": {
        "algorithm.clip_low": 1.0,
        "algorithm.clip_high": 4.0,
        "optimizer.eps": 1e-15,
        "train.mini_batches": 16,
        "train.dynamic_sampling_rounds": 10,
        "reward.overlong.buffer_tokens": 4096,
    },
    "dapo": {
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "optimizer.warmup_steps": 20 * 16,
        "reward.overlong.buffer_tokens": 4096,
        "rollout.max_response_tokens": 16384 + 4096,
        "rollout.samples_per_prompt": 16,
        "train.prompts_per_step": 512,
        "train.mini_batches": 16,
        "train.dynamic_sampling_rounds": 10,
    },
    "clip_cov": {
        "algorithm.cov_ratio": 2e-4,
        "algorithm.cov_low": 1.0,
        "algorithm.cov_high": 5.0,
        "algorithm.clip_low": 1.0,
        "algorithm.clip_high": 1.0,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "rollout.samples_per_prompt": 8,
        "rollout.max_response_tokens": 8192,
        "train.prompts_per_step": 256,
        "train.mini_batches": 256 // 32,
        "train.dynamic_sampling_rounds": 10,
    },
    "deepseek_v32": {
        "algorithm.off_policy_delta": 0.5,
        "algorithm.kl_coef": 0.001,
        "algorithm.kl_kind": "k3",
        "algorithm.kl_importance_weighted": True,
        "routing.replay": "r3",
    },
    "dppo": {
        "algorithm.divergence": "tv",
        "algorithm.delta_low": 0.15,
        "algorithm.delta_high": 0.15,
        "algorithm.scale": "none",
        "algorithm.aggregation": "seq-mean-token-sum-norm",
        "train.old_logp": "rollout",
        "train.prompts_per_step": 256,
        "train.mini_batches": 256 // 32,
        "rollout.samples_per_prompt": 16,
    },
    "dr_grpo": {
        "algorithm.horizon": 3000,
        "rollout.max_response_tokens": 3000,
        "rollout.samples_per_prompt": 8,
        "train.prompts_per_step": 128,
        "train.mini_batches": 8,
    },
    "gdpo": {
        "algorithm.normalise_sum": True,
        "rollout.samples_per_prompt": 4,
        "train.prompts_per_step": 512,
        "train.mini_batches": 512 // 128,
    },
    "gmpo": {"algorithm.clip_low": 0.4, "algorithm.clip_high": 0.4, "rollout.samples_per_prompt": 8, "train.mini_batches": 8},
    "grpo": {
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.2,
        "algorithm.kl_coef": 0.04,
        "algorithm.kl_kind": "k3",
        "algorithm.kl_in": "loss",
        "rollout.samples_per_prompt": 64,
        "rollout.max_response_tokens": 1024,
        "train.prompts_per_step": 16,
        "train.mini_batches": 1,
    },
    "grpo_moe": {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.27, "train.mini_batches": 4},
    "gspo": {"algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4, "train.mini_batches": 4},
    "kl_cov": {
        "algorithm.cov_ratio": 2e-4,
        "algorithm.cov_kl_coef": 1.0,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "rollout.samples_per_prompt": 8,
        "rollout.max_response_tokens": 8192,
        "train.prompts_per_step": 256,
        "train.mini_batches": 256 // 32,
        "train.dynamic_sampling_rounds": 10,
    },
    "lite_ppo": {"algorithm.clip_high": 0.2, "algorithm.kl_coef": 0.0, "rollout.max_response_tokens": 8192},
    "luspo": {"algorithm.clip_low": 2e-3, "algorithm.clip_high": 2.5e-3},
    "m2po": {
        "algorithm.m2_threshold": 0.04,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "rollout.samples_per_prompt": 8,
        "rollout.max_response_tokens": 2560,
        "train.prompts_per_step": 256,
        "train.mini_batches": 256 // 64,
        "train.old_logp": "rollout",
    },
    "max_rl": {
        "algorithm.scale": "mean",
        "optimizer.clip_grad": 0.3,
        "rollout.samples_per_prompt": 16,
        "rollout.max_response_tokens": 4096,
        "train.prompts_per_step": 256,
        "train.mini_batches": 1,
    },
    "muon": {
        "optimizer.weight_decay": 0.1,
        "optimizer.muon.momentum": 0.95,
        "optimizer.muon.nesterov": True,
        "optimizer.muon.ns_steps": 5,
        "optimizer.muon.adjust_lr": "match_rms_adamw",
        "optimizer.muon.lr": None,
    },
    "ppo": {
        "algorithm.gamma": 1.0,
        "algorithm.gae_lambda": 0.95,
        "algorithm.whiten": True,
        "algorithm.value_clip": 0.2,
        "algorithm.kl_coef": 0.02,
        "algorithm.kl_in": "reward",
        "train.prompts_per_step": 512,
        "train.mini_batches": 8,
    },
    "raft": {"algorithm.threshold": None, "optimizer.lr": 2e-5, "rollout.samples_per_prompt": 32, "train.prompts_per_step": 2048},
    "reinforce_pp": {
        "algorithm.kl_coef": 1e-4,
        "algorithm.kl_in": "reward",
        "optimizer.lr": 5e-7,
        "rollout.samples_per_prompt": 1,
        "train.prompts_per_step": 1024,
        "train.mini_batches": 8,
    },
    "reinforce_pp_baseline": {
        "algorithm.kl_coef": 1e-5,
        "algorithm.kl_in": "loss",
        "algorithm.kl_kind": "k2",
        "algorithm.correction.type": "icepop",
        "rollout.samples_per_prompt": 8,
    },
    "remax": {"algorithm.kl_coef": 0.05, "algorithm.kl_in": "reward", "rollout.samples_per_prompt": 1},
    "rloo": {
        "algorithm.kl_coef": 0.03,
        "algorithm.kl_in": "reward",
        "rollout.samples_per_prompt": 4,
        "optimizer.lr": 1e-6,
    },
    "sapo": {"algorithm.tau_positive": 1.0, "algorithm.tau_negative": 1.05, "train.mini_batches": 4},
    "spo": {"algorithm.eps": 0.2},
    "topr": {"algorithm.baseline": 0.5, "algorithm.kl_coef": 0.0},
    "vapo": {
        "algorithm.alpha": 0.05,
        "algorithm.mu": 0.1,
        "algorithm.lambda_critic": 1.0,
        "algorithm.clip_high": 0.28,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "rollout.samples_per_prompt": 16,
        "train.prompts_per_step": 512,
        "train.mini_batches": 512 * 16 // 512,
    },
    "vc_ppo": {
        "algorithm.lambda_policy": 0.95,
        "algorithm.lambda_critic": 1.0,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "critic.optimizer.lr": 2e-6,
    },
    "vespo": {
        "algorithm.k_positive": 2.0,
        "algorithm.lambda_positive": 3.0,
        "algorithm.k_negative": 3.0,
        "algorithm.lambda_negative": 2.0,
        "rollout.samples_per_prompt": 8,
        "rollout.max_response_tokens": 15360,
        "train.prompts_per_step": 2048,
        "train.mini_batches": 2048 // 256,
    },
    "w_reinforce": {
        "algorithm.positive_weight": 0.1,
        "algorithm.kl_coef": 0.0,
        "optimizer.lr": 1e-6,
        "rollout.samples_per_prompt": 8,
        "rollout.max_response_tokens": 3072,
        "train.prompts_per_step": 1024,
        "train.mini_batches": 1024 // 256,
    },
}


def train_config(path: Path, *overrides: str) -> TrainConfig:
    return load(path, list(overrides), TrainConfig)


def names(directory: Path) -> set[str]:
    """The RL recipes of a directory."""
    return {path.stem for path in directory.glob("*.yaml") if root_of(path) is TrainConfig} - {"tiny"}


def value(config: TrainConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def test_every_algorithm_has_a_recipe() -> None:
    types = {kind.model_fields["type"].default for kind in members(Algorithm).values()}
    assert {train_config(RECIPES / f"{name}.yaml").algorithm.type for name in names(RECIPES)} == types
    assert names(RECIPES / "large") == PAPERS.keys() <= names(RECIPES), (
        "a large recipe has the numbers of a paper, and a tiny one beside it"
    )


def test_every_preference_loss_has_an_example() -> None:
    found = [load(path, [], DpoConfig) for path in (EXAMPLES / "rlhf").glob("*.yaml") if root_of(path) is DpoConfig]
    assert {config.algorithm.type for config in found} == members(PreferenceLoss).keys()


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_large_recipe_has_the_numbers_of_its_paper(name: str) -> None:
    config = train_config(RECIPES / "large" / f"{name}.yaml")
    assert {key: value(config, key) for key in PAPERS[name]} == PAPERS[name]
    assert config.algorithm.type == train_config(RECIPES / f"{name}.yaml").algorithm.type


@pytest.fixture(scope="module")
def qwen3_30b_a3b(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[str, ...]:
    """The overrides that put headers of the real shapes and a few prompts, 2048 to train on, in the place of the model and its data."""
    model = tmp_path_factory.mktemp("large")
    write_headers(model, QWEN3_30B_A3B)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_bytes((tiny_model / name).read_bytes())
    for name, count in (("train", 2048), ("eval", 64)):
        rows = ({"prompt": f"1+{n}=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(count))
        (model / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (f"model.path={model}", *(f"data.{name}.path={model}/{name}.jsonl" for name in ("train", "eval")))


@pytest.mark.parametrize("name", rows(sorted(PAPERS), ["dapo", "gspo", "ppo", "sapo", "vapo"]))
def test_large_recipe_passes_every_check(name: str, qwen3_30b_a3b: tuple[str, ...]) -> None:
    config = train_config(RECIPES / "large" / f"{name}.yaml", *qwen3_30b_a3b)
    assert len(check_train(config).train) == 2048
    assert (config.critic is not None) == (name in CRITICS)


def test_a_file_lies_over_its_base_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.yaml").write_text((EXAMPLES / "quickstart" / "rl.yaml").read_text())
    (tmp_path / "deep" / "middle.yaml").write_text("base: ../base.yaml\nalgorithm: {type: gspo, clip_high: 0.5}\ntrain: {steps: 7}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: deep/middle.yaml\nname: top\nalgorithm: {type: dapo}\nmodel: {base: null}\ndata: {train: {items: 50}}\n")
    config, under = train_config(top, "train.prompts_per_step=16"), train_config(tmp_path / "base.yaml")
    assert (config.name, config.model.base, config.train.steps, config.train.prompts_per_step) == ("top", None, 7, 16)
    assert config.algorithm == Dapo(), "a mapping with a type takes the other's place"
    assert config.data.train == under.data.train.model_copy(update={"items": 50})
    assert (config.optimizer, config.rollout, config.reward) == (under.optimizer, under.rollout, under.reward)


def test_a_base_that_is_not_there_or_leads_back_is_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here.yaml", tmp_path / "there.yaml"
    here.write_text("base: there.yaml\n")
    with pytest.raises(ConfigError, match=r"^base: no such file: .*there.yaml \(named in .*here.yaml\)$"):
        train_config(here)
    there.write_text("base: here.yaml\n")
    with pytest.raises(ConfigError, match="^base: .*here.yaml leads back to itself$"):
        train_config(here)


def written_on_the_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The module with the class of this name, imported as it stands, and the formula beside it."""
    page = EXAMPLES.parent / "megarl" / "algorithms" / "adding_an_algorithm.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    [source] = [block for block in blocks if f"class {name}(" in block]
    [formula] = [block for block in blocks if f"def {name.lower()}(" in block]
    path = folder / f"page_{name.lower()}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # where pydantic looks up the annotations
    spec.loader.exec_module(module)
    known = dict(vars(reference))
    exec(formula, known)
    return module, known[name.lower()]


def test_the_algorithm_on_the_page_is_its_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, formula = written_on_the_page("Spo", tmp_path, monkeypatch)
    monkeypatch.setitem(reference.POLICY, "spo", (formula, "seq-mean-token-mean"))

    algorithm = module.Spo(eps=0.3)
    batch, logp_T, entropy_T = ragged(0, LENGTHS[:40])
    batch = weighted(algorithm, batch)
    mine_T, plain_T = logp_T.clone().requires_grad_(), logp_T.clone().requires_grad_()
    value = (algorithm.loss(mine_T, entropy_T, batch, same, 0.0).loss_T * batch.extra_T["weight"]).sum()
    expected = reference.total(algorithm, batch, plain_T, entropy_T)
    value.backward()
    expected.backward()
    assert mine_T.grad is not None and plain_T.grad is not None
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(mine_T.grad[batch.mask_T], plain_T.grad[batch.mask_T], rtol=1e-10, atol=1e-15)
    assert bool((mine_T.grad[~batch.mask_T] == 0).all())


def test_the_preference_loss_on_the_page_is_its_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, formula = written_on_the_page("Ipo", tmp_path, monkeypatch)
    monkeypatch.setitem(reference.PAIRS, "ipo", formula)
    preference = module.Ipo(tau=0.7)
    batch, logp_T = pairs(0)
    assert_formula(
        preference.loss,
        lambda x_T: reference.pairs_total(preference, batch, x_T),
        logp_T,
        batch,
        preference.weights(batch.count_N),
    )
