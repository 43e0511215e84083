"""A response without a score takes no part in a step, an evaluation, a scale or a pair; the others get what they would get without it."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch import Sample
from megarl.config import ConfigError, CriticSettings, RewardSettings, TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.loops.pairs import grouped
from megarl.observe.metrics import scalars
from megarl.ranks import assemble as assembling
from megarl.ranks.assemble import assemble, corrections
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.step_plan import Group, StepPlan, plan_step, response_advantages
from megarl.response import EpisodeSummary, Response
from megarl.rewards.score import Score, ScoreRequest
from megarl.step import in_flight
from megarl.step.groups import StepGroups, scored, shaped
from megarl.step.metrics import missing_groups, rollout_metrics
from megarl.step.reward import Reward
from tests.e2e.job import RL
from tests.unit.algorithms.cases import CONFIGS, KINDS, make, same

LOST = Score(None, error="timeout")
GREEDY = [0.5, 0.25, 1.0]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=tmp_path))
    return load(tmp_path / "job.yaml", ["train.mini_batches=1"], TrainConfig)


def using(config: TrainConfig, algorithm: dict[str, Any], **train: Any) -> TrainConfig:
    return config.model_copy(
        update={"algorithm": make(algorithm), "critic": CriticSettings(), "train": config.train.model_copy(update=train)}
    )


def response(prompt: int, index: int, length: int = 4, **more: Any) -> Response:
    return replace(Response(prompt, f"{prompt}/{index}", 5, length, length, True, None, index), **more)


def groups_of(groups: Sequence[Sequence[float | None]], greedy: Sequence[float | None] = GREEDY, **more: Any) -> list[Group]:
    """A step with these rewards, group by group; each response has another length."""
    made = []
    for prompt, values in enumerate(groups):
        responses = [response(prompt, index, 2 + 3 * prompt + index, **more) for index in range(len(values))]
        scores = [LOST if value is None else Score(value) for value in values]
        made.append(Group(prompt, Prompt(prompt, "", [1], "", {}), responses, scores, greedy[prompt]))
    return made


def planned(config: TrainConfig, groups: list[Group]) -> tuple[StepPlan, np.ndarray]:
    """The plan of a step and the advantages of its responses, each of which has another KL."""
    plan = plan_step(config, groups, dp=1, capacity=512)
    kl_N = np.array([0.01 * answer.length for group in groups for answer in group.responses])
    return plan, response_advantages(config.algorithm, plan, [group.greedy for group in groups], kl_N, config.algorithm.kl_coef)


GROUPS: list[list[float | None]] = [[1.0, 0.0, 1.0, None], [-1.0, None, -1.0, -1.0], [0.0, 1.0, -0.5, 0.25]]
REWARDED = {"type": "rloo", "kl_in": "reward", "kl_coef": 0.5}
EVERY = {
    **{kind: CONFIGS[kind] for kind in KINDS},
    "rloo_kl": REWARDED,
    "raft_above": {"type": "raft", "threshold": -2.0},
    **{f"grpo_{name}": {"type": "grpo", "aggregation": name} for name in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")},
}


@pytest.mark.parametrize("name", EVERY)
def test_the_others_get_what_they_would_get_without_it(config: TrainConfig, name: str) -> None:
    config = using(config, EVERY[name])
    groups = groups_of(GROUPS)
    scores = [score for group in groups for score in group.scores]
    there = [n for n, score in enumerate(scores) if score is not LOST]
    lost = [n for n, score in enumerate(scores) if score is LOST]
    alone = []
    for group in groups:
        pairs = [pair for pair in zip(group.responses, group.scores, strict=True) if pair[1] is not LOST]
        alone.append(replace(group, responses=[answer for answer, _ in pairs], scores=[score for _, score in pairs]))
    (plan, advantage_N), (expected, expected_N) = planned(config, groups), planned(config, alone)
    assert np.array_equal(advantage_N[there], expected_N) and not advantage_N[lost].any()
    for column in ("keep_N", "weight_N", "positive_weight_N", "value_weight_N"):
        given, wanted = getattr(plan, column), getattr(expected, column)
        assert (given is None) == (wanted is None)
        if given is not None:
            assert np.array_equal(given[there], wanted) and not given[lost].any(), column
    assert expected.keep_N.any() and expected.part_N.all()


def test_three_right_answers_and_a_lost_connection_teach_nothing(config: TrainConfig) -> None:
    plan, advantage_N = planned(using(config, {"type": "grpo"}), groups_of([[1.0, 1.0, 1.0, None]]))
    assert advantage_N.tolist() == [0, 0, 0, 0] and plan.keep_N.tolist() == [True, True, True, False]


def test_a_failure_is_not_the_best_where_all_are_wrong(config: TrainConfig) -> None:
    for algorithm in ({"type": "raft"}, {"type": "raft", "threshold": -0.5}):
        plan, _ = planned(using(config, algorithm), groups_of([[-1.0, None, -1.0]]))
        assert plan.keep_N.tolist() == [algorithm == {"type": "raft"}, False, False]


def test_a_group_of_too_few_is_dropped_and_counted(config: TrainConfig) -> None:
    for algorithm, kept in (("grpo", [False, False, True, True]), ("reinforce", [True, False, True, True])):
        plan, advantage_N = planned(using(config, {"type": algorithm}), groups_of([[1.0, None], [1.0, 0.0]]))
        assert plan.keep_N.tolist() == kept and np.isfinite(advantage_N).all()
        assert scalars(missing_groups(plan)) == {"reward/missing_groups": 0.0 if kept[0] else 0.5}
        if not kept[0]:
            assert plan.weight_N.tolist() == pytest.approx([0, 0, 1 / (2 * 5), 1 / (2 * 6)]), "of two responses, of 5 and 6 tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_any_score_trains_nothing(config: TrainConfig, kind: str) -> None:
    groups = groups_of([[None, None], [None, None]])
    plan, advantage_N = planned(using(config, CONFIGS[kind]), groups)
    assert plan.trained == [] and not advantage_N.any() and not plan.weight_N.any()
    shown = scalars(rollout_metrics(groups))
    assert shown["reward/missing"] == 1.0 and shown["events/reward/timeout"] == 4.0 and not {"reward/mean", "reward/max"} & set(shown)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are their own references."""
    monkeypatch.setattr(assembling, "ray", SimpleNamespace(get=list))


def test_a_truncated_response_s_kl_counts_in_its_baseline_too(stored: None) -> None:
    """It is compared by its reward less its KL, and has no loss token."""
    samples = [Sample(np.arange(6, dtype=np.int32), 2, np.zeros(4, np.float32), "stop") for _ in range(2)]
    number_N, keep_N = np.zeros(2, np.float32), np.array([True, False])
    batch = assemble(StepPlan(samples, [None] * 2, (), [], number_N, np.zeros(2, int), keep_N, number_N), [0, 1])
    batch = batch.with_extra(old_logp=torch.zeros(len(batch)), ref_logp=torch.full((len(batch),), -0.5))
    rank: Any = SimpleNamespace(
        _spec=SimpleNamespace(algorithm=make(REWARDED)), _reports_tokens=True, _members=[[0, 1]], _flat=lambda: [batch]
    )
    assert batch.count_N.tolist() == [4, 0] and ModelWorker.sequence_kl(rank) == {0: 2.0, 1: 2.0}


def test_without_the_greedy_response_s_score_there_is_no_baseline(config: TrainConfig) -> None:
    groups = groups_of([[1.0, 0.0], [1.0, 0.0]], greedy=[None, 0.25])
    plan, advantage_N = planned(using(config, {"type": "remax"}), groups)
    assert plan.keep_N.tolist() == [False, False, True, True] and advantage_N.tolist() == [0, 0, 0.75, -0.25]


@pytest.mark.parametrize(("in_baseline", "expected"), [(True, [1.0, -0.5, -0.5]), (False, [1.0, -1.0, 0.0])])
def test_a_truncated_response_counts_in_its_baseline_unless_told_otherwise(
    config: TrainConfig, in_baseline: bool, expected: list[float]
) -> None:
    config = using(config, {"type": "rloo"}, drop_truncated=True, truncated_in_baseline=in_baseline)
    groups = groups_of([[1.0, 0.0, 0.0]])
    groups[0].responses[2] = replace(groups[0].responses[2], finished=False)
    plan, advantage_N = planned(using(config, {"type": "dr_grpo", "horizon": 10}, **config.train.model_dump()), groups)
    assert plan.keep_N.tolist() == [True, True, False]
    assert plan.weight_N.tolist() == pytest.approx([1 / (30 if in_baseline else 20)] * 2 + [0])  # B of the paper counts filtered ones
    plan, advantage_N = planned(config, groups)
    assert plan.keep_N.tolist() == [True, True, False] and advantage_N.tolist() == pytest.approx(expected)


def test_only_dropped_responses_can_leave_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=tmp_path))
    with pytest.raises(ConfigError, match=r"train\.truncated_in_baseline=false: train\.drop_truncated=false"):
        load(tmp_path / "job.yaml", ["train.truncated_in_baseline=false"], TrainConfig)


def test_dynamic_sampling_looks_at_what_takes_part_alone(config: TrainConfig) -> None:
    grpo, remax = using(config, {"type": "grpo"}), using(config, {"type": "remax"})
    filtered = using(config, {"type": "grpo"}, drop_truncated=True, truncated_in_baseline=False)

    def informative(config: TrainConfig, *values: float | None, greedy: float | None = 0.0, finished: bool = True) -> bool:
        [group] = groups_of([values], [greedy])
        group.responses[0] = replace(group.responses[0], finished=finished)
        return group.informative(config)

    assert informative(grpo, 1.0, 0.0, None) and not informative(grpo, 1.0, 1.0, None) and not informative(grpo, 1.0, None)
    assert informative(grpo, 1.0, 0.0, 0.0, finished=False) and not informative(filtered, 1.0, 0.0, 0.0, finished=False)
    assert informative(remax, 1.0, 0.0) and not informative(remax, 1.0, 0.0, greedy=None)


def test_metrics_are_those_of_what_has_a_score() -> None:
    groups = groups_of([[-1.0, None, -1.0], [None, 3.0]])
    shown = scalars(rollout_metrics(groups))
    expected = {"reward/mean": 1 / 3, "reward/min": -1.0, "reward/max": 3.0, "reward/missing": 0.4, "frac_reward_zero_std": 1.0}
    assert {name: shown[name] for name in expected} == pytest.approx(expected)
    assert shown["events/reward/timeout"] == 2.0


class Lengths:
    """Scores a response by its length; keeps what it was asked."""

    guarantee = None

    def __init__(self) -> None:
        self.asked: list[str] = []

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        self.asked = [request.response for request in requests]
        return [Score(float(len(request.response))) for request in requests]


def test_a_failed_episode_has_no_score_whatever_the_reward_is() -> None:
    settings = RewardSettings.model_validate({"source": {"type": "math_verify"}, "overlong": {"buffer_tokens": 2}})
    scorer, prompt = Lengths(), Prompt(0, "", [1], "", {})
    episodes = [EpisodeSummary(0.5, 1, error, {}, "", "") for error in (None, "ValueError: a digit")]
    responses = [response(0, index, episode=episode) for index, episode in enumerate(episodes)]
    judged: Any = SimpleNamespace(scores=lambda given: [Score(2.0) for _ in given])
    [scores] = scored(Reward(settings, scorer, judged), [prompt], [responses], 4)  # type: ignore[arg-type]
    assert scorer.asked == ["0/0"] and scores[1] == Score(None, error="ValueError: a digit"), "and no punishment for its length"
    assert scores[0].value == 2.0 and scores[0].task == 3.0
    assert shaped(settings.overlong, 4, responses[0], LOST) == LOST


def test_no_pair_has_a_side_without_a_score() -> None:
    responses = [response(0, index) for index in range(3)]
    assert grouped(1, responses, [Score(-1.0), LOST, Score(1.0)]) == [[("0/0", -1.0), ("0/2", 1.0)]]


def test_missing_scores_and_those_of_earlier_versions_come_back_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(np.array([5, 6, 7], np.int32), 1, np.array([-1.0, -2.0], np.float32), "stop")
    monkeypatch.setattr(in_flight, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr("megarl.ranks.response_file.ray", SimpleNamespace(get=lambda references: references))
    prompt, scores = Prompt(0, "", [1], "", {}), [Score(0.5, {"a": 1.0}, unshaped=1.0), LOST]
    group = Group(0, prompt, [response(0, index, payload=sample) for index in range(2)], scores, None)
    before = [asdict(scores[0]), {"value": -0.8, "parts": {"overlong": -0.5}, "error": "timeout", "unshaped": 0.0, "scored": True}]
    for number, saved in enumerate(([asdict(score) for score in scores], before)):
        plain = iter(saved)
        monkeypatch.setattr(in_flight, "asdict", lambda _: next(plain))  # noqa: B023
        with (tmp_path / f"{number}.npz").open("wb") as file:
            in_flight.dump(StepGroups([group]), []).write(file)
        [loaded] = in_flight.load(tmp_path / f"{number}.npz", [prompt], []).groups
        assert loaded.scores == scores


def test_a_token_of_another_response_does_not_see_it(stored: None) -> None:
    """On the ranks: advantages, targets and the correction's weights with a response that is not there, and with one that is masked."""
    generator = np.random.default_rng(0)
    lengths = [5, 3, 9, 4]
    samples = [Sample(np.arange(2 + n, dtype=np.int32), 2, -generator.random(n).astype(np.float32), "stop") for n in lengths]

    def columns(algorithm: Any, lost: Sequence[int], present: Sequence[int]) -> dict[str, torch.Tensor]:
        reward_N, numbers_N = np.array([1.0, -1.0, 0.5, 2.0], np.float32), np.zeros(4, np.float32)
        reward_N[list(lost)] = np.nan
        plan = StepPlan(samples, [None] * 4, (), [], reward_N, np.zeros(4, int), ~np.isnan(reward_N), numbers_N)
        batch = assemble(plan, present)
        advantage_N = torch.from_numpy(np.where(np.isnan(reward_N), 0, reward_N))[list(present)]
        word_T = batch.target_T.float()
        numbers = {"value": word_T.sin(), "old_logp": -word_T.cos().abs(), "ref_logp": -word_T.sin().abs()}
        batch = batch.with_extra(advantage=batch.spread(advantage_N), **numbers)
        found = {"advantage": algorithm.token_advantages(batch, same, algorithm.kl_coef)}
        if algorithm.needs_critic:
            found["return"] = algorithm.returns(batch, algorithm.kl_coef)
        if algorithm.correction is not None:
            part_N = torch.from_numpy(plan.part_N)
            found |= corrections(algorithm, algorithm.correction, batch, present, [present], part_N, same)
        return {name: value_T[batch.mask_T] for name, value_T in found.items()}

    for name, config in {**EVERY, "kept": CONFIGS["clip_geometric"], "ppo_kl": {"type": "ppo", "kl_coef": 0.2}}.items():
        algorithm = make(config)
        masked, absent = columns(algorithm, [1], [0, 1, 2, 3]), columns(algorithm, [1], [0, 2, 3])
        assert masked.keys() == absent.keys() and all(torch.allclose(masked[key], absent[key], atol=1e-6) for key in masked), name
        assert all(value_T.isfinite().all() for value_T in masked.values()), name
