"""The formulas of ALGORITHMS.md sequence by sequence in float64, written for plainness and differentiated by autograd.

Nothing here is shared with the product's code. `Sequence` holds the loss tokens of one response in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms import PolicyAlgorithm
from megarl.batch import Batch


@dataclass(frozen=True)
class Sequence:
    """The loss tokens of one response, in order of position."""

    entry: Tensor  # their entries in the batch
    lp: Tensor
    entropy: Tensor
    extra: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        return self.extra[name]

    def __len__(self) -> int:
        return len(self.entry)


def sequences(batch: Batch, logp_T: Tensor, entropy_T: Tensor) -> list[Sequence]:
    """Every response that has loss tokens."""
    found = []
    for n in range(len(batch.length_N)):
        entry = (batch.mask_T & (batch.seq_T == n)).nonzero().squeeze(1)
        entry = entry[batch.position_T[entry].argsort()]
        if len(entry):
            found.append(Sequence(entry, logp_T[entry], entropy_T[entry], {name: value[entry] for name, value in batch.extra_T.items()}))
    return found


def ppo(algorithm: Any, s: Sequence) -> Tensor:
    ratio = (s.lp - s.old_logp).exp()
    clipped = torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = torch.max(-ratio * s.advantage, -clipped * s.advantage)
    if algorithm.dual_clip is not None:
        loss = torch.where(s.advantage < 0, torch.min(loss, -algorithm.dual_clip * s.advantage), loss)
    return loss


def gspo(algorithm: Any, s: Sequence) -> Tensor:
    """Through the sequence's ratio itself; every token carries the sequence's loss."""
    ratio = (s.lp - s.old_logp).mean().exp()
    clipped = torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return torch.max(-ratio * s.advantage[0], -clipped * s.advantage[0]).expand(len(s))


def gspo_token(algorithm: Any, s: Sequence) -> Tensor:
    ratio = (s.lp - s.old_logp).mean().exp().detach() * (s.lp - s.lp.detach()).exp()
    clipped = torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return torch.max(-ratio * s.advantage, -clipped * s.advantage)


def gmpo(algorithm: Any, s: Sequence) -> Tensor:
    d = s.lp - s.old_logp
    if s.advantage[0] > 0:
        d = torch.clamp(d, max=algorithm.clip_high)
    elif s.advantage[0] < 0:
        d = torch.clamp(d, min=-algorithm.clip_low)
    return (-s.advantage[0] * d.mean().exp()).expand(len(s))


def cispo(algorithm: Any, s: Sequence) -> Tensor:
    ratio = (s.lp - s.old_logp).exp()
    return -torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high).detach() * s.advantage * s.lp


def reinforce(algorithm: Any, s: Sequence) -> Tensor:
    return -(s.lp - s.old_logp).exp().detach() * s.advantage * s.lp


def nll(algorithm: Any, s: Sequence) -> Tensor:
    return -s.lp


POLICY: dict[str, Callable[[Any, Sequence], Tensor]] = {
    **dict.fromkeys(["ppo", "vc_ppo", "vapo", "grpo", "dapo", "dr_grpo", "lite_ppo", "reinforce_pp", "reinforce_pp_baseline"], ppo),
    **dict.fromkeys(["rloo", "reinforce", "remax"], reinforce),
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "raft": nll,
}
MEANS = {
    "token-mean": ["vapo", "dapo", "cispo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "raft"],
    "seq-mean-token-mean": ["ppo", "vc_ppo", "grpo", "gspo", "gspo_token", "gmpo"],
    "seq-mean-token-sum": ["rloo", "reinforce", "remax"],
    "seq-mean-token-sum-norm": ["dr_grpo"],
}


def aggregate(algorithm: Any, losses: list[Tensor]) -> Tensor:
    """The four means, each as it is defined."""
    [mean] = [mean for mean, types in MEANS.items() if algorithm.type in types]
    if algorithm.type == "vapo":
        mean = algorithm.aggregation  # a setting
    if mean == "token-mean":
        return torch.cat(losses).mean()
    if mean == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in losses]).mean()
    total = torch.stack([loss.sum() for loss in losses]).mean()
    return total if mean == "seq-mean-token-sum" else total / algorithm.horizon


def correction(settings: Any, s: Sequence) -> Tensor:
    """The weight of each token of one response."""
    if settings is None:
        return torch.ones(len(s), dtype=torch.float64)
    gaps = [float(old - roll) for old, roll in zip(s.old_logp, s.rollout_logp, strict=True)]
    weights = []
    for gap in gaps:
        ratio = math.exp(sum(gaps) if settings.level == "sequence" else gap)
        if settings.type == "tis":
            weights.append(min(ratio, settings.cap))
        else:
            weights.append(ratio if settings.lo <= ratio <= settings.hi else 0.0)
    if settings.veto is not None and any(math.exp(gap) < settings.veto for gap in gaps):
        weights = [0.0] * len(gaps)
    return torch.tensor(weights, dtype=torch.float64)


def kl(algorithm: Any, s: Sequence) -> Tensor:
    d = s.lp - s.ref_logp
    kinds = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}
    chosen = kinds[algorithm.kl_kind]
    return chosen.detach() + kinds["k2"] - kinds["k2"].detach() if algorithm.kl_straight_through else chosen


def total(algorithm: PolicyAlgorithm, batch: Batch, logp_T: Tensor, entropy_T: Tensor) -> Tensor:
    """The whole loss of a global batch, a scalar."""
    settings: Any = algorithm
    losses, responses = [], sequences(batch, logp_T, entropy_T)
    for s in responses:
        loss = correction(settings.correction, s) * POLICY[settings.type](settings, s)
        if settings.kl_coef > 0 and settings.kl_in == "loss":
            loss = loss + settings.kl_coef * kl(settings, s)
        losses.append(loss - settings.entropy_coef * s.entropy)
    value = aggregate(settings, losses)
    correct = [s for s in responses if s.reward[0] > 0]
    if settings.type == "vapo" and correct:
        value = value - settings.mu * torch.cat([s.lp for s in correct]).mean()
    return value


def gae(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, backwards over the tokens of one response."""
    advantage, following, out = 0.0, 0.0, []
    for r, v in zip(reversed(reward), reversed(value), strict=True):
        advantage = r + gamma * following - v + gamma * lam * advantage
        following = v
        out.append(advantage)
    return out[::-1]


def token_rewards(s: Sequence, last: float, beta: float) -> list[float]:
    """-beta k1 at every token, and `last` more at the last one."""
    rewards = [-beta * float(old - ref) if beta else 0.0 for old, ref in zip(s.old_logp, s.ref_logp, strict=True)]
    rewards[-1] += last
    return rewards


def whiten(values: list[list[float]]) -> list[list[float]]:
    flat = [x for row in values for x in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
    return [[(x - mean) / std for x in row] for row in values]
