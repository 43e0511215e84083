"""Every advantage against plain loops: groups uneven, shuffled, of one, all right, all wrong; token rewards on ragged sequences."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import ActorCritic
from megarl.algorithms.ops import SumOver
from megarl.algorithms.pass_at_k import PassAtK
from megarl.batch import Batch
from tests.unit.algorithms import reference
from tests.unit.algorithms.cases import ALGORITHMS, CONFIGS, KINDS, LENGTHS, make, ragged, same, together

GROUPS = [7, 7, 3, 3, 9, 7, 5, 5, 5, 5, 3, 8, 7]  # uneven, in no order; 8 and 9 alone
REWARDS: dict[str, list[float]] = {
    "real": [0.3, -1.2, 2.5, 0.1, 4.0, 0.9, -0.7, 0.4, 0.4, 1.1, -3.0, 0.2, 0.25],
    "zero_one": [1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0],  # group 3 all right, group 5 all wrong
    "all_right": [1] * 13,
    "all_wrong": [-1] * 13,
    "tenths": [0.1] * 13,  # whose mean is not exactly a tenth
}
GREEDY = [0.5 * (index % 3) for index in range(13)]


def expected(kind: str, rewards: list[float]) -> list[float]:
    out = []
    for n, (reward, group) in enumerate(zip(rewards, GROUPS, strict=True)):
        members = [r for r, g in zip(rewards, GROUPS, strict=True) if g == group]
        others = [r for m, (r, g) in enumerate(zip(rewards, GROUPS, strict=True)) if g == group and m != n]
        centred = reward - statistics.fmean(members) if len(set(members)) > 1 else 0.0
        if kind in ("ppo", "vc_ppo", "vapo", "reinforce_pp"):
            out.append(reward)
        elif kind == "raft":
            out.append(1.0)
        elif kind == "reinforce":
            out.append(reward - statistics.fmean(rewards))
        elif kind == "topr":
            out.append(reward - 0.5)
        elif kind == "w_reinforce":
            out.append(0.1 if reward > 0 else -1.0)
        elif kind == "pass_at_k":
            alike = [m for m, g in enumerate(GROUPS) if g == group]
            out.append(best_of_subsets(rewards, alike, 2, 1e-6)[alike.index(n)] if len(alike) > 2 else 0.0)
        elif kind == "max_rl":
            out.append(centred / (statistics.fmean(members) + 1e-6) if statistics.fmean(members) > 0 else 0.0)
        elif kind == "remax":
            out.append(reward - GREEDY[n])
        elif kind == "rloo":
            out.append(reward - statistics.fmean(others) if others else 0.0)
        elif kind in ("dr_grpo", "reinforce_pp_baseline", "opo"):  # of responses of one length
            out.append(centred)
        elif kind == "lite_ppo":
            out.append(centred / (statistics.stdev(rewards) + 1e-6))
        else:
            out.append(centred / (statistics.stdev(members) + 1e-6) if len(members) > 1 else 0.0)
    return over_the_step(out) if kind == "gdpo" else out


def best_of_subsets(
    rewards: Sequence[float], members: Sequence[int], k: int, eps: float, *, leave_one_out: bool = False, scaled: bool = True
) -> list[float]:
    """Pass@k's advantages of a group, over every subset of k."""
    best = {subset: max(rewards[m] for m in subset) for subset in itertools.combinations(members, k)}
    std = statistics.pstdev(best.values()) + eps if scaled else 1.0
    out = []
    for i in members:
        own = [subset for subset in best if i in subset]
        rest = [max(rewards[m] for m in subset if m != i) for subset in own] if leave_one_out else best.values()
        out.append((statistics.fmean(best[subset] for subset in own) - statistics.fmean(rest)) / std)
    return out


def over_the_step(values: list[float]) -> list[float]:
    return [(value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6) for value in values]


def test_gdpo_normalises_each_part_in_its_group_and_their_sum_over_the_step() -> None:
    """A part that is the same for a whole group adds nothing there; without normalise_sum the sum is the advantage."""
    parts, weights = [[float(r) for r in REWARDS[name]] for name in ("real", "zero_one", "tenths")], [1.0, 0.25, 3.0]
    columns = [expected("grpo", values) for values in parts]
    sums = [sum(w * column[n] for w, column in zip(weights, columns, strict=True)) for n in range(len(GROUPS))]
    given = (torch.tensor(parts, dtype=torch.float64).T, torch.tensor(weights), torch.tensor(GROUPS))
    assert make({"type": "gdpo"}).part_advantages(*given).tolist() == pytest.approx(over_the_step(sums), rel=1e-6, abs=1e-7)
    assert make({"type": "gdpo", "normalise_sum": False}).part_advantages(*given).tolist() == pytest.approx(sums, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "rewards", [[0.3, -1.2, 2.5, 0.1, 4.0, 0.9, -0.7, 0.4, 0.4], [1, 0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0], [0.1] * 6]
)
@pytest.mark.parametrize("k", [2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], k: int) -> None:
    """Each baseline and scale; a second group changes nothing."""
    reward_N, group_N = torch.tensor([*rewards, 9.0, -9.0], dtype=torch.float64), torch.tensor([4] * len(rewards) + [1, 1])
    for baseline, scale in itertools.product(("group", "leave_one_out"), ("group", "none")):
        given = make({"type": "pass_at_k", "k": k, "baseline": baseline, "scale": scale, "scale_eps": 0.01}).advantages(reward_N, group_N)
        options = {"leave_one_out": baseline == "leave_one_out", "scaled": scale == "group"}
        by_hand = best_of_subsets(rewards, range(len(rewards)), k, 0.01, **options)
        assert given.tolist() == pytest.approx([*by_hand, 0.0, 0.0], rel=1e-6, abs=1e-9), (baseline, scale)


def test_pass_at_k_of_rewards_0_and_1_is_the_papers() -> None:
    """Pass@k training's closed form (arXiv:2508.10751), and PKPO's s_i^(loo-1) = s_i - k / n max@(k - 1) of the others (2505.15201)."""
    n, right, k = 32, 5, 8
    reward_N, group_N = torch.tensor([1.0] * right + [0.0] * (n - right), dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
    rate = 1 - math.comb(n - right, k) / math.comb(n, k)
    std = math.sqrt(rate * (1 - rate)) + 1e-6
    wrong = 1 - rate - math.comb(n - right - 1, k - 1) / math.comb(n - 1, k - 1)
    paper = [(1 - rate) / std] * right + [wrong / std] * (n - right)
    assert make({"type": "pass_at_k", "k": k}).advantages(reward_N, group_N).tolist() == pytest.approx(paper, rel=1e-6)
    pkpo = make({"type": "pass_at_k", "k": k, "baseline": "leave_one_out", "scale": "none"}).advantages(reward_N, group_N)
    others = 1 - math.comb(n - right, k - 1) / math.comb(n - 1, k - 1)  # of a right response
    assert (pkpo * k / n).tolist() == pytest.approx([k / n * (1 - others)] * right + [0.0] * (n - right), rel=1e-6, abs=1e-12)


def test_pass_at_k_estimates_the_gradient_of_the_best_of_k() -> None:
    """Over all draws of n actions from a softmax, the mean of sum_i (k / n) A_i grad log p_i is the gradient of E[max of k]."""
    value, n, k = [0.0, 0.4, 1.5], 4, 2
    logit = torch.tensor([0.3, -0.2, -0.9], dtype=torch.float64, requires_grad=True)
    chance = logit.softmax(0)
    draws = list(itertools.product(range(3), repeat=k))
    target = torch.stack([chance[list(draw)].prod() * max(value[a] for a in draw) for draw in draws]).sum()
    [slope] = torch.autograd.grad(target, logit, retain_graph=True)
    for baseline in ("group", "leave_one_out"):
        algorithm = PassAtK.model_validate({"k": k, "baseline": baseline, "scale": "none"})
        found = torch.zeros(3, dtype=torch.float64)
        for draw in itertools.product(range(3), repeat=n):
            reward_N = torch.tensor([value[a] for a in draw], dtype=torch.float64)
            advantage_N = algorithm.normalised(reward_N, torch.zeros(n, dtype=torch.int64))
            score_NA = torch.eye(3, dtype=torch.float64)[list(draw)] - chance.detach()
            found += chance.detach()[list(draw)].prod() * k / n * (advantage_N @ score_NA)
        factor = 1.0 if baseline == "leave_one_out" else (found @ slope / (slope @ slope)).item()
        torch.testing.assert_close(found, factor * slope, rtol=1e-12, atol=1e-14)
        assert 0.2 < factor <= 1  # the group's mean contains the response itself, which shortens the gradient


def test_opo_has_the_baseline_of_least_variance() -> None:
    """Over all responses of a tree of fair coins, whose score function has a squared norm in proportion to the length."""
    length = {0: 1, 1: 4}  # by the first token
    responses = [(first, *rest) for first in (0, 1) for rest in itertools.product((0, 1), repeat=length[first] - 1)]
    logit = {prefix: torch.zeros(2, dtype=torch.float64, requires_grad=True) for response in responses for prefix in prefixes(response)}
    chance, square = [], []
    for response in responses:
        logp = torch.stack([logit[prefix].log_softmax(0)[a] for prefix, a in zip(prefixes(response), response, strict=True)]).sum()
        score = torch.autograd.grad(logp, list(logit.values()), allow_unused=True, materialize_grads=True)
        chance.append(logp.exp().item())
        square.append(sum(part.square().sum().item() for part in score))
    reward = [0.3 * response.count(1) - 1.5 * response[0] + 0.7 for response in responses]
    times = [round(p * 16) for p in chance]  # of 16 responses, each is there as often as it is likely
    copies = [n for n, often in enumerate(times) for _ in range(often)]
    reward_N = torch.tensor([*(reward[n] for n in copies), 3.0, 9.0, 1.0], dtype=torch.float64)
    group_N, count_N = torch.tensor([5] * 16 + [2] * 3), torch.tensor([*(len(responses[n]) for n in copies), 1, 3, 0])
    algorithm = make({"type": "opo"})
    advantage_N = algorithm.length_advantages(reward_N, group_N, count_N)
    assert sum(square[n] * advantage_N[place].item() for place, n in enumerate(copies)) == pytest.approx(0, abs=1e-6)
    baseline = reward[copies[0]] - advantage_N[0].item()

    def spread(b: float) -> float:
        return sum(p * s * (r - b) ** 2 for p, s, r in zip(chance, square, reward, strict=True))  # the mean does not depend on b

    assert all(spread(baseline) < spread(baseline + step) for step in (-0.01, 0.01))
    assert abs(baseline - statistics.fmean(reward[n] for n in copies)) > 0.1  # which GRPO subtracts
    assert advantage_N[16:].tolist() == pytest.approx([-4.5, 1.5, -6.5])  # a response without loss does not move the baseline
    assert algorithm.length_advantages(torch.full((19,), 0.1), group_N, count_N).tolist() == [0.0] * 19


def prefixes(response: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [response[:t] for t in range(len(response))]


def test_max_rl_is_the_mean_over_right_responses_less_the_mean_over_all() -> None:
    """With K of G right: 1 / K - 1 / G for a right one and -1 / G for another, times G."""
    reward_N = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 1, -1, -1], dtype=torch.float64)
    group_N = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    found = make({"type": "max_rl", "scale_eps": 1e-12}).advantages(reward_N, group_N)
    right, wrong = 4 * (1 / 2 - 1 / 4), 4 * (-1 / 4)
    assert found.tolist() == pytest.approx([right, wrong, wrong, right, 0, 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", REWARDS)
def test_advantage_of_a_response_is_the_formula(kind: str, rewards: str) -> None:
    algorithm = ALGORITHMS[kind]
    reward_N = torch.tensor(REWARDS[rewards], dtype=torch.float64)
    advantage_N = algorithm.advantages(reward_N, torch.tensor(GROUPS), torch.tensor(GREEDY))
    assert advantage_N.dtype == torch.float32
    assert advantage_N.tolist() == pytest.approx(expected(kind, [float(reward) for reward in REWARDS[rewards]]), rel=1e-6, abs=1e-7)


def others_of(values: list[float]) -> list[list[float]]:
    return [[r for m, r in enumerate(values) if GROUPS[m] == GROUPS[n] and m != n] for n in range(len(values))]


@pytest.mark.parametrize("rewards", REWARDS)
def test_baseline_and_scale_are_the_formulas(rewards: str) -> None:
    """Every pair of both, and another epsilon."""
    values = [float(reward) for reward in REWARDS[rewards]]
    for baseline in ("group", "leave_one_out"):
        rows = [
            ([r for r, g in zip(values, GROUPS, strict=True) if g == GROUPS[n]], statistics.fmean(left) if left else values[n])
            for n, left in enumerate([r for m, r in enumerate(values) if GROUPS[m] == GROUPS[n] and m != n] for n in range(len(values)))
        ]
        centred = [r - (statistics.fmean(group) if baseline == "group" else other) for r, (group, other) in zip(values, rows, strict=True)]
        stds = {
            "none": [1.0 - 0.01] * len(values),
            "group": [statistics.stdev(group) if len(group) > 1 else 1.0 for group, _ in rows],
            "batch": [statistics.stdev(values)] * len(values),
            "batch_centred": [statistics.stdev(centred)] * len(values),
            "group_population": [statistics.pstdev(group) for group, _ in rows],
            # A response that differs from equal others would have 1 / scale_eps times its reward: it is not divided.
            "others": [(statistics.stdev(others) if len(others) > 1 else 0.0) or 1.0 - 0.01 for others in others_of(values)],
        }
        for scale, std in stds.items():
            algorithm = make({"type": "rloo", "baseline": baseline, "scale": scale, "scale_eps": 0.01})
            found = algorithm.advantages(torch.tensor(values), torch.tensor(GROUPS)).tolist()
            assert found == pytest.approx([c / (s + 0.01) for c, s in zip(centred, std, strict=True)], rel=1e-5, abs=1e-6), (
                baseline,
                scale,
            )


def test_rloo_normalised_over_the_batch() -> None:
    """As in TRL (`normalize_advantages`): less their mean, which is 0, over their standard deviation + 1e-4."""
    values = REWARDS["real"]
    left = [statistics.fmean(others) if others else values[n] for n, others in enumerate(others_of(values))]
    plain = [value - other for value, other in zip(values, left, strict=True)]
    algorithm = make({"type": "rloo", "scale": "batch_centred", "scale_eps": 1e-4})
    expected = [(x - statistics.fmean(plain)) / (statistics.stdev(plain) + 1e-4) for x in plain]
    assert algorithm.advantages(torch.tensor(values), torch.tensor(GROUPS)).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_w_reinforce_is_the_sum_of_its_two_losses() -> None:
    """-(lambda sum over right of log pi) + (sum over wrong of log pi), on policy, in value and gradient; 0 leaves the wrong ones."""
    rewards, lambdas = [1.0, -1.0, 0.4, 0.0, 0.6], (0.1, 0.0, 2.5)
    batch, logp_T, entropy_T = ragged(3, [4, 1, 9, 2, 30])
    reward_N = torch.tensor([*rewards, 1.0], dtype=torch.float64)  # of the last response no token is learned
    for positive in lambdas:
        algorithm = make({"type": "w_reinforce", "positive_weight": positive, "positive_above": 0.5, "sequence_count": "one"})
        advantage_N = algorithm.advantages(reward_N, torch.zeros(6, dtype=torch.int64)).double()
        fresh = batch.with_extra(old_logp=logp_T, advantage=batch.spread(advantage_N))
        mine_T, plain_T = logp_T.clone().requires_grad_(), logp_T.clone().requires_grad_()
        weight_T = batch.spread(algorithm.weights(batch.count_N))
        value = (algorithm.loss(mine_T, entropy_T, fresh, same, 0.0).loss_T * weight_T).sum()
        right_T = batch.mask_T & batch.spread(reward_N > 0.5)
        expected = -positive * plain_T[right_T].sum() + plain_T[batch.mask_T & ~right_T].sum()
        value.backward()
        expected.backward()
        assert mine_T.grad is not None and plain_T.grad is not None
        torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-7, atol=1e-7)  # advantages are float32
        torch.testing.assert_close(mine_T.grad[batch.mask_T], plain_T.grad[batch.mask_T], rtol=1e-7, atol=0)


def test_raft_may_weight_by_the_reward() -> None:
    assert make({"type": "raft", "weight": "reward"}).advantages(torch.tensor([0.5, 2.0]), torch.tensor([0, 1])).tolist() == [0.5, 2.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "lite_ppo", "reinforce", "pass_at_k", "opo"])
def test_reward_that_is_no_number_is_not_swallowed(kind: str) -> None:
    algorithm = ALGORITHMS[kind]
    assert bool(algorithm.advantages(torch.tensor([0.0, math.nan, 0.5, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1]))[:3].isnan().all())


def test_grpo_by_hand() -> None:
    reward, group = torch.tensor([1.0, 0.0, 1.0, 1.0, 5.0, 0.0]), torch.tensor([7, 7, 3, 3, 9, 7])
    std = math.sqrt(((1 - 1 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    right, wrong = (1 - 1 / 3) / (std + 1e-6), -1 / 3 / (std + 1e-6)
    assert make({"type": "grpo"}).advantages(reward, group).tolist() == pytest.approx([right, wrong, 0, 0, 0, wrong])


def test_raft_keeps_the_best_or_all_above_the_threshold() -> None:
    reward_N, group_N = torch.tensor([0.0, 1.0, 1.0, 0.2, 0.1, -1.0]), torch.tensor([4, 4, 4, 2, 2, 9])
    assert make({"type": "raft"}).keep(reward_N, group_N).tolist() == [False, True, False, True, False, True]
    assert make({"type": "raft", "threshold": 0.1}).keep(reward_N, group_N).tolist() == [False, True, True, True, False, False]
    assert make({"type": "grpo"}).keep(reward_N, group_N).all()
    best_two = make({"type": "raft", "best": 2, "threshold": 0.15})
    assert best_two.keep(reward_N, group_N).tolist() == [False, True, True, True, False, False]
    assert make({"type": "raft", "best": 2}).keep(reward_N, group_N).tolist() == [False, True, True, True, True, True]
    assert make({"type": "raft", "best": 1, "threshold": 0.0}).keep(reward_N, group_N).tolist() == [False, True, False, True, False, False]


KL = {"kl_coef": 0.2, "kl_in": "reward"}
BY_TOKEN: dict[str, dict[str, Any]] = {
    **{kind: CONFIGS[kind] for kind in KINDS},
    "reinforce": {"type": "reinforce", "gamma": 0.9},
    "reinforce_kl": {"type": "reinforce", "gamma": 0.9, **KL},
    "reinforce_k3": {"type": "reinforce", "gamma": 0.9, **KL, "kl_kind": "k3", "kl_clamp": 0.2},
    "reinforce_no_baseline": {"type": "reinforce", "baseline": "none", **KL},
    "reinforce_pp_kl": {"type": "reinforce_pp", "gamma": 0.95, **KL},
    "baseline_kl": {"type": "reinforce_pp_baseline", **KL},
    "ppo_k2": {"type": "ppo", **KL, "kl_kind": "k2"},
    "ppo_kl": {"type": "ppo", "gamma": 0.98, **KL},
    "vapo_kl": {"type": "vapo", "whiten": True, **KL},
    "vapo_fixed": {"type": "vapo", "alpha": None, "lambda_policy": 0.9},
    "vapo_coupled": {"type": "vapo", "alpha": 0.3, "lambda_critic": None, **KL},
    "vapo_literal": {"type": "vapo", "lambda_floor": None},
    "ppo_population": {"type": "ppo", "whiten_variance": "population"},
    "ppo_zero": {"type": "ppo", "masked_steps": "zero", "gamma": 0.9, **KL},
    "reinforce_pp_population": {"type": "reinforce_pp", "whiten_variance": "population"},
    "reinforce_pp_token": {"type": "reinforce_pp", "gamma": 0.95, **KL, "kl_at": "token"},
    "baseline_token": {"type": "reinforce_pp_baseline", **KL, "kl_at": "token", "whiten_variance": "population"},
    "baseline_sequence": {"type": "reinforce_pp_baseline", **KL, "kl_at": "sequence"},
}


def driven(config: dict[str, Any], seed: int) -> tuple[Any, Batch]:
    """A batch with the driver's numbers and the rewards; groups of three."""
    algorithm = make(config)
    batch, _, _ = ragged(seed, LENGTHS)
    sequences = len(batch.length_N)
    generator = torch.Generator().manual_seed(seed)
    reward_N = torch.randn(sequences, generator=generator, dtype=torch.float64)
    advantage_N = algorithm.advantages(reward_N, torch.arange(sequences) // 3, greedy_N=reward_N.flip(0)).double()
    return algorithm, batch.with_extra(reward=batch.spread(reward_N), advantage=batch.spread(advantage_N))


def policy_lambda(algorithm: Any, s: reference.Sequence) -> float:
    if algorithm.type != "vapo":
        return 0.95
    if algorithm.alpha is None:
        return algorithm.lambda_policy
    lam = 1 - 1 / (algorithm.alpha * len(s))
    return lam if algorithm.lambda_floor is None else max(algorithm.lambda_floor, lam)


def gae(algorithm: Any, batch: Batch, s: reference.Sequence, rewards: list[float], lam: float) -> list[float]:
    """Over the loss tokens, or over all tokens from the first to the last, of which the masked ones have reward 0 and value 0."""
    places = (batch.position_T[s.entry] - batch.position_T[s.entry[0]]).tolist()
    places = list(range(len(s))) if algorithm.masked_steps == "skip" else places
    every = [[0.0] * (places[-1] + 1) for _ in range(2)]
    for place, reward, value in zip(places, rewards, s.value.tolist(), strict=True):
        every[0][place], every[1][place] = reward, value
    found = reference.gae(every[0], every[1], algorithm.gamma, lam)
    return [found[place] for place in places]


def token_advantages(algorithm: Any, batch: Batch) -> list[list[float]]:
    """The definitions, response by response."""
    kind, beta = algorithm.type, algorithm.kl_coef if algorithm.kl_in == "reward" else 0.0
    kl_at = getattr(algorithm, "kl_at", "to_go")
    rows = []
    for s in reference.sequences(batch, batch.extra_T["old_logp"], batch.extra_T["old_logp"]):
        reward, number = float(s.reward[0]), float(s.advantage[0])
        if kind in ("ppo", "vc_ppo", "vapo"):
            rows.append(gae(algorithm, batch, s, reference.token_rewards(algorithm, s, reward, beta), policy_lambda(algorithm, s)))
        elif kind in ("reinforce", "reinforce_pp", "reinforce_pp_baseline"):
            last = reward if kind == "reinforce" else number
            gamma = 1.0 if kind == "reinforce_pp_baseline" else algorithm.gamma
            given = reference.token_rewards(algorithm, s, last, beta if kl_at == "to_go" else 0.0)
            to_go = reference.gae(given, [0.0] * len(s), gamma, 1.0)
            if kl_at == "token":
                to_go = [x - beta * float(kl) for x, kl in zip(to_go, s.old_logp - s.ref_logp, strict=True)]
            rows.append([x - (reward - number) for x in to_go] if kind == "reinforce" else to_go)
        else:
            rows.append([number] * len(s))
    whitened = kind.startswith("reinforce_pp") or getattr(algorithm, "whiten", False)
    return reference.whiten(rows, 0 if getattr(algorithm, "whiten_variance", "sample") == "population" else 1) if whitened else rows


@pytest.mark.parametrize("name", BY_TOKEN)
def test_advantage_of_a_token_is_the_formula(name: str) -> None:
    algorithm, batch = driven(BY_TOKEN[name], 0)
    value_T = algorithm.token_advantages(batch, same, algorithm.kl_coef)
    assert_rows(value_T, batch, token_advantages(algorithm, batch))
    in_float32 = batch.with_extra(**{key: value.float() for key, value in batch.extra_T.items()})
    float32_T = algorithm.token_advantages(in_float32, same, algorithm.kl_coef)
    assert float32_T.dtype == torch.float32
    scale = float(value_T[batch.mask_T].abs().max())
    torch.testing.assert_close(float32_T[batch.mask_T].double(), value_T[batch.mask_T], rtol=2e-4, atol=2e-4 * scale)


@pytest.mark.parametrize("name", [name for name, config in BY_TOKEN.items() if make(config).needs_critic])
def test_critic_targets_are_the_formula(name: str) -> None:
    algorithm, batch = driven(BY_TOKEN[name], 1)
    assert isinstance(algorithm, ActorCritic)
    beta, rows = algorithm.kl_coef, []
    for s in reference.sequences(batch, batch.extra_T["old_logp"], batch.extra_T["old_logp"]):
        lam = policy_lambda(algorithm, s) if name.startswith("ppo") or name == "vapo_coupled" else 1.0
        advantage = gae(algorithm, batch, s, reference.token_rewards(algorithm, s, float(s.reward[0]), beta), lam)
        rows.append([a + v for a, v in zip(advantage, s.value.tolist(), strict=True)])
    assert_rows(algorithm.returns(batch, algorithm.kl_coef), batch, rows)


@pytest.mark.parametrize("name", ["ppo_kl", "vapo"])
def test_outcomes_are_the_rewards_to_come(name: str) -> None:
    algorithm, batch = driven(BY_TOKEN[name], 1)
    rows = []
    for s in reference.sequences(batch, batch.extra_T["old_logp"], batch.extra_T["old_logp"]):
        rewards = reference.token_rewards(algorithm, s, float(s.reward[0]), algorithm.kl_coef)
        rows.append([sum(algorithm.gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))])
    assert_rows(algorithm.outcomes(batch, algorithm.kl_coef), batch, rows)


def assert_rows(value_T: Tensor, batch: Batch, rows: list[list[float]]) -> None:
    found = reference.sequences(batch.with_extra(found=value_T), value_T, value_T)
    for s, row in zip(found, rows, strict=True):
        assert s.found.tolist() == pytest.approx(row, rel=1e-9, abs=1e-9)


def test_whitening_spans_the_ranks() -> None:
    """Two ranks with half of the sequences each: the same as one rank with all."""
    algorithm, batch = driven(BY_TOKEN["reinforce_pp_kl"], 2)
    whole_T = algorithm.token_advantages(batch, same, algorithm.kl_coef)
    halves = [(batch.seq_T % 2 == rank).nonzero().squeeze(1) for rank in range(2)]

    def run(rank: int, sum_over: SumOver) -> Tensor:
        return algorithm.token_advantages(batch.take(halves[rank]), sum_over, algorithm.kl_coef)

    for half, value_T in zip(halves, together(run, ranks=2), strict=True):
        torch.testing.assert_close(value_T, whole_T[half], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "in the loss"])
def test_kl_of_a_response_is_the_sum_over_its_tokens(kind: str) -> None:
    """By the reward's estimator, or by k1 where the loss has the KL."""
    batch, _, _ = ragged(3, [1, 5, 20])
    algorithm = make({"type": "grpo", "kl_coef": 0.1} if kind == "in the loss" else {"type": "grpo", **KL, "kl_kind": kind})
    rows = reference.sequences(batch, batch.extra_T["value"], batch.extra_T["value"])
    estimates = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: torch.exp(-d) - 1 + d, "in the loss": lambda d: d}
    expected = [float(estimates[kind](s.old_logp - s.ref_logp).sum()) for s in rows]
    assert batch.sequence_sum(algorithm.old_kl(batch)).tolist() == pytest.approx([*expected, 0.0])


def test_who_subtracts_the_kl_from_the_reward() -> None:
    """The driver, once a response, where one number per response is the advantage; the ranks, at every token, elsewhere."""
    per_sequence = {kind for kind in ("grpo", "rloo", "remax", "gspo", "lite_ppo") if make({"type": kind, **KL}).kl_per_sequence}
    assert per_sequence == {"grpo", "rloo", "remax", "gspo", "lite_ppo"}
    assert make(BY_TOKEN["baseline_sequence"]).kl_per_sequence and not make(BY_TOKEN["baseline_token"]).kl_per_sequence
    assert not any(make(BY_TOKEN[name]).kl_per_sequence for name in ("reinforce_kl", "reinforce_pp_kl", "baseline_kl", "ppo_kl", "vapo_kl"))
    assert not make({"type": "rloo"}).kl_per_sequence and not make({"type": "grpo", "kl_coef": 0.1}).kl_per_sequence


def test_adaptive_kl_coefficient_by_hand() -> None:
    algorithm = make({"type": "ppo", "kl_coef": 0.1, "kl_target": 6.0, "kl_horizon": 1000})
    assert algorithm.next_kl_coef(0.1, 6.0, 100) == pytest.approx(0.1)
    assert algorithm.next_kl_coef(0.1, 6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert algorithm.next_kl_coef(0.1, 60.0, 100) == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    assert algorithm.next_kl_coef(0.1, -5.0, 100) == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))
    assert algorithm.next_kl_coef(0.1, 0.0, 10**6) == pytest.approx(0.01)  # 0 would stay 0
    assert make({"type": "ppo", "kl_coef": 0.1}).next_kl_coef(0.1, 60.0, 100) == 0.1
