"""Rewards of an episode's turns are earned where the turn ends, and add up to the episode's."""

import numpy as np
import pytest
import torch

from megarl.algorithms import Ppo
from megarl.batch import Sample, pack
from megarl.ranks.assemble import turn_rewards

MASK = np.array([1, 1, 0, 0, 1, 0, 1, 1, 1], np.bool_)


def test_each_token_is_worth_the_discounted_rewards_of_its_turn_and_the_later_ones() -> None:
    turns = ((2, 1.0), (5, -0.5), (9, 0.25))  # tokens of the response up to each turn's end
    several = Sample(np.arange(12, dtype=np.int32), 3, np.zeros(9, np.float32), "stop", loss_mask=MASK, turn_rewards=turns)
    single = Sample(np.arange(5, dtype=np.int32), 2, np.zeros(3, np.float32), "stop")
    total = 1.25  # a punishment or bonus beyond the turns' 0.75 is earned at the end
    batch = pack([several, single])
    reward_T = batch.spread(torch.tensor([total, 2.0]))
    batch = batch.with_extra(reward=reward_T, turn_reward=turn_rewards([several, single]), value=torch.zeros(len(batch)))
    earned = np.array([0, 1.0, -0.5, 0, 0, 0.25 + 0.5])  # at the loss tokens
    expected = [sum(0.9**k * earned[t + k] for k in range(len(earned) - t)) for t in range(len(earned))]
    found = Ppo(gamma=0.9).outcomes(batch, 0.0)
    assert found[:11][batch.mask_T[:11]].tolist() == pytest.approx(expected, abs=1e-6)
    assert found[11:][batch.mask_T[11:]].tolist() == pytest.approx([2 * 0.81, 2 * 0.9, 2.0])
    assert Ppo().token_rewards(batch, 0.0)[batch.seq_T == 0].sum().item() == pytest.approx(total)
