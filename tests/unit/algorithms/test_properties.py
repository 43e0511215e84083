"""Laws that hold for any input, searched by hypothesis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.clip_cov import ClipCov
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.kl_cov import KlCov
from megarl.algorithms.spo import Spo
from tests.unit.algorithms.cases import ALGORITHMS, KINDS, ragged, same, weighted

laws = settings(max_examples=40, deadline=None, derandomize=True)
few = settings(max_examples=10, deadline=None, derandomize=True)

# MaxRL divides by what a prompt is worth, so a constant counts.
GROUP_BASELINES = [kind for kind, algorithm in KINDS.items() if issubclass(algorithm, GroupRelative) and kind != "max_rl"]
REWARD = st.floats(-10, 10).map(lambda reward: round(reward, 3))
BATCH = st.lists(st.tuples(REWARD, st.integers(0, 4)), min_size=1, max_size=30)


def advantages(name: str, rewards: list[float], groups: list[int]) -> Tensor:
    return ALGORITHMS[name].advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).double()


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GROUP_BASELINES)
@laws
@given(batch=BATCH, shift=st.lists(st.integers(-50, 50), min_size=5, max_size=5))
def test_group_baseline_forgets_what_a_prompt_is_worth(name: str, batch: list[tuple[float, int]], shift: list[int]) -> None:
    """A constant added to all rewards of one prompt changes no advantage (LitePPO's batch std sees it: one constant for all there)."""
    rewards, groups = [list(column) for column in zip(*batch, strict=True)]
    if name == "lite_ppo":
        shift = [shift[0]] * 5
    moved = [reward + shift[group] for reward, group in batch]
    near(advantages(name, moved, groups), advantages(name, rewards, groups))


@pytest.mark.parametrize("name", GROUP_BASELINES)
@laws
@given(batch=BATCH)
def test_advantages_of_a_group_sum_to_zero(name: str, batch: list[tuple[float, int]]) -> None:
    rewards, groups = [list(column) for column in zip(*batch, strict=True)]
    found = advantages(name, rewards, groups)
    for group in set(groups):
        members = found[torch.tensor(groups) == group]
        assert abs(float(members.sum())) <= 1e-5 * (1 + float(members.abs().sum()))
        if len({reward for reward, of in batch if of == group}) == 1:
            assert float(members.abs().max()) < 1e-6


@pytest.mark.parametrize("name", GROUP_BASELINES)
@laws
@given(batch=BATCH, scale=st.sampled_from([0.5, 3.0, 100.0]))
def test_scale_of_the_rewards(name: str, batch: list[tuple[float, int]], scale: float) -> None:
    """Divided out by a std (unless the std is of the order of its epsilon), kept by the others."""
    rewards, groups = [list(column) for column in zip(*batch, strict=True)]
    found, scaled = advantages(name, rewards, groups), advantages(name, [scale * reward for reward in rewards], groups)
    if getattr(ALGORITHMS[name], "scale", "none") == "none":
        near(scaled / scale, found)
    else:
        torch.testing.assert_close(scaled, found, rtol=5e-3, atol=1e-5)  # rewards are 1e-3 apart, epsilon is 1e-6


@pytest.mark.parametrize("name", [*GROUP_BASELINES, "reinforce"])
@laws
@given(batch=BATCH, data=st.data())
def test_order_of_the_responses_means_nothing(name: str, batch: list[tuple[float, int]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(batch))))
    rewards, groups = [list(column) for column in zip(*batch, strict=True)]
    found = advantages(name, rewards, groups)
    near(advantages(name, [rewards[n] for n in order], [groups[n] for n in order]), found[torch.tensor(order)])


@laws
@given(batch=BATCH)
def test_rloo_is_grpo_without_the_std(batch: list[tuple[float, int]]) -> None:
    """Leave-one-out is the centred reward times G / (G - 1): never large because a std is small."""
    rewards, groups = [list(column) for column in zip(*batch, strict=True)]
    size = torch.tensor([groups.count(group) for group in groups])
    near(advantages("rloo", rewards, groups), advantages("dr_grpo", rewards, groups) * size / (size - 1).clamp(min=1))


def gradient(name: str, seed: int, lengths: list[int], on_policy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient with respect to the log-probs, the weights and the advantages of the loss tokens."""
    algorithm = ALGORITHMS[name]
    batch, logp_T, entropy_T = ragged(seed, lengths)
    batch = weighted(algorithm, batch.with_extra(old_logp=logp_T, rollout_logp=logp_T) if on_policy else batch)
    x_T = logp_T.clone().requires_grad_()
    loss = algorithm.loss(x_T, entropy_T, batch, same, 0.0)
    (loss.loss_T * batch.extra_T["weight"]).sum().backward()
    assert x_T.grad is not None
    kept = batch.mask_T
    return x_T.grad[kept], batch.extra_T["weight"][kept], batch.extra_T["advantage"][kept]


POLICY_GRADIENTS = [name for name in ALGORITHMS if name != "raft" and ALGORITHMS[name].correction is None]


@pytest.mark.parametrize(
    "name", [name for name in POLICY_GRADIENTS if ALGORITHMS[name].entropy_coef == 0 and not isinstance(ALGORITHMS[name], ClipCov)]
)  # Clip-Cov masks tokens on policy, too
@few
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_on_policy_gradient_is_that_of_reinforce(name: str, seed: int, lengths: list[int]) -> None:
    """Where nothing has moved every ratio is 1 and every loss is -A lp with the algorithm's weights."""
    gradient_T, weight_T, advantage_T = gradient(name, seed, lengths, on_policy=True)
    torch.testing.assert_close(gradient_T, -advantage_T * weight_T, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "name", [name for name in POLICY_GRADIENTS if not isinstance(ALGORITHMS[name], Spo | KlCov)]
)  # they draw ratios back
@few
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_gradient_never_pushes_the_wrong_way(name: str, seed: int, lengths: list[int]) -> None:
    """Off policy, every token's log-prob is pushed up where A > 0 and down where A < 0, or left alone."""
    gradient_T, _, advantage_T = gradient(name, seed, lengths, on_policy=False)
    assert bool((gradient_T * advantage_T <= 0).all())
