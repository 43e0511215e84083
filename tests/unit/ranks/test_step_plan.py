"""What the driver decides about a step: shaping, dynamic sampling, the split, the weights. Pure functions and plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml

from megarl.algorithms.opo import Opo
from megarl.batch import Sample, concat, pack
from megarl.config import RewardSettings, TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.engines.generate import Sampling
from megarl.observe.metrics import scalars
from megarl.observe.phases import Phases
from megarl.ranks.step_plan import Group, StepPlan, members, plan_step, response_advantages, split_step
from megarl.response import Response
from megarl.rewards.score import Score
from megarl.rewards.shaping import overlong_punishment
from megarl.step.groups import RolloutCollector, StepGroups, finish
from megarl.step.metrics import rollout_metrics
from megarl.step.state import TrainState
from tests.e2e.job import RL
from tests.groups import in_groups


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    path = tmp_path / "job.yaml"
    path.write_text(RL.format(runs=tmp_path, model=tmp_path))
    return load(path, [], TrainConfig)


def changed(config: TrainConfig, **sections: dict[str, Any]) -> TrainConfig:
    """The configuration with some keys of some sections replaced, validated again."""
    tree = yaml.safe_load(config.model_dump_json())
    for section, values in sections.items():
        tree[section] |= values
    return TrainConfig.model_validate(tree)


def response(prompt: int, index: int, length: int = 4, finished: bool = True) -> Response:
    return Response(
        prompt=prompt,
        text="",
        prompt_length=5,
        length=length,
        loss_tokens=length,
        finished=finished,
        payload=f"payload {prompt}",
        index=index,
    )


def test_overlong_punishment_by_hand() -> None:
    assert [overlong_punishment(length, 20, 4) for length in (0, 16, 17, 18, 20, 25)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="overlong buffer of 21 tokens must be between 1 and the limit of 20"):
        overlong_punishment(1, 20, 21)


def test_a_split_covers_every_response_once_with_equal_micro_batches_on_every_rank() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 64).tolist()
    split = split_step(lengths, mini_batches=4, dp=3, capacity=100)
    assert [members(mini_batch) for mini_batch in split] == [list(range(first, first + 16)) for first in range(0, 64, 16)]
    for mini_batch in split:
        assert len({len(shard) for shard in mini_batch}) == 1
        assert max(sum(lengths[n] for n in micro_batch) for shard in mini_batch for micro_batch in shard) <= 100
    ragged = split_step([90, 90, 90, 1], mini_batches=1, dp=2, capacity=100)
    assert sorted(len(micro_batch) for shard in ragged[0] for micro_batch in shard) == [1, 1, 1, 1]


class FakeTime:
    """Only the phases of a run, and no console."""

    def __init__(self) -> None:
        self.phase = Phases()

    def failures(self, scores: Sequence[Score]) -> None:
        assert all(score.error is None for score in scores)


class Answers:
    """Engines and a reward whose scores are a table: reward[prompt id][sample]. Of what is open `order` says what is finished next."""

    def __init__(self, reward: dict[int, list[float]], settings: RewardSettings, order: Callable[[Sequence[Any]], Any] = min) -> None:
        self.reward, self.settings, self.order, self.asked = reward, settings, order, list[int]()
        self.waiting: dict[Any, list[Response]] = {}
        self.on_ranks = False

    def work(self) -> Answers:
        return self

    def take_turn(self) -> None:
        pass

    @contextmanager
    def finishing(self, work: Answers) -> Iterator[None]:
        yield

    @property
    def open(self) -> int:
        return len(self.waiting)

    def wanted(self, key: Any, prompt: Prompt, number: int, sampling: Sampling, experts: None, step: int) -> tuple[Any, list[Response]]:
        self.asked.append(prompt.id)
        return key, [replace(response(number, index), text=f"{prompt.id}/{index}") for index in range(sampling.n)]

    def ask(self, wanted: tuple[Any, list[Response]]) -> None:
        self.waiting |= dict([wanted])

    def finished(self, work: Answers) -> dict[Any, list[Response]]:
        key = self.order(list(self.waiting))
        return {key: self.waiting.pop(key)}

    def on(self, _: None) -> Answers:
        return self

    def scores(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> list[Score]:
        asked = (response.text.split("/") for response in responses)
        # A part may have any name, and says nothing of whether a group differs.
        return [Score(self.reward[int(prompt)][int(index)], {"task": 1.0}) for prompt, index in asked]


def plan_of(config: TrainConfig, groups: list[Group]) -> StepPlan:
    return plan_step(config, groups, dp=config.layout.dp, capacity=config.train.micro_batch_tokens)


def sampled(
    config: TrainConfig, reward: dict[int, list[float]], *, rounds: int | None = None, prompts: int = 1000, **order: Any
) -> tuple[StepGroups, Answers]:
    """A step's rollouts over prompts 0, 1, 2, ..."""
    table, numbers = Answers(reward, config.reward, **order), iter(range(prompts))
    ctx = cast(Any, SimpleNamespace(config=config, run=FakeTime(), engines=table, train_reward=table, models=SimpleNamespace(experts=None)))

    def draw(count: int) -> list[tuple[int, Prompt]]:
        return [(number, Prompt(number, "", [1], "", {})) for number in islice(numbers, count)]

    return finish(ctx, RolloutCollector(ctx, draw, 1, None, rounds)), table


def test_a_part_of_a_plan_has_the_payloads_of_one_data_parallel_rank() -> None:
    split, number_N = split_step([300] * 12, 2, 3, 700), np.zeros(12, np.float32)
    plan = StepPlan([*range(12)], [[[n]] for n in range(12)], (), split, number_N, number_N, number_N == 0, number_N)
    parts = [plan.part(dp_rank) for dp_rank in range(3)]
    held = [{n for n in range(12) if part.payload_N[n] is not None} for part in parts]
    assert held == [{n for mini_batch in split for micro_batch in mini_batch[dp_rank] for n in micro_batch} for dp_rank in range(3)]
    assert sorted(n for own in held for n in own) == [*range(12)]
    for part, own in zip(parts, held, strict=True):
        assert part.payload_N == [n if n in own else None for n in range(12)]
        assert part.experts_N == [[[n]] if n in own else None for n in range(12)]


@pytest.mark.parametrize("order", [min, max, lambda open_: open_[len(open_) // 2]], ids=["first", "last", "middle"])
def test_dynamic_sampling_asks_for_the_fewest_prompts_whichever_group_is_finished_first(config: TrainConfig, order: Any) -> None:
    config = changed(config, train={"prompts_per_step": 2}, rollout={"samples_per_prompt": 2})
    reward = {0: [1.0, 1.0], 1: [0.0, 1.0], 2: [0.0, 0.0], 3: [1.0, 0.0], 4: [1.0, 0.0], 5: [0.0, 1.0]}
    step, table = sampled(config, reward, rounds=4, order=order)
    assert table.asked == [0, 1, 2, 3]
    assert [answer.text for answer in step.responses] == ["1/0", "1/1", "3/0", "3/1"]
    assert plan_of(config, step.groups).group_N.tolist() == [0, 0, 1, 1]
    assert scalars(step.metrics) == {"rollout/sampling_rounds": 2.0, "rollout/groups_dropped": 2.0}


def test_dynamic_sampling_is_bounded_and_fills_up_with_what_it_dropped(config: TrainConfig) -> None:
    config = changed(config, train={"prompts_per_step": 2}, rollout={"samples_per_prompt": 2})
    step, table = sampled(config, {n: [1.0, 1.0] for n in range(6)}, rounds=3)
    assert table.asked == [0, 1, 2, 3, 4, 5]
    assert [answer.text for answer in step.responses] == ["0/0", "0/1", "1/0", "1/1"]
    assert scalars(step.metrics)["events/dynamic_sampling_exhausted"] == 1.0
    plan = plan_of(config, step.groups)
    assert not response_advantages(config.algorithm, plan, None, np.zeros(4), 0.0).any()


def test_held_out_prompts_are_those_that_there_are_whatever_the_steps_draw(config: TrainConfig) -> None:
    """As many as a step has (`megarl value`), and none in the place of another."""
    config = changed(config, train={"prompts_per_step": 2, "dynamic_sampling_rounds": 3}, rollout={"samples_per_prompt": 2})
    step, table = sampled(config, {n: [1.0, 1.0] for n in range(2)}, prompts=2)
    assert table.asked == [0, 1] and scalars(step.metrics) == {}


def test_overlong_answers_lose_reward_and_say_so(config: TrainConfig) -> None:
    config = changed(
        config,
        train={"prompts_per_step": 2},
        rollout={"samples_per_prompt": 2, "max_response_tokens": 5},
        reward={"overlong": {"buffer_tokens": 2, "scale": 0.5}},
    )
    step, _ = sampled(config, {0: [1.0, 0.0], 1: [1.0, 1.0]})
    assert [score.value for group in step.groups for score in group.scores] == [0.75, -0.25, 0.75, 0.75]
    shown = scalars(rollout_metrics(step.groups))
    assert shown["reward/task/mean"] == 0.75 and shown["reward/overlong/mean"] == -0.25 and shown["frac_reward_zero_std"] == 0.5


def test_weights_come_from_the_global_mini_batch_and_skip_what_is_dropped(config: TrainConfig) -> None:
    config = changed(config, train={"prompts_per_step": 2, "mini_batches": 2, "drop_truncated": True}, rollout={"samples_per_prompt": 2})
    responses = [response(0, 0, 4), response(0, 1, 2), response(1, 0, 3, finished=False), response(1, 1, 5, finished=False)]
    plan = plan_step(
        config,
        in_groups(responses, [Score(value) for value in (1.0, 0.0, 0.0, 1.0)]),
        dp=config.layout.dp,
        capacity=config.train.micro_batch_tokens,
    )
    # Sequence mean of token means over the kept responses of each mini-batch; the second has none and is not trained.
    assert plan.weight_N.tolist() == pytest.approx([1 / (2 * 4), 1 / (2 * 2), 0.0, 0.0])
    assert plan.keep_N.tolist() == [True, True, False, False] and plan.trained == [0]


@pytest.mark.parametrize("task_weight", [0.0, 0.5])
def test_a_response_for_which_a_teacher_has_nothing_to_read_is_not_trained_on(config: TrainConfig, task_weight: float) -> None:
    """Unless it learns from its reward; and the teacher's prompts count in the micro-batches of its ranks."""
    config = changed(config, train={"prompts_per_step": 2, "mini_batches": 1}, rollout={"samples_per_prompt": 2})
    teaching = {"prompt": "{prompt} {solution}", "task_weight": task_weight}
    config = TrainConfig.model_validate(
        yaml.safe_load(config.model_dump_json()) | {"distillation": teaching, "algorithm": {"type": "reinforce"}}
    )
    groups = in_groups([response(0, 0, 4), response(0, 1, 2), response(1, 0, 3), response(1, 1, 5)], [Score(1.0), Score(0.0)] * 2)
    shown_N = [np.zeros(50, np.int32), None, np.zeros(40, np.int32), None]
    plans = [plan_step(config, groups, 1, 60, shown_N=shown_N, teaches=teaches) for teaches in (True, False)]
    for plan in plans:
        assert plan.keep_N.tolist() == [True, bool(task_weight), True, bool(task_weight)]
    assert plans[0].shown_N is shown_N and plans[1].shown_N is None
    [taught], [alone] = (mini_batches for plan in plans for mini_batches in plan.split)
    assert len(taught) == 2 and len(alone) == 1  # 53 + 42 tokens and more are not one micro-batch of 60


def test_of_what_is_dropped_none_is_the_best_of_its_group(config: TrainConfig) -> None:
    """The longest response has the highest reward, and is cut; another one is empty."""
    config = changed(config, train={"prompts_per_step": 2, "mini_batches": 1, "drop_truncated": True}, rollout={"samples_per_prompt": 2})
    config = TrainConfig.model_validate(yaml.safe_load(config.model_dump_json()) | {"algorithm": {"type": "raft"}})
    responses = [response(0, 0, 4), response(0, 1, 8, finished=False), response(1, 0, 0), response(1, 1, 5)]
    plan = plan_of(config, in_groups(responses, [Score(value) for value in (0.5, 1.0, 1.0, 0.0)]))
    assert plan.keep_N.tolist() == [True, False, False, True]


@pytest.mark.parametrize(("aggregation", "weights"), [("token-mean", [1 / 6, 1 / 6]), ("seq-mean-token-mean", [1 / 8, 1 / 4])])
def test_the_critic_averages_as_it_is_told(config: TrainConfig, aggregation: str, weights: list[float]) -> None:
    tree = yaml.safe_load(
        changed(config, train={"prompts_per_step": 1, "mini_batches": 1}, rollout={"samples_per_prompt": 2}).model_dump_json()
    )
    tree |= {"algorithm": {"type": "ppo"}, "critic": {"aggregation": aggregation}}
    config, scores = TrainConfig.model_validate(tree), [Score(1.0), Score(0.0)]
    groups = in_groups([response(0, 0, 4), response(0, 1, 2)], scores)
    plan = plan_step(config, groups, dp=1, capacity=config.train.micro_batch_tokens)
    assert plan.value_weight_N is not None and plan.value_weight_N.tolist() == pytest.approx(weights)


def test_the_kl_to_the_reference_is_taken_off_the_reward_of_each_response(config: TrainConfig) -> None:
    config = changed(config, train={"prompts_per_step": 1, "mini_batches": 1}, rollout={"samples_per_prompt": 2})
    tree = yaml.safe_load(config.model_dump_json())
    tree["algorithm"] = {"type": "rloo", "kl_in": "reward", "kl_coef": 0.5}
    config = TrainConfig.model_validate(tree)
    plan = plan_step(
        config,
        in_groups([response(0, 0), response(0, 1)], [Score(1.0), Score(0.0)]),
        dp=config.layout.dp,
        capacity=config.train.micro_batch_tokens,
    )
    advantage = response_advantages(config.algorithm, plan, None, np.array([0.4, 0.0]), kl_coef=0.5)
    assert advantage.tolist() == pytest.approx([0.8, -0.8])  # (1 - 0.2) against 0, each less the other


def test_concat_counts_sequences_on() -> None:
    sample = Sample(np.array([5, 6, 7], np.int32), 1, np.array([-1.0, -2.0], np.float32), "stop")
    one, two = pack([sample, sample]), pack([sample])
    both = concat([one, two])
    assert both.seq_T.tolist() == [0, 0, 1, 1, 2, 2] and both.count_N.tolist() == [2, 2, 2]
    assert torch.equal(both.extra_T["rollout_logp"], torch.tensor([-1.0, -2.0] * 3))


def test_kl_to_the_reference_per_response_and_per_token(config: TrainConfig) -> None:
    """Means over the responses that are trained on, of their sums and of their own means over tokens (verl's reward_kl_penalty)."""
    config = changed(config, algorithm={"kl_coef": 0.1}, train={"drop_truncated": True})
    responses = [response(0, 0, 4), response(0, 1, 8), response(0, 2, 2), response(0, 3, 16, finished=False)]
    plan = plan_of(config, [Group(0, Prompt(0, "", [1], "", {}), responses, [Score(float(n)) for n in range(4)], None)])
    found = scalars(TrainState(config, [Prompt(0, "", [1], "", {})]).policy_learned(plan, np.array([1.0, 4.0, 3.0, 99.0])))
    assert found["actor/reference_kl"] == pytest.approx(8 / 3)
    assert found["actor/reference_kl_per_token"] == pytest.approx((1 / 4 + 4 / 8 + 3 / 2) / 3)


def test_the_lengths_reach_the_advantage(config: TrainConfig) -> None:
    """Those of the loss tokens; a truncated response that is dropped has none, and its reward is compared all the same."""
    config = changed(config, train={"drop_truncated": True}).model_copy(update={"algorithm": Opo()})
    responses = [response(0, 0, length=2), response(0, 1, length=6), response(0, 2, length=9, finished=False), response(0, 3)]
    scores = [Score(1.0), Score(0.0), Score(-1.0), Score(None, error="timeout")]
    plan = plan_of(config, [Group(0, Prompt(0, "", [1], "", {}), responses, scores, None)])
    found = response_advantages(config.algorithm, plan, None, np.zeros(4), 0.0)
    assert found.tolist() == pytest.approx([0.75, -0.25, -1.25, 0.0])


def test_the_parts_of_a_sum_reach_the_advantage(config: TrainConfig) -> None:
    """With their weights; a part that a cut response was not scored for is 0; a response without a score has no advantage."""
    source = {
        "type": "sum",
        "parts": [{"name": name, "source": {"type": "reasoning_gym"}, "weight": w} for name, w in (("a", 1), ("b", 0.5))],
    }
    config = changed(config, algorithm={"type": "gdpo"}, reward={"source": source})
    scores = [Score(1.0, {"a": 1.0, "b": 0.0}), Score(0.5, {"a": 0.0, "b": 1.0}), Score(0.0, scored=False), Score(None, error="timeout")]
    responses = [response(0, index) for index in range(4)]
    plan = plan_of(config, [Group(0, Prompt(0, "", [1], "", {}), responses, scores, None)])
    found = response_advantages(config.algorithm, plan, None, np.zeros(4), 0.0)
    std = np.std([1, 0, 0], ddof=1)
    sums = np.array([(2 / 3 - 0.5 / 3) / std, (-1 / 3 + 0.5 * 2 / 3) / std, (-1 / 3 - 0.5 / 3) / std])
    assert found.tolist() == pytest.approx([*(sums / sums.std(ddof=1)), 0.0], rel=1e-4, abs=1e-6)
