"""An episode of several contexts is one sequence of every loss, whatever micro-batches its contexts are in; by hand, in float64."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms import PolicyAlgorithm
from megarl.algorithms.gmpo import Gmpo
from megarl.algorithms.ppo import Ppo
from megarl.batch import Batch, Sample, concat
from megarl.config import DistillationSettings, TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.engines.episodes import chained
from megarl.image_source import ImageSource
from megarl.images import Image, PlacedImage
from megarl.parallel.packing import pack_micro
from megarl.ranks import assemble as assembling
from megarl.ranks.assemble import assemble, columns, corrections, mismatch_of_sequences, with_columns
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.step_plan import Group, StepPlan, members, plan_scoring, plan_step, response_advantages
from megarl.response import Response
from megarl.rewards.score import Score
from megarl.step import in_flight
from megarl.step.groups import StepGroups
from tests.e2e.job import RL
from tests.groups import in_groups
from tests.unit.algorithms.cases import CONFIGS, KINDS, make, on_ranks, same
from tests.unit.step.test_missing import using

WORDS = 97
# Of each response its contexts: (tokens that are read, sampled tokens that follow) turn by turn.
SHAPES = [
    [[(4, 3), (2, 2)], [(9, 4)], [(6, 1), (3, 5)]],
    [[(5, 4)]],
    [[(3, 2)], [(7, 6)]],
    [[(4, 7)]],
]
REWARDS = [1.0, 0.0, -0.5, 0.75]  # two groups
CLIPS = {"gspo": {"clip_low": 0.005, "clip_high": 0.006}, "gmpo": {"clip_low": 0.05, "clip_high": 0.06}}
SMALL, LARGE = 17, 1000  # capacities of a micro-batch
THETA = (torch.arange(WORDS, dtype=torch.float64) * 1.3).sin() - 2.0  # log-prob of each word under the policy, whatever comes before it
OLD = THETA + 0.15 * (torch.arange(WORDS, dtype=torch.float64) * 0.7).cos()


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=tmp_path))
    return load(tmp_path / "job.yaml", ["train.mini_batches=1"], TrainConfig)


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are their own references."""
    monkeypatch.setattr(assembling, "ray", SimpleNamespace(get=list, put=lambda value: value))


def episodes() -> list[Sample]:
    rng, made = np.random.default_rng(0), list[Sample]()
    for shape in SHAPES:
        contexts = []
        for turns in shape:
            mask = np.concatenate([np.repeat([False, True], turn) for turn in turns])
            tokens = rng.integers(0, WORDS, len(mask)).astype(np.int32)
            prompt = turns[0][0]
            logp = np.where(mask, OLD.numpy()[tokens], 0.0)[prompt:].astype(np.float32)
            contexts.append(Sample(tokens, prompt, logp, "stop", loss_mask=mask[prompt:]))
        made.append(chained(contexts))
    ends = [np.flatnonzero(np.diff([*_mask(sample), False])) + 1 for sample in made]  # of runs of either kind
    return [
        replace(sample, turn_rewards=[(int(end), 0.25 * n) for n, end in enumerate(own) if _mask(sample)[end - 1]])
        for sample, own in zip(made, ends, strict=True)
    ]


def _mask(sample: Sample) -> np.ndarray:
    assert sample.loss_mask is not None
    return sample.loss_mask


def words(sample: Sample) -> Tensor:
    """The words that were sampled, in order."""
    return torch.from_numpy(sample.tokens[sample.prompt_length :][_mask(sample)]).long()


def planned(config: TrainConfig, dp: int, capacity: int) -> StepPlan:
    responses = [
        Response(n // 2, "", one.prompt_length, one.response_length, one.loss_tokens, True, one, n % 2, starts=one.starts)
        for n, one in enumerate(episodes())
    ]
    groups = in_groups(responses, [Score(value) for value in REWARDS])
    return plan_step(config, [replace(group, greedy=0.0) for group in groups], dp, capacity)


def micro_batches(plan: StepPlan, dp: int) -> list[list[tuple[list[int], Batch]]]:
    """Of each rank its samples and their batch, micro-batch by micro-batch, with log-probs."""
    return [
        [(samples, _with_logp(assemble(plan, samples))) for mini_batch in plan.split for samples in mini_batch[rank]] for rank in range(dp)
    ]


def _with_logp(batch: Batch) -> Batch:
    return batch.with_extra(old_logp=OLD[batch.target_T], value=(batch.target_T.double() * 0.3).cos(), ref_logp=OLD[batch.target_T] - 0.1)


def by_hand(algorithm: Any) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, from the papers' formulas, of four responses of which each is the list of its sampled words."""
    theta, losses = THETA.clone().requires_grad_(), list[Tensor]()
    for n, sample in enumerate(episodes()):
        said, group = words(sample), REWARDS[n // 2 * 2 : n // 2 * 2 + 2]
        mean, std = sum(group) / 2, math.sqrt(sum((reward - sum(group) / 2) ** 2 for reward in group))
        d = theta[said] - OLD[said]
        if algorithm.type == "rloo":
            losses.append((-d.exp().detach() * (REWARDS[n] - group[1 - n % 2]) * theta[said]).sum() / 4)
            continue
        advantage = (REWARDS[n] - mean) / (std + 1e-6)
        if algorithm.type == "gmpo":
            clipped = d.clamp(max=algorithm.clip_high) if advantage > 0 else d.clamp(min=-algorithm.clip_low)
            losses.append(-advantage * clipped.mean().exp() / 4)
            continue
        ratio = d.mean().exp().expand(len(d)) if algorithm.type == "gspo" else d.exp()
        loss = torch.max(-ratio * advantage, -ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantage)
        losses.append(loss.sum() / sum(len(words(one)) for one in episodes()) if algorithm.type == "dapo" else loss.mean() / 4)
    total = torch.stack(losses).sum()
    [gradient] = torch.autograd.grad(total, theta)
    return total.detach(), gradient


class Rank(SimpleNamespace):
    """What `ModelWorker` reads of itself when it fills in the means of whole responses."""

    def forward_tokens(self, batches: Sequence[Batch], name: str, read: Callable[..., Tensor], routing: None) -> list[Batch]:
        return [batch.with_extra(**{name: THETA[batch.target_T]}) for batch in batches]


def rank_of(algorithm: PolicyAlgorithm, plan: StepPlan, parts: Sequence[tuple[list[int], Batch]]) -> Any:
    rank = Rank(
        _spec=SimpleNamespace(algorithm=algorithm),
        _buckets=None,
        _mini_batches=[[batch for _, batch in parts]],
        _reports_tokens=True,
        _logp=lambda _: None,
    )
    rank._members, rank._grid, rank._sum_over = [plan.responses(samples) for samples, _ in parts], SimpleNamespace(is_last_stage=True), same
    rank._follow, rank._use, rank._flat = lambda *_, **__: nullcontext(), lambda _: rank, lambda: rank._mini_batches[0]
    return rank


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "rloo", "gmpo", "deepseek_v32"])
@pytest.mark.parametrize(("dp", "capacity"), [(1, LARGE), (1, SMALL), (2, LARGE), (2, SMALL)])
def test_loss_and_gradient_are_those_of_whole_episodes(config: TrainConfig, name: str, dp: int, capacity: int) -> None:
    config = using(config, {"type": name, **CLIPS.get(name, {})})
    plan, algorithm = planned(config, dp, capacity), config.algorithm
    assert plan.divided == [capacity == SMALL]
    advantage_N = torch.from_numpy(response_advantages(algorithm, plan, None, np.zeros(4), 0.0)).double()
    theta, total, tokens = THETA.clone().requires_grad_(), torch.zeros((), dtype=torch.float64), 0
    for parts in micro_batches(plan, dp):
        own = [(samples, batch.with_extra(advantage=batch.spread(advantage_N[plan.responses(samples)]))) for samples, batch in parts]
        rank = rank_of(algorithm, plan, own)
        batches = rank._mini_batches[0]
        if algorithm.joins_tokens and capacity == SMALL:
            batches = ModelWorker._with_sequence_means(rank, 0, False)
        for batch in batches:
            loss = algorithm.loss(theta[batch.target_T], torch.zeros(len(batch)), batch, same, 0.0)
            total = total + (loss.loss_T * batch.extra_T["weight"]).sum()
            tokens += int(batch.mask_T.count_nonzero())
    [gradient] = torch.autograd.grad(total, theta)
    expected, slope = by_hand(algorithm)
    assert tokens == sum(len(words(sample)) for sample in episodes()), "each sampled token once"
    # The plan's weights and advantages are float32.
    assert total.item() == pytest.approx(expected.item(), abs=1e-7) and torch.allclose(gradient, slope, rtol=1e-5, atol=1e-8)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("capacity", [LARGE, SMALL])
def test_rewards_to_go_and_gae_run_from_context_to_context(config: TrainConfig, capacity: int) -> None:
    """The recursion of the paper over the sampled tokens of an episode; a turn's reward is at its last token, the rest at the end."""
    config, gamma, lam = using(config, {"type": "ppo", "whiten": False, "gamma": 0.9, "gae_lambda": 0.8}), 0.9, 0.8
    plan = replace(planned(config, 1, capacity), turn_weight=1.0)
    [parts] = micro_batches(plan, 1)
    whole = concat([batch for _, batch in parts], [plan.responses(samples) for samples, _ in parts])
    order = list(dict.fromkeys(n for samples, _ in parts for n in plan.responses(samples)))
    found = config.algorithm.token_advantages(whole, same, 0.0)
    assert isinstance(config.algorithm, Ppo)
    returns = config.algorithm.returns(whole, 0.0)
    for place, n in enumerate(order):
        sample = episodes()[n]
        said = words(sample)
        at = np.flatnonzero(_mask(sample)).tolist()
        reward = torch.zeros(len(said), dtype=torch.float64)
        for end, earned in sample.turn_rewards:
            reward[at.index(end - 1)] += earned
        reward[-1] += REWARDS[n] - sum(earned for _, earned in sample.turn_rewards)
        value = (said.double() * 0.3).cos()
        expected, after = [0.0] * len(said), 0.0
        for t in reversed(range(len(said))):
            following = float(value[t + 1]) if t + 1 < len(said) else 0.0
            after = expected[t] = float(reward[t]) + gamma * following - float(value[t]) + gamma * lam * after
        own = (whole.mask_T & (whole.seq_T == place)).nonzero().squeeze(1)
        own = own[whole.position_T[own].argsort()]
        assert whole.target_T[own].tolist() == said.tolist()
        assert found[own].tolist() == pytest.approx(expected, abs=1e-6)
        assert returns[own].tolist() == pytest.approx((torch.tensor(expected, dtype=torch.float64) + value).tolist(), abs=1e-6)


def test_everything_of_a_whole_response_is_the_same_from_any_split(config: TrainConfig) -> None:
    """Token advantages of every algorithm, sums of the KL, corrections, and columns that another group computed."""
    for name in KINDS:
        for correction in (None, {"type": "mis", "level": "geometric", "normalise": True, "denominator": "kept", "lo": 0.99, "hi": 1.02}):
            if correction and name == "dppo":  # whose ratio is to the rollout policy already
                continue
            own = using(config, {**CONFIGS[name], **({"correction": correction} if correction else {})})
            algorithm, results = own.algorithm, list[dict[str, Any]]()
            for capacity in (LARGE, SMALL):
                plan = planned(own, 1, capacity)
                [parts] = micro_batches(plan, 1)
                rank = rank_of(algorithm, plan, parts)
                whole = concat([batch for _, batch in parts], rank._members)
                whole = whole.with_extra(
                    advantage=whole.extra_T["reward"], rollout_logp=whole.extra_T["old_logp"] + (whole.target_T % 3) / 50
                )
                values = {"advantage": algorithm.token_advantages(whole, same, 0.1)}
                order = list(dict.fromkeys(n for chosen in rank._members for n in chosen))
                if algorithm.correction is not None:
                    values |= corrections(algorithm, algorithm.correction, whole, order, plan.mini_batches, torch.ones(4).bool(), same)
                by_token = {
                    (order[n], position): {key: float(value[entry]) for key, value in values.items()}
                    for entry, (n, position) in enumerate(zip(whole.seq_T.tolist(), whole.position_T.tolist(), strict=True))
                    if whole.mask_T[entry]
                }
                shown = {key: metric.value() for key, metric in mismatch_of_sequences(whole).items()}
                results.append({"tokens": by_token, "weights": plan.weight_N.tolist(), "shown": shown})
            one, other = results
            assert one["tokens"].keys() == other["tokens"].keys() and one["weights"] == other["weights"]
            assert one["shown"] == pytest.approx(other["shown"], abs=1e-6)
            for token, numbers in one["tokens"].items():
                assert numbers == pytest.approx(other["tokens"][token], abs=1e-6), (name, correction, token)


def test_the_kl_of_a_response_is_the_sum_over_its_contexts(config: TrainConfig) -> None:
    own = using(config, {"type": "rloo", "kl_in": "reward", "kl_coef": 0.5})
    for capacity in (LARGE, SMALL):
        plan = planned(own, 1, capacity)
        [parts] = micro_batches(plan, 1)
        found = ModelWorker.sequence_kl(rank_of(own.algorithm, plan, parts))
        assert found == pytest.approx({n: 0.1 * len(words(sample)) for n, sample in enumerate(episodes())}, abs=1e-6)


def test_columns_go_between_groups_that_split_contexts_differently(config: TrainConfig) -> None:
    plans = [planned(config, 1, LARGE), planned(config, 2, SMALL)]
    [theirs], mine = micro_batches(plans[0], 1), [part for own in micro_batches(plans[1], 2) for part in own]
    given = columns([batch.with_extra(value=batch.target_T.float()) for _, batch in theirs], [samples for samples, _ in theirs], ["value"])
    for batch in with_columns([batch for _, batch in mine], [samples for samples, _ in mine], given, ["value"]):
        assert torch.equal(batch.extra_T["value"], batch.target_T.float())


def test_a_split_keeps_episodes_on_a_rank_and_every_context_once(config: TrainConfig) -> None:
    for dp, capacity in ((1, LARGE), (2, SMALL)):
        plan = planned(config, dp, capacity)
        assert plan.sample_S == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (3, 0)] and plan.mini_batches == [[0, 1, 2, 3]]
        [mini_batch] = plan.split
        assert members(mini_batch) == list(range(7))
        owners = [{n for micro_batch in shard for n in plan.responses(micro_batch)} for shard in mini_batch]
        assert sum(map(len, owners)) == 4 and set.union(*owners) == {0, 1, 2, 3}
        for rank, own in enumerate(owners):
            assert {n for n in range(4) if plan.part(rank).payload_N[n] is not None} == own
        sizes = [sum(len(batch) for _, batch in part) for part in micro_batches(plan, dp)]
        assert sum(sizes) == sum(len(sample.tokens) - 1 - len(sample.starts) for sample in episodes())
        assert all(len(batch) <= capacity for part in micro_batches(plan, dp) for _, batch in part)
    with pytest.raises(ValueError, match=r"a sequence of 14 tokens does not fit into a micro-batch of 13"):
        planned(config, 1, 13)
    plan = planned(config, 1, LARGE)
    one = Response(0, "", 4, 30, 5, True, None, 0, starts=(11, 24))
    assert plan_scoring([one], 1, 10).split == [[[0]]], "a reward model reads the last context, of ten tokens"


@pytest.mark.parametrize("cp", [1, 2])
def test_a_model_reads_each_context_by_itself(config: TrainConfig, cp: int) -> None:
    for capacity in (LARGE, SMALL):
        for _, batch in micro_batches(planned(config, 1, capacity), 1)[0]:
            context_T, count_C = batch.contexts()
            seen: list[tuple[int, int]] = []
            for rank in range(cp):
                packed = pack_micro(batch, cp_rank=rank, cp_size=cp, tp=1, device=torch.device("cpu"))
                position = packed.position_ids[0, packed.row_T]
                assert packed.input_ids[0, packed.row_T].tolist() == batch.input_T[packed.entry_T].tolist()
                seen += zip(context_T[packed.entry_T].tolist(), position.tolist(), strict=True)
                lengths = packed.params.cu_seqlens_q.diff().tolist()
            assert sorted(seen) == [(c, p) for c, count in enumerate(count_C.tolist()) for p in range(count)]
            if cp == 1:
                assert lengths == sorted(count_C.tolist())
    half = batch.take(torch.arange(1, len(batch)))
    with pytest.raises(AssertionError, match="whole contexts"):
        pack_micro(half, cp_rank=0, cp_size=1, tp=1, device=torch.device("cpu"))


def test_contexts_come_back_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "ray", SimpleNamespace(put=lambda value: value))
    monkeypatch.setattr("megarl.ranks.response_file.ray", SimpleNamespace(get=lambda references: references))
    image = PlacedImage(1, Image("0" * 64, (20, 30), (1, 2, 4), 2, ImageSource("a.parquet", 3)))
    kept = [
        Response(0, "", one.prompt_length, one.response_length, one.loss_tokens, True, one, n, starts=one.starts, images=one.images)
        for n, one in enumerate(replace(one, images=[image] * n) for n, one in enumerate(episodes()))
    ]
    group = Group(0, Prompt(0, "", [1], "", {}), kept, [Score(1.0)] * 4, None)
    with (tmp_path / "ahead.npz").open("wb") as file:
        in_flight.dump(StepGroups([group]), []).write(file)
    [loaded] = in_flight.load(tmp_path / "ahead.npz", [group.prompt], []).groups
    for before, after in zip(kept, loaded.responses, strict=True):
        assert after.entries == before.entries and tuple(after.payload.starts) == before.payload.starts
        assert after.images == after.payload.images == before.images
        assert all(one.image.source == image.image.source and one.image.size == (20, 30) for one in after.images)
        for array in ("tokens", "rollout_logp", "loss_mask"):
            assert np.array_equal(getattr(after.payload, array), getattr(before.payload, array))
        assert [tuple(one) for one in after.payload.turn_rewards] == list(before.payload.turn_rewards)


def test_an_algorithm_of_one_s_own_is_asked_whether_it_joins_tokens() -> None:
    joining = {name for name in KINDS if name != "gspo_token" and make(CONFIGS[name]).joins_tokens}
    assert joining == {"gspo", "gmpo", "luspo", "deepseek_v32", "vespo", "topr"} and Gmpo().joins_tokens


def test_a_token_draws_the_same_lot_in_any_split(config: TrainConfig) -> None:
    """And another in another step; those of a step are spread evenly over all numbers."""
    own, drawn = using(config, {"type": "clip_cov"}), list[dict[tuple[int, int], int]]()
    for dp, capacity in ((1, LARGE), (1, SMALL), (2, SMALL)):
        lots = dict[tuple[int, int], int]()
        plan = planned(own, dp, capacity)
        for parts in micro_batches(plan, dp):
            for samples, batch in parts:
                names = torch.tensor(plan.responses(samples))[batch.seq_T].tolist()
                lots |= dict(zip(zip(names, batch.position_T.tolist(), strict=True), batch.extra_T["lot"].tolist(), strict=True))
        drawn.append(lots)
    assert drawn[0] == drawn[1] == drawn[2] and len(set(drawn[0].values())) == len(drawn[0])
    response_T, position_T = torch.arange(4).repeat_interleave(5000), torch.arange(5000).repeat(4)
    one, other = (assembling.lots(seed, response_T, position_T) for seed in (2**64 - 1, 2**64 - 2))
    assert not (one == other).any() and len(one.unique()) == len(one)
    share = torch.histc(one.double() / 2**62, bins=20, min=0, max=1) / len(one)
    assert share.sum() == pytest.approx(1) and float((share - 0.05).abs().max()) < 0.01
    assert planned(config, 1, LARGE).seed is None


def choosing(rank: Any, sum_over: Callable[[Tensor], Tensor], fresh: bool) -> Any:
    """The rank with what `ModelWorker` also reads of itself when an algorithm selects tokens."""
    rank._fresh, rank._spec.old_logp, rank._grid.cp_size = fresh, "forward", 1
    rank._sum_over_replicas, rank._completed = sum_over, partial(ModelWorker._completed, rank)
    return rank


@pytest.mark.parametrize(
    "algorithm",
    [
        {"type": "kl_cov", "cov_ratio": 0.3},
        {"type": "clip_cov", "cov_ratio": 0.2, "cov_low": -0.3, "cov_high": 0.3},
        {"type": "m2po", "m2_threshold": 0.01},
    ],
    ids=lambda one: one["type"],
)
def test_the_same_tokens_are_chosen_from_any_split(config: TrainConfig, algorithm: dict[str, Any]) -> None:
    """On one rank and on two, contexts of an episode together and apart, before the first update and, scored anew, before the second."""
    own = using(config, algorithm)
    for fresh in (True, False):
        chosen = list[set[tuple[int, int]]]()
        for dp, capacity in ((1, LARGE), (1, SMALL), (2, LARGE), (2, SMALL)):
            plan = planned(own, dp, capacity)
            advantage_N = torch.from_numpy(response_advantages(own.algorithm, plan, None, np.zeros(4), 0.0))
            parts = [
                [(samples, batch.with_extra(advantage=batch.spread(advantage_N[plan.responses(samples)]))) for samples, batch in one]
                for one in micro_batches(plan, dp)
            ]
            ranks = [rank_of(own.algorithm, plan, one) for one in parts]

            def choose(n: int, over: Callable[[Tensor], Tensor], own: list[Any] = ranks, fresh: bool = fresh) -> list[Tensor]:
                return ModelWorker._chosen(choosing(own[n], over, fresh), 0, False)

            masks = on_ranks(dp, choose)
            chosen.append(
                {
                    (plan.responses(samples)[int(batch.seq_T[entry])], int(batch.position_T[entry]))
                    for one, mask in zip(parts, masks, strict=True)
                    for (samples, batch), own_T in zip(one, mask, strict=True)
                    for entry in own_T.nonzero().squeeze(1).tolist()
                }
            )
        tokens = sum(len(words(sample)) for sample in episodes())
        assert chosen[0] == chosen[1] == chosen[2] == chosen[3]
        if algorithm["type"] == "m2po" and fresh:  # on policy
            assert not chosen[0]
        elif algorithm["type"] == "m2po":
            assert 0 < len(chosen[0]) < tokens / 2
        else:
            assert len(chosen[0]) == int(algorithm["cov_ratio"] * tokens)


class Teachers(SimpleNamespace):
    """What `ModelWorker` reads of itself when teachers score: each token's log-prob is the teacher's number and the token."""

    def _use(self, name: str) -> Any:
        return SimpleNamespace(forward_tokens=partial(self._scored, name))

    def _scored(self, name: str, batches: Sequence[Batch], column: str, read: str) -> list[Batch]:
        self.passes[name] = [len(batch) for batch in batches]
        for batch in batches:
            if len(batch):
                pack_micro(batch, cp_rank=0, cp_size=1, tp=1, device=torch.device("cpu"))  # whole contexts
        value = {"teachers.a": 0.0, "teachers.b": 1000.0}[name]
        rows = [torch.stack([batch.target_T + value, batch.position_T + value], 1) for batch in batches]
        return [batch.with_extra(**{column: row_TC if len(batch) else torch.empty(0)}) for batch, row_TC in zip(batches, rows, strict=True)]


@pytest.mark.parametrize(("dp", "capacity"), [(1, LARGE), (1, SMALL), (2, SMALL)])
def test_every_entry_has_the_column_of_its_responses_teacher(config: TrainConfig, dp: int, capacity: int) -> None:
    """And each is scored once; ranks make the same number of passes."""
    plan, teacher_N = planned(config, dp, capacity), np.array([1, 0, 0, 1])
    distillation = DistillationSettings(teachers={"a": Path("t"), "b": Path("u")})
    for parts in micro_batches(plan, dp):
        rank = Teachers(_spec=SimpleNamespace(distillation=distillation), _teaching=str, passes={})
        rank._members = [plan.responses(samples) for samples, _ in parts]
        filled = ModelWorker._scored_by_teachers(cast(Any, rank), [batch for _, batch in parts], teacher_N)
        for members_N, batch in zip(rank._members, filled, strict=True):
            if len(batch):
                value_T = 1000.0 * batch.spread(torch.from_numpy(teacher_N[members_N]))
                assert torch.equal(batch.extra_T["teacher_logp"], torch.stack([batch.target_T + value_T, batch.position_T + value_T], 1))
        assert [sum(sizes) for sizes in zip(*rank.passes.values(), strict=True)] == [len(batch) for _, batch in parts]
