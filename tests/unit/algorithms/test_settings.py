"""Settings that make no sense are refused at load, with the key, the value and the reason; the resolved ones load again."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from megarl.algorithms import Algorithm, PolicyAlgorithm
from tests.unit.algorithms.cases import ALGORITHMS, CONFIGS, KINDS, make

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k1 as a plain loss": ({"type": "grpo", "kl_coef": 0.1, "kl_kind": "k1"}, "kl_kind=k1 with kl_in=loss: its gradient has expectation 0"),
    "k1 in the loss of a reward algorithm": ({"type": "rloo", "kl_in": "loss", "kl_kind": "k1"}, "kl_kind=k1 with kl_in=loss"),
    "weighted in the reward": ({"type": "rloo", "kl_importance_weighted": True}, "kl_importance_weighted=true with kl_in=reward"),
    "weighted and straight through": (
        {"type": "grpo", "kl_importance_weighted": True, "kl_straight_through": True},
        "kl_straight_through=true with kl_importance_weighted=true",
    ),
    "a KL of which the sign would be read": ({"type": "w_reinforce", "kl_in": "reward"}, "kl_in\n.*'loss'"),
    "no bound": ({"type": "grpo", "ratio_bound": 90}, "ratio_bound\n.*less than or equal to 40"),
    "infinite KL": ({"type": "grpo", "kl_coef": float("inf")}, "kl_coef\n.*finite"),
    "threshold that is no number": ({"type": "raft", "threshold": float("nan")}, "threshold\n.*finite"),
    "best of none": ({"type": "raft", "best": 0}, "best\n.*greater than 0"),
    "no epsilon": ({"type": "rloo", "scale": "group", "scale_eps": 0}, "scale_eps\n.*greater than 0"),
    "constant without a horizon": ({"type": "grpo", "aggregation": "seq-mean-token-sum-norm"}, "horizon: required by aggregation=seq-"),
    "horizon of nothing": ({"type": "grpo", "horizon": 8}, "horizon=8: aggregation=seq-mean-token-mean has none"),
    "straight through in the reward": ({"type": "ppo", "kl_straight_through": True}, "kl_straight_through=true with kl_in=reward"),
    "target without a coefficient": ({"type": "ppo", "kl_target": 6.0}, "kl_target=6 with kl_coef=0: .* 0 stays 0"),
    "negative target": ({"type": "ppo", "kl_coef": 0.1, "kl_target": -6.0}, "kl_target\n.*greater than 0 .*input_value=-6.0"),
    "no horizon": ({"type": "ppo", "kl_coef": 0.1, "kl_target": 6.0, "kl_horizon": 0}, "kl_horizon\n.*greater than or equal to 1"),
    "negative kl": ({"type": "grpo", "kl_coef": -0.1}, "kl_coef\n.*greater than or equal to 0 .*input_value=-0.1"),
    "negative entropy": ({"type": "grpo", "entropy_coef": -0.1}, "entropy_coef\n.*input_value=-0.1"),
    "negative eps": ({"type": "grpo", "clip_low": -0.1}, "clip_low\n.*greater than or equal to 0 .*input_value=-0.1"),
    "a gate that is flat": ({"type": "sapo", "tau_negative": 0}, "tau_negative\n.*input_value=0"),
    "negative upper eps": ({"type": "cispo", "clip_high": -1}, "clip_high\n.*input_value=-1"),
    "eps above 1": ({"type": "gspo", "clip_low": 1.5}, "clip_low\n.*less than or equal to 1 .*input_value=1.5"),
    "dual clip below 1": ({"type": "dapo", "dual_clip": 0.9}, "dual_clip\n.*greater than 1 .*input_value=0.9"),
    "negative alpha": ({"type": "vapo", "alpha": -0.05}, "alpha\n.*greater than 0 .*input_value=-0.05"),
    "negative mu": ({"type": "vapo", "mu": -0.1}, "mu\n.*greater than or equal to 0 .*input_value=-0.1"),
    "gamma above 1": ({"type": "ppo", "gamma": 1.1}, "gamma\n.*less than or equal to 1 .*input_value=1.1"),
    "lambda above 1": ({"type": "vc_ppo", "lambda_policy": 2}, "lambda_policy\n.*input_value=2"),
    "value clip 0": ({"type": "ppo", "value_clip": 0}, "value_clip\n.*greater than 0 .*input_value=0"),
    "Dr.GRPO without its constant": ({"type": "dr_grpo"}, "horizon: required by aggregation=seq-mean-token-sum-norm"),
    "Dr.GRPO over nothing": ({"type": "dr_grpo", "horizon": 0}, "horizon\n.*greater than or equal to 1"),
    "empty interval": ({"type": "grpo", "correction": {"type": "mis", "lo": 3.0, "hi": 2.0}}, "lo=3 is not below hi=2: every token"),
    "IcePop of sequences": ({"type": "grpo", "correction": {"type": "icepop", "level": "sequence"}}, "level\n.*'token'"),
    "cap 0": ({"type": "grpo", "correction": {"type": "tis", "cap": 0}}, "cap\n.*greater than 0"),
    "veto of everything": ({"type": "grpo", "correction": {"type": "tis", "veto": 1.0}}, "veto\n.*less than 1"),
    "unknown correction": ({"type": "grpo", "correction": {"type": "is"}}, "'tis', 'mis', 'icepop', 'rejection'"),
    "all weights alike": ({"type": "grpo", "correction": {"type": "tis", "floor": 2.0}}, "floor=2 is not below cap=2"),
    "rejection of nothing": ({"type": "grpo", "correction": {"type": "rejection"}}, "without reject or veto: nothing would be"),
    **{
        f"rejection {rule}": ({"type": "grpo", "correction": {"type": "tis", "reject": [rule]}}, said)
        for rule, said in (
            ({"by": "k1"}, "neither lo nor hi: nothing would be dropped"),
            ({"lo": 2.0, "hi": 1.0}, "lo=2 is not below hi=1: every token"),
            ({"by": "k2", "lo": 0.1, "hi": 1.0}, "by=k2 has one bound, hi"),
            ({"by": "k3"}, "by=k3 has one bound, hi"),
            ({"by": "k4", "hi": 1.0}, "'k1', 'k2' or 'k3'"),
        )
    },
    "DPPO corrected twice": ({"type": "dppo", "correction": {"type": "tis"}}, "correction.type=tis with type=dppo: its ratio is to the"),
    "a count without a mean over responses": (
        {"type": "dapo", "sequence_count": "all"},
        "sequence_count=all: aggregation=token-mean counts",
    ),
    "whitening of nothing": ({"type": "vapo", "whiten_variance": "population"}, "whiten_variance=population with whiten=false"),
    "a place for no KL": ({"type": "reinforce_pp_baseline", "kl_at": "token"}, "kl_at=token with kl_in=loss: the reward has no KL"),
    "RLOO's clip of tokens": ({"type": "rloo", "clip_low": 0.2}, "clip_low=0.2 with ratio=token: only ratio=sequence is clipped"),
    "RLOO unclipped": ({"type": "rloo", "ratio": "sequence", "clip_high": None}, "clip_high=null with ratio=sequence"),
    "a floor above 1": ({"type": "vapo", "lambda_floor": 1.5}, "lambda_floor\\n.*less than or equal to 1"),
    "KL as a part": ({"type": "gdpo", "kl_coef": 0.1, "kl_in": "reward"}, "kl_in=reward with type=gdpo"),
    "no range of covariances": ({"type": "clip_cov", "cov_low": 5}, "cov_low=5: must be below cov_high=5"),
    "unknown algorithm": ({"type": "grop"}, "'ppo', 'vc_ppo', 'vapo', 'grpo'"),
    "unknown key": ({"type": "raft", "clip_low": 0.2}, "clip_low\n.*not permitted"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_senseless_settings_are_refused(case: str) -> None:
    config, said = REFUSED[case]
    with pytest.raises(ValidationError, match=said):
        make(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_resolved_settings_load_again(name: str) -> None:
    """As a configuration file is read: strictly, from JSON."""
    adapter = TypeAdapter[PolicyAlgorithm](Algorithm)
    assert adapter.validate_json(adapter.dump_json(ALGORITHMS[name]), strict=True) == ALGORITHMS[name]


def test_estimator_in_the_reward_need_not_be_said() -> None:
    assert {make({"type": kind}).kl_kind for kind in ("ppo", "rloo", "reinforce_pp")} == {"k1"}
    assert make({"type": "grpo", "kl_in": "reward"}).kl_kind == "k1"
    assert make({"type": "rloo", "kl_in": "loss"}).kl_kind == make({"type": "grpo"}).kl_kind == "k3"
    assert make({"type": "reinforce_pp_baseline"}).kl_kind == "k2"


def test_defaults_are_the_papers() -> None:
    def given(kind: str, *names: str) -> list[Any]:
        return [getattr(make({"type": kind}), name) for name in names]

    assert given("ppo", "clip_low", "clip_high", "gamma", "gae_lambda", "whiten", "value_clip") == [0.2, 0.2, 1.0, 0.95, True, 0.2]
    assert given("vc_ppo", "lambda_policy", "lambda_critic", "value_clip", "kl_coef") == [0.95, 1.0, None, 0.0]
    assert given("vapo", "clip_low", "clip_high", "alpha", "mu", "lambda_critic", "value_clip") == [0.2, 0.28, 0.05, 0.1, 1.0, None]
    assert given("grpo", "clip_low", "clip_high", "kl_kind") == [0.2, 0.2, "k3"]
    assert given("dapo", "clip_low", "clip_high", "kl_coef") == [0.2, 0.28, 0.0]
    assert given("gspo", "clip_low", "clip_high") == [3e-4, 4e-4]
    assert given("gmpo", "clip_low", "clip_high") == [0.4, 0.4]
    assert given("cispo", "clip_low", "clip_high") == [1.0, 4.0]
    assert given("dppo", "divergence", "delta_low", "delta_high", "ratio_cap") == ["tv", 0.15, 0.15, None]
    assert [getattr(make({"type": "dppo", "divergence": "kl"}), f"delta_{side}") for side in ("low", "high")] == [0.05, 0.05]
    assert given("luspo", "clip_low", "clip_high") == [2e-3, 2.5e-3]
    assert given("vespo", "k_positive", "lambda_positive", "k_negative", "lambda_negative") == [2.0, 3.0, 3.0, 2.0]
    assert given("clip_cov", "cov_ratio", "cov_low", "cov_high") == [2e-4, 1.0, 5.0]
    assert given("kl_cov", "cov_ratio", "cov_kl_coef") == [2e-4, 1.0]
    assert given("m2po", "m2_threshold") == [0.04]
    assert given("pass_at_k", "k", "baseline", "scale", "clip_low", "clip_high") == [4, "group", "group", 0.2, 0.2]
    assert given("w_reinforce", "positive_weight", "positive_above") == [0.1, 0.0]
    assert given("opo", "aggregation", "kl_coef", "entropy_coef") == ["seq-mean-token-sum", 0.0, 0.0]
    assert given("sapo", "tau_positive", "tau_negative") == [1.0, 1.05]
    assert given("rloo", "kl_in") == given("ppo", "kl_in") == ["reward"]


def test_what_each_needs() -> None:
    kinds = {kind: ALGORITHMS[kind] for kind in KINDS}
    assert {kind for kind, algorithm in kinds.items() if algorithm.needs_critic} == {"ppo", "vc_ppo", "vapo"}
    assert {kind for kind, algorithm in kinds.items() if algorithm.needs_greedy} == {"remax"}
    assert {kind for kind, algorithm in kinds.items() if algorithm.needs_parts} == {"gdpo"}
    assert {kind for kind, algorithm in kinds.items() if algorithm.needs_lengths} == {"opo"}
    assert ALGORITHMS["pass_at_k"].min_group == 3
    alone = {"ppo", "vc_ppo", "vapo", "reinforce", "remax", "reinforce_pp", "raft", "topr", "w_reinforce"}
    assert {kind for kind, algorithm in kinds.items() if algorithm.min_group == 1} == alone
    assert all(algorithm.needs_reference == (algorithm.kl_coef > 0) for algorithm in ALGORITHMS.values())
