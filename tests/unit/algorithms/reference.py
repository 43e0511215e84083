"""The formulas in the docstrings of megarl/algorithms, one response at a time in float64, plain, and differentiated by autograd.

Nothing here is shared with the product's code. `Sequence` holds the loss tokens of one response in order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    return surrogate(algorithm, bounded(algorithm, s.lp - s.old_logp).exp(), s.advantage)


def bounded(algorithm: Any, d: Tensor) -> Tensor:
    return torch.clamp(d, -algorithm.ratio_bound, algorithm.ratio_bound)


def surrogate(algorithm: Any, ratio: Tensor, advantage: Tensor) -> Tensor:
    clipped = torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = torch.max(-ratio * advantage, -clipped * advantage)
    if algorithm.dual_clip is not None:
        loss = torch.where(advantage < 0, torch.min(loss, -algorithm.dual_clip * advantage), loss)
    return loss


def gspo(algorithm: Any, s: Sequence) -> Tensor:
    """Through the sequence's ratio itself; every token carries the sequence's loss."""
    return surrogate(algorithm, bounded(algorithm, (s.lp - s.old_logp).mean()).exp(), s.advantage[0]).expand(len(s))


def gspo_token(algorithm: Any, s: Sequence) -> Tensor:
    return surrogate(algorithm, (s.lp - s.old_logp).mean().exp().detach() * (s.lp - s.lp.detach()).exp(), s.advantage)


def gmpo(algorithm: Any, s: Sequence) -> Tensor:
    d = s.lp - s.old_logp
    if s.advantage[0] > 0:
        d = torch.clamp(d, max=algorithm.clip_high)
    elif s.advantage[0] < 0:
        d = torch.clamp(d, min=-algorithm.clip_low)
    return (-s.advantage[0] * bounded(algorithm, d.mean()).exp()).expand(len(s))


def cispo(algorithm: Any, s: Sequence) -> Tensor:
    ratio = bounded(algorithm, s.lp - s.old_logp).exp()
    return -torch.clamp(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high).detach() * s.advantage * s.lp


def sapo(algorithm: Any, s: Sequence) -> Tensor:
    tau = algorithm.tau_positive if s.advantage[0] > 0 else algorithm.tau_negative
    return -4 / tau * torch.sigmoid(tau * (bounded(algorithm, s.lp - s.old_logp).exp() - 1)) * s.advantage


def reinforce(algorithm: Any, s: Sequence) -> Tensor:
    return -bounded(algorithm, s.lp - s.old_logp).exp().detach() * s.advantage * s.lp


def masked_ppo(algorithm: Any, s: Sequence) -> Tensor:
    """`ppo`, without the sequences that have become much less likely than the rollout policy found them."""
    apart = float((s.rollout_logp - s.lp.detach()).mean())
    if algorithm.off_policy_delta is not None and s.advantage[0] < 0 and apart > algorithm.off_policy_delta:
        return 0 * s.lp
    return ppo(algorithm, s)


def dppo(algorithm: Any, s: Sequence) -> Tensor:
    rows = []
    for lp, roll, advantage in zip(s.lp, s.rollout_logp, s.advantage, strict=True):
        pi, mu = (math.exp(min(0.0, float(p.detach()))) for p in (lp, roll))
        rest = 0.0 if mu == 1 else (1 - mu) * (math.log((1 - mu) / (1 - pi)) if pi < 1 else math.inf)
        kl = mu * math.log(mu / pi) + rest
        far = {"tv": abs(pi - mu), "kl": kl}[algorithm.divergence]
        leaves = (advantage > 0 and pi > mu and far > algorithm.delta_high) or (advantage < 0 and pi < mu and far > algorithm.delta_low)
        ratio = bounded(algorithm, lp - roll).exp()
        if algorithm.ratio_cap is not None and ratio > algorithm.ratio_cap:
            ratio = algorithm.ratio_cap * (lp - lp.detach()).exp()
        rows.append(0 * lp if leaves else -ratio * advantage)
    return torch.stack(rows)


def vespo(algorithm: Any, s: Sequence) -> Tensor:
    w = bounded(algorithm, (s.lp - s.rollout_logp).sum()).exp().detach()
    k, decay = (getattr(algorithm, f"{name}_{'negative' if s.advantage[0] < 0 else 'positive'}") for name in ("k", "lambda"))
    return -(w**k) * torch.exp(decay * (1 - w)) * s.advantage * s.lp


def topr(algorithm: Any, s: Sequence) -> Tensor:
    w = bounded(algorithm, (s.lp - s.rollout_logp).sum()).exp().clamp(0, 1).detach() if s.advantage[0] < 0 else 1.0
    return -w * s.advantage * s.lp


def spo(algorithm: Any, s: Sequence) -> Tensor:
    ratio = bounded(algorithm, s.lp - s.old_logp).exp()
    return s.advantage.abs() * (ratio - 1) ** 2 / (2 * algorithm.eps) - ratio * s.advantage


def clip_cov(algorithm: Any, s: Sequence) -> Tensor:
    return torch.where(s.chosen, 0.0, ppo(algorithm, s))


def kl_cov(algorithm: Any, s: Sequence) -> Tensor:
    d = bounded(algorithm, s.lp - s.old_logp)
    return -d.exp() * s.advantage + torch.where(s.chosen, algorithm.cov_kl_coef * d.abs(), 0.0)


def m2po(algorithm: Any, s: Sequence) -> Tensor:
    return torch.where(s.chosen, 0.0, -bounded(algorithm, s.lp - s.old_logp).exp() * s.advantage)


def rloo(algorithm: Any, s: Sequence) -> Tensor:
    if algorithm.ratio == "token":
        return reinforce(algorithm, s)
    ratio, advantage = bounded(algorithm, (s.lp - s.old_logp).sum()).exp(), s.advantage[0]
    loss = -torch.min(ratio * advantage, ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantage)
    return loss.expand(len(s)) / len(s)


def nll(algorithm: Any, s: Sequence) -> Tensor:
    return -s.lp if algorithm.weight == "one" else -s.advantage * s.lp


def sum_ratio(algorithm: Any, s: Sequence) -> Tensor:
    """Of `cases.SumRatio`, through the response's ratio itself."""
    return -(bounded(algorithm, (s.lp - s.old_logp).sum()).exp() * s.advantage / len(s))


# Of every algorithm, by its `type`: the loss of each token of a response, and the mean that the paper takes of them.
POLICY: dict[str, tuple[Callable[[Any, Sequence], Tensor], str]] = {
    "ppo": (ppo, "seq-mean-token-mean"),
    "vc_ppo": (ppo, "seq-mean-token-mean"),
    "vapo": (ppo, "token-mean"),
    "grpo": (ppo, "seq-mean-token-mean"),
    "dapo": (masked_ppo, "token-mean"),
    "gdpo": (ppo, "seq-mean-token-mean"),
    "deepseek_v32": (masked_ppo, "seq-mean-token-mean"),
    "max_rl": (reinforce, "seq-mean-token-sum"),
    "pass_at_k": (ppo, "seq-mean-token-mean"),
    "dppo": (dppo, "token-mean"),
    "luspo": (gspo, "seq-mean-token-sum"),
    "vespo": (vespo, "seq-mean-token-sum"),
    "topr": (topr, "seq-mean-token-sum"),
    "spo": (spo, "seq-mean-token-mean"),
    "clip_cov": (clip_cov, "token-mean"),
    "kl_cov": (kl_cov, "token-mean"),
    "m2po": (m2po, "token-mean"),
    "w_reinforce": (reinforce, "seq-mean-token-sum"),
    "opo": (reinforce, "seq-mean-token-sum"),
    "dr_grpo": (ppo, "seq-mean-token-sum-norm"),
    "lite_ppo": (ppo, "token-mean"),
    "reinforce_pp": (ppo, "token-mean"),
    "reinforce_pp_baseline": (ppo, "token-mean"),
    "rloo": (rloo, "seq-mean-token-sum"),
    "reinforce": (reinforce, "seq-mean-token-sum"),
    "remax": (reinforce, "seq-mean-token-sum"),
    "gspo": (gspo, "seq-mean-token-mean"),
    "gspo_token": (gspo_token, "seq-mean-token-mean"),
    "gmpo": (gmpo, "seq-mean-token-mean"),
    "cispo": (cispo, "token-mean"),
    "sapo": (sapo, "seq-mean-token-mean"),
    "raft": (nll, "token-mean"),
    "sum_ratio": (sum_ratio, "seq-mean-token-sum"),
}


def aggregate(algorithm: Any, losses: list[Tensor], responses: int) -> Tensor:
    """The four means, each as it is defined; by default the paper's. `responses`: of the batch, those without a loss token too."""
    mean = algorithm.aggregation if "aggregation" in algorithm.model_fields_set else POLICY[algorithm.type][1]
    if mean == "token-mean":
        return torch.cat(losses).mean()
    count = {"trained": len(losses), "all": responses, "one": 1, None: responses if mean == "seq-mean-token-sum-norm" else len(losses)}
    share = (
        torch.stack([loss.mean() if mean == "seq-mean-token-mean" else loss.sum() for loss in losses]).sum()
        / count[algorithm.sequence_count]
    )
    return share / algorithm.horizon if mean == "seq-mean-token-sum-norm" else share


def corrections(settings: Any, responses: list[Sequence]) -> list[Tensor]:
    """The weight of each token of every response."""
    gaps = [[float(old - roll) for old, roll in zip(s.old_logp, s.rollout_logp, strict=True)] for s in responses]
    if settings is None:
        return [torch.ones(len(s), dtype=torch.float64) for s in responses]
    weights = [before_rejection(settings, gap) for gap in gaps]
    if getattr(settings, "normalise", False):
        spoken = [w for row in weights for w in (row if settings.level == "token" else row[:1])]
        weights = [[w * len(spoken) / math.fsum(spoken) for w in row] for row in weights]
    rows = []
    for gap, row in zip(gaps, weights, strict=True):
        for rule in settings.reject:
            row = [w * kept for w, kept in zip(row, survivors(rule, gap), strict=True)]
        if settings.veto is not None and any(math.exp(g) < settings.veto for g in gap):
            row = [0.0] * len(row)
        rows.append(torch.tensor(row, dtype=torch.float64))
    return rows


def before_rejection(settings: Any, gap: list[float]) -> list[float]:
    if settings.type == "rejection":
        return [1.0] * len(gap)
    whole = {"token": None, "sequence": math.fsum(gap), "geometric": math.fsum(gap) / len(gap)}[settings.level]
    ratios = [math.exp(max(-20.0, min(20.0, g if whole is None else whole))) for g in gap]
    if settings.type == "tis":
        return [min(max(ratio, settings.floor), settings.cap) for ratio in ratios]
    return [ratio if settings.lo <= ratio <= settings.hi else 0.0 for ratio in ratios]


def survivors(rule: Any, gap: list[float]) -> list[bool]:
    """Which tokens of a response a rejection keeps."""

    def inside(value: float) -> bool:
        value = math.exp(min(value, 700)) if rule.by == "k1" else value
        return (rule.lo is None or value >= rule.lo) and (rule.hi is None or value <= rule.hi)

    values = [{"k1": g, "k2": g * g / 2, "k3": math.exp(g) - 1 - g}[rule.by] for g in gap]
    if rule.over == "token":
        return [inside(value) for value in values]
    whole = {"sum": math.fsum(values), "mean": math.fsum(values) / len(values)}
    return [inside(whole[rule.over]) if rule.over in whole else all(map(inside, values))] * len(gap)


def kl(algorithm: Any, s: Sequence) -> Tensor:
    d = s.lp - s.ref_logp
    kinds = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}
    chosen, through = kinds[algorithm.kl_kind], kinds["k2"]
    inside = chosen.abs() <= algorithm.kl_clamp
    if algorithm.kl_straight_through:
        chosen = chosen.detach() + through - through.detach()
    chosen = torch.where(inside, chosen, torch.clamp(chosen.detach(), -algorithm.kl_clamp, algorithm.kl_clamp))
    return chosen * bounded(algorithm, s.lp - s.old_logp).exp() if algorithm.kl_importance_weighted else chosen


def total(algorithm: PolicyAlgorithm, batch: Batch, logp_T: Tensor, entropy_T: Tensor) -> Tensor:
    """The whole loss of a global batch, a scalar."""
    settings: Any = algorithm
    losses, responses = [], sequences(batch, logp_T, entropy_T)
    for s, weight in zip(responses, corrections(settings.correction, responses), strict=True):
        loss = weight * POLICY[settings.type][0](settings, s)
        if settings.kl_coef > 0 and settings.kl_in == "loss":
            loss = loss + settings.kl_coef * kl(settings, s)
        loss = loss - settings.entropy_coef * s.entropy
        dropped_leave = settings.correction is not None and settings.correction.denominator == "kept"
        losses.append(loss[weight > 0] if dropped_leave else loss)
    value = aggregate(settings, [loss for loss in losses if len(loss)], len(batch.length_N))
    correct = [s for s in responses if s.reward[0] > 0]
    if settings.type == "vapo" and correct:
        value = value - settings.mu * torch.cat([s.lp for s in correct]).mean()
    return value


def dpo(loss: Any, chosen: Sequence, rejected: Sequence) -> Tensor:
    shifts = [s.lp - s.ref_logp for s in (chosen, rejected)]
    gains = [shift.mean() if loss.average else shift.sum() for shift in shifts]
    z = loss.beta * (gains[0] - gains[1])
    return -(1 - loss.label_smoothing) * F.logsigmoid(z) - loss.label_smoothing * F.logsigmoid(-z)


def simpo(loss: Any, chosen: Sequence, rejected: Sequence) -> Tensor:
    return -F.logsigmoid(loss.beta * (chosen.lp.mean() - rejected.lp.mean()) - loss.gamma)


# Of every preference loss, by its `type`: the loss of a pair.
PAIRS: dict[str, Callable[[Any, Sequence, Sequence], Tensor]] = {"dpo": dpo, "simpo": simpo}


def pairs_total(loss: Any, batch: Batch, logp_T: Tensor) -> Tensor:
    """The whole loss of a global batch of pairs, a scalar."""
    responses = sequences(batch, logp_T, logp_T)
    return torch.stack([PAIRS[loss.type](loss, *responses[k : k + 2]) for k in range(0, len(responses), 2)]).mean()


def gae(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, backwards over the tokens of one response."""
    advantage, following, out = 0.0, 0.0, []
    for r, v in zip(reversed(reward), reversed(value), strict=True):
        advantage = r + gamma * following - v + gamma * lam * advantage
        following = v
        out.append(advantage)
    return out[::-1]


def token_rewards(algorithm: Any, s: Sequence, last: float, beta: float) -> list[float]:
    """-beta KL at every token, and `last` more at the last one."""

    def estimated(d: float) -> float:
        value = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[algorithm.kl_kind]
        return value if algorithm.kl_kind == "k1" else min(value, algorithm.kl_clamp)

    rewards = [-beta * estimated(float(old - ref)) if beta else 0.0 for old, ref in zip(s.old_logp, s.ref_logp, strict=True)]
    rewards[-1] += last
    return rewards


def whiten(values: list[list[float]], less: int = 1) -> list[list[float]]:
    """With the variance over n - `less`."""
    flat = [x for row in values for x in row]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / (len(flat) - less) + 1e-8)
    return [[(x - mean) / std for x in row] for row in values]
