"""`algorithm.as`: each system's loss and advantages as its source defines them, on padded rows in float64; the page's table; refusals.

Nothing here is shared with the product's code, and no code of these systems is used. `tools/compare_trl.py` runs TRL's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from megarl.algorithms import ActorCritic, peers
from megarl.batch import Batch, Sample, pack
from megarl.config import ConfigError, TrainConfig, dump, load
from tests.e2e.job import RL
from tests.unit.algorithms.cases import make, same, weighted

GROUP, HORIZON = 4, 64
PAGE = Path(peers.__file__).with_name("as_another_system.md")
CASES = [(peer, kind) for peer, kinds in peers.SETTINGS.items() for kind in kinds]


@dataclass(frozen=True)
class Rows:
    """A step as these systems hold it: a row per response, padded, with holes; the last row is masked whole."""

    lp: Tensor
    old: Tensor
    ref: Tensor
    roll: Tensor
    value: Tensor
    mask: Tensor  # float
    reward: Tensor
    parts: Tensor

    @property
    def count(self) -> Tensor:
        return self.mask.sum(1).clamp(min=1)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over each row's tokens."""
        return (x * self.mask).sum(1) / self.count


def rows() -> Rows:
    generator = torch.Generator().manual_seed(7)

    def drawn(scale: float, around: Tensor | float = 0.0) -> Tensor:
        return around + scale * torch.randn(12, 20, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([1, 20, 7, 3, 12, 20, 5, 9, 2, 16, 11, 8])
    place = torch.arange(20)
    mask = (place < lengths[:, None]) & ~((place % 5 == 3) & (place < lengths[:, None] - 1))
    mask[-1] = False
    lp = -3 * torch.rand(12, 20, generator=generator, dtype=torch.float64) - 0.01
    old = drawn(0.3, lp).clamp(max=-0.01)
    reward = torch.tensor([1.0, 0, 0, 1, 0.5, 0.25, -1, 2, 0, 1, 0, 0], dtype=torch.float64)
    parts = torch.stack([reward, torch.rand(12, generator=generator, dtype=torch.float64)], 1)
    return Rows(lp, old, drawn(0.3, lp), drawn(0.1, old).clamp(max=-0.01), drawn(0.5), mask.double(), reward, parts)


def as_batch(r: Rows) -> Batch:
    """The same step as a bag of tokens, a response's padding left out."""
    samples, ends = [], [int(place.max()) + 1 if len(place := row.nonzero()) else 1 for row in r.mask]
    for row, end in zip(r.mask, ends, strict=True):
        mask = row[:end].numpy() > 0
        samples.append(Sample(np.arange(2 + end, dtype=np.int32), 2, np.zeros(end, np.float32), "stop", loss_mask=mask))
    batch = pack(samples)
    row_T, column_T = batch.seq_T, batch.position_T - 1

    def spread(x: Tensor) -> Tensor:
        return torch.where(column_T >= 0, x[row_T, column_T.clamp(min=0)], torch.nan)

    return batch.with_extra(
        old_logp=spread(r.old), ref_logp=spread(r.ref), rollout_logp=spread(r.roll), value=spread(r.value), lp=spread(r.lp)
    )


def padded(x_T: Tensor, batch: Batch) -> Tensor:
    out = torch.zeros(12, 20, dtype=torch.float64)
    keep = batch.mask_T
    return out.index_put((batch.seq_T[keep], batch.position_T[keep] - 1), x_T[keep])


# Advantages of responses, per system.


def grouped(x: Tensor) -> Tensor:
    return x.view(-1, GROUP)


def over_std(eps: float) -> Callable[[Rows], Tensor]:
    return lambda r: ((grouped(r.reward) - grouped(r.reward).mean(1, True)) / (grouped(r.reward).std(1, keepdim=True) + eps)).flatten()


def centred(r: Rows) -> Tensor:
    return (grouped(r.reward) - grouped(r.reward).mean(1, True)).flatten()


def leave_one_out(r: Rows) -> Tensor:
    return (grouped(r.reward) - (grouped(r.reward).sum(1, True) - grouped(r.reward)) / (GROUP - 1)).flatten()


def nemo(r: Rows) -> Tensor:
    """Less the mean of the others, over their deviation where it is not 0."""
    out = []
    for n, reward in enumerate(r.reward.tolist()):
        others = [r.reward[m].item() for m in range(n - n % GROUP, n - n % GROUP + GROUP) if m != n]
        mean = sum(others) / len(others)
        std = math.sqrt(sum((x - mean) ** 2 for x in others) / (len(others) - 1))
        out.append((reward - mean) / (std + 1e-6) if std > 0 else reward - mean)
    return torch.tensor(out, dtype=torch.float64)


def trl_gdpo(r: Rows) -> Tensor:
    parts = r.parts.view(-1, GROUP, 2)
    total = ((parts - parts.mean(1, True)) / (parts.std(1, keepdim=True) + 1e-4)).view(-1, 2) @ torch.tensor([1.0, 0.5]).double()
    return (total - total.mean()) / (total.std() + 1e-4)


# Advantages of tokens.


def everywhere(of: Callable[[Rows], Tensor]) -> Callable[[Rows], Tensor]:
    return lambda r: of(r)[:, None].expand(r.mask.shape)


def whiten(x: Tensor, r: Rows, less: int) -> Tensor:
    count = r.mask.sum()
    mean = (x * r.mask).sum() / count
    return (x - mean) / (((x - mean).square() * r.mask).sum() / (count - less) + 1e-8).sqrt()


def whitened(of: Callable[[Rows], Tensor], less: int) -> Callable[[Rows], Tensor]:
    return lambda r: whiten(of(r)[:, None].expand(r.mask.shape), r, less)


def raw(r: Rows) -> Tensor:
    return r.reward


def gae(r: Rows, holes: str, lam: float = 1.0) -> Tensor:
    """gamma 1. Masked tokens are passed over, or are steps of value 0."""
    out = torch.zeros_like(r.value)
    for n, row in enumerate(r.mask.tolist()):
        last = max((t for t, kept in enumerate(row) if kept), default=-1)
        following, advantage = 0.0, 0.0
        for t in reversed(range(last + 1)):
            if not row[t] and holes == "skip":
                continue
            value = float(r.value[n, t]) if row[t] else 0.0
            advantage = (float(r.reward[n]) if t == last else 0.0) + following - value + lam * advantage
            following, out[n, t] = value, advantage
    return out


# Losses of tokens, and the means over them.

Loss = Callable[[Rows, Tensor], Tensor]


def ppo(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Loss:
    def loss(r: Rows, a: Tensor) -> Tensor:
        ratio = (r.lp - r.old).exp()
        found = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
        return found if dual is None else torch.where(a < 0, torch.minimum(found, -dual * a), found)

    return loss


def gspo(r: Rows, a: Tensor) -> Tensor:
    d = r.lp - r.old
    ratio = (r.mean(d).detach()[:, None] + d - d.detach()).exp()
    return torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))


def gmpo(r: Rows, a: Tensor) -> Tensor:
    d = r.lp - r.old
    sign = a.sign()
    least = sign * torch.minimum(sign * d, sign * d.clamp(-0.2, 0.2))
    return (-a[:, 0] * r.mean(least).exp())[:, None].expand(r.mask.shape)


def cispo(low: float, high: float) -> Loss:
    return lambda r, a: -(r.lp - r.old).exp().clamp(low, high).detach() * a * r.lp


def sapo(r: Rows, a: Tensor) -> Tensor:
    tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1.0)
    return -torch.sigmoid(tau * ((r.lp - r.old).exp() - 1)) * 4 / tau * a


def dppo(r: Rows, a: Tensor) -> Tensor:
    far = r.lp.exp() - r.roll.exp()
    valid = torch.where(a > 0, far <= 0.2, far >= -0.2)
    return -a * (r.lp - r.roll).exp().clamp(max=3.0).detach() * r.lp * valid


def trl_rloo(r: Rows, a: Tensor) -> Tensor:
    ratio = ((r.lp - r.old) * r.mask).sum(1).exp()
    return -torch.minimum(ratio * a[:, 0], ratio.clamp(0.8, 1.2) * a[:, 0])[:, None] / r.count[:, None]


def off_policy_masked(r: Rows, a: Tensor) -> Tensor:
    keep = (a >= 0) | (r.mean((r.roll - r.lp).detach())[:, None] <= 0.5)
    return ppo()(r, a) * keep


def sequence_masked(of: Loss) -> Loss:
    """Times the response's ratio of the trainer's to the engine's probability, 0 above 3."""

    def loss(r: Rows, a: Tensor) -> Tensor:
        weight = ((r.old - r.roll) * r.mask).sum(1).exp()
        return of(r, a) * torch.where(weight > 3, 0.0, weight)[:, None]

    return loss


def tokens(x: Tensor, r: Rows) -> Tensor:
    return (x * r.mask).sum() / r.mask.sum()


def every_row(x: Tensor, r: Rows) -> Tensor:
    return r.mean(x).mean()


def full_rows(x: Tensor, r: Rows) -> Tensor:
    return r.mean(x)[r.mask.sum(1) > 0].mean()


def constant(x: Tensor, r: Rows) -> Tensor:
    return (x * r.mask).sum() / (len(x) * HORIZON)


def row_sums(x: Tensor, r: Rows) -> Tensor:
    return (x * r.mask).sum(1).mean()


Definition = tuple[Callable[[Rows], Tensor], Loss, Callable[[Tensor, Rows], Tensor]]
group, verl = everywhere(over_std(1e-6)), ppo(dual=3.0)
trl, trl_group = {name: sequence_masked(of) for name, of in {"ppo": ppo(), "gspo": gspo, "sapo": sapo}.items()}, everywhere(over_std(1e-4))
DEFINITIONS: dict[tuple[str, str], Definition] = {
    ("verl", "ppo"): (lambda r: whiten(gae(r, "skip"), r, 1), verl, tokens),
    ("verl", "grpo"): (group, verl, tokens),
    ("verl", "dapo"): (group, verl, tokens),
    ("verl", "dr_grpo"): (everywhere(centred), verl, constant),
    ("verl", "gspo"): (group, gspo, every_row),
    ("verl", "gmpo"): (group, gmpo, every_row),
    ("verl", "cispo"): (group, cispo(0.8, 1.2), tokens),
    ("verl", "sapo"): (group, sapo, every_row),
    ("verl", "dppo"): (group, dppo, tokens),
    ("verl", "reinforce_pp"): (whitened(raw, 1), verl, tokens),
    ("verl", "reinforce_pp_baseline"): (whitened(centred, 1), verl, tokens),
    ("trl", "grpo"): (trl_group, trl["ppo"], every_row),
    ("trl", "dapo"): (trl_group, trl["ppo"], tokens),
    ("trl", "dr_grpo"): (trl_group, trl["ppo"], constant),
    ("trl", "gspo"): (trl_group, trl["gspo"], every_row),
    ("trl", "cispo"): (trl_group, sequence_masked(cispo(0.0, 5.0)), tokens),
    ("trl", "sapo"): (trl_group, trl["sapo"], every_row),
    ("trl", "luspo"): (trl_group, trl["gspo"], row_sums),
    ("trl", "gdpo"): (everywhere(trl_gdpo), trl["ppo"], tokens),
    ("trl", "deepseek_v32"): (trl_group, sequence_masked(off_policy_masked), every_row),
    ("trl", "rloo"): (everywhere(leave_one_out), trl_rloo, row_sums),
    ("slime", "ppo"): (lambda r: gae(r, "skip"), ppo(), every_row),
    ("slime", "grpo"): (group, ppo(), every_row),
    ("slime", "gspo"): (group, gspo, every_row),
    ("slime", "cispo"): (group, cispo(0.8, 1.2), every_row),
    ("slime", "reinforce_pp"): (whitened(raw, 1), ppo(), every_row),
    ("slime", "reinforce_pp_baseline"): (whitened(centred, 1), ppo(), every_row),
    ("openrlhf", "ppo"): (lambda r: whiten(gae(r, "zero"), r, 0), ppo(), tokens),
    ("openrlhf", "grpo"): (everywhere(over_std(1e-9)), ppo(), tokens),
    ("openrlhf", "dr_grpo"): (everywhere(centred), ppo(), tokens),
    ("openrlhf", "reinforce_pp"): (whitened(raw, 0), ppo(), tokens),
    ("openrlhf", "reinforce_pp_baseline"): (whitened(centred, 0), ppo(), tokens),
    ("nemo_rl", "grpo"): (everywhere(nemo), ppo(), tokens),
    ("nemo_rl", "gspo"): (everywhere(nemo), gspo, full_rows),
    ("nemo_rl", "cispo"): (everywhere(nemo), cispo(0.8, 1.2), tokens),
    ("nemo_rl", "reinforce_pp"): (whitened(raw, 0), ppo(), tokens),
    ("nemo_rl", "reinforce_pp_baseline"): (whitened(centred, 0), ppo(), tokens),
}


def settings(peer: str, kind: str, **own: Any) -> Any:
    """The algorithm of `algorithm: {type: KIND, as: PEER}`."""
    horizon = {"horizon": HORIZON} if (kind, peer) in (("dr_grpo", "verl"), ("dr_grpo", "trl")) else {}
    return make(peers.expand({"algorithm": {"type": kind, "as": peer, **horizon, **own}})["algorithm"])


def advantages(algorithm: Any, r: Rows, batch: Batch, kl_N: Tensor | None = None) -> Tensor:
    """What the driver and the ranks make of the rewards."""
    group_N = torch.arange(12) // GROUP
    reward_N = r.reward if kl_N is None else r.reward - algorithm.kl_coef * kl_N
    if algorithm.needs_parts:
        found_N = algorithm.part_advantages(r.parts, torch.tensor([1.0, 0.5]), group_N)
    else:
        found_N = algorithm.advantages(reward_N, group_N)
    given = batch.with_extra(advantage=batch.spread(found_N.double()), reward=batch.spread(r.reward))
    return algorithm.token_advantages(given, same, algorithm.kl_coef)


@pytest.mark.parametrize(("peer", "kind"), CASES)
def test_settings_compute_what_the_system_defines(peer: str, kind: str) -> None:
    """Its advantages, and its loss with the gradient by every log-prob."""
    algorithm, r = settings(peer, kind), rows()
    batch = as_batch(r)
    advantage, loss, mean = DEFINITIONS[peer, kind]
    expected, found_T = advantage(r) * r.mask, advantages(algorithm, r, batch)
    torch.testing.assert_close(padded(found_T, batch), expected, rtol=2e-6, atol=2e-6)  # the driver's numbers are float32
    # The loss, from exactly these advantages.
    batch = batch.with_extra(advantage=found_T, reward=batch.spread(r.reward))
    batch = weighted(algorithm, batch)
    x_T, x = batch.extra_T["lp"].clone().requires_grad_(), r.lp.clone().requires_grad_()
    mine = (algorithm.loss(x_T, torch.zeros_like(x_T), batch, same, 0.0).loss_T * batch.extra_T["weight"]).sum()
    theirs = mean(loss(Rows(**{**vars(r), "lp": x}), padded(found_T, batch)), r)
    mine.backward()
    theirs.backward()
    if kind != "dppo":  # whose value differs: -min(r, cap) A lp there, -r A here
        assert float(mine.detach()) == pytest.approx(float(theirs.detach()), rel=1e-9)
    assert x_T.grad is not None and x.grad is not None and float(x.grad.abs().max()) > 1e-3
    torch.testing.assert_close(padded(x_T.grad, batch), x.grad, rtol=1e-8, atol=1e-12)


def test_where_the_kl_of_the_reward_is() -> None:
    """verl's baseline form has it in the group's mean, slime's and NeMo-RL's at its own token, OpenRLHF's at all tokens up to it."""
    r, beta = rows(), 0.2
    batch, kl = as_batch(r), (r.old - r.ref) * r.mask
    whole = r.reward - beta * kl.sum(1)
    to_go = kl.flip(1).cumsum(1).flip(1)
    definitions = {
        ("verl", 1): (grouped(whole) - grouped(whole).mean(1, True)).flatten()[:, None].expand(kl.shape),
        ("slime", 1): centred(r)[:, None] - beta * kl,
        ("nemo_rl", 0): centred(r)[:, None] - beta * kl,
        ("openrlhf", 0): centred(r)[:, None] - beta * to_go,
    }
    for (peer, less), expected in definitions.items():
        algorithm = settings(peer, "reinforce_pp_baseline", kl_in="reward", kl_coef=beta)
        found_T = advantages(algorithm, r, batch, kl.sum(1) if algorithm.kl_per_sequence else None)
        torch.testing.assert_close(padded(found_T, batch), whiten(expected, r, less) * r.mask, rtol=2e-6, atol=2e-6)


def test_the_critic_of_slime_and_openrlhf() -> None:
    """slime's loss has no 1/2; OpenRLHF's targets count the tokens between its own as steps of value 0."""
    tree = peers.expand({"algorithm": {"type": "ppo", "as": "slime"}, "critic": {"loss_coef": 0.7}})
    assert tree["critic"] == {"aggregation": "seq-mean-token-mean", "loss_coef": 0.7}
    r = rows()
    batch, algorithm = as_batch(r), settings("openrlhf", "ppo")
    assert isinstance(algorithm, ActorCritic)
    given = batch.with_extra(advantage=batch.spread(r.reward), reward=batch.spread(r.reward))
    torch.testing.assert_close(padded(algorithm.returns(given, 0.0), batch), (gae(r, "zero") + r.value) * r.mask)


def test_every_combination_is_defined_here() -> None:
    assert set(CASES) == DEFINITIONS.keys()


def table() -> str:
    """The page's table."""
    lines = ["| `as` | `type` | settings below yours |", "|---|---|---|"]
    for peer, kinds in peers.SETTINGS.items():
        for kind, values in kinds.items():
            more = [
                ("", values),
                ("with `kl_in: reward`: ", peers.IN_REWARD.get(peer, {}).get(kind, {})),
                ("`critic`: ", peers.CRITIC.get(peer, {}).get(kind, {})),
            ]
            cells = [
                f"{said}`{yaml.safe_dump(dict(part), default_flow_style=True, sort_keys=False, width=999).strip()[1:-1]}`"
                for said, part in more
                if part
            ]
            lines.append(f"| `{peer}` | `{kind}` | {'; '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), f"{PAGE.name}: the table is not this one:\n{table()}"


def job(tmp_path: Path, *overrides: str) -> TrainConfig:
    path = tmp_path / "job.yaml"
    path.write_text(RL.format(runs=tmp_path, model=tmp_path))
    return load(path, [f"algorithm={{type: {overrides[0]}}}", *overrides[1:]], TrainConfig)


def test_keys_that_are_given_win(tmp_path: Path) -> None:
    algorithm: Any = job(tmp_path, "grpo", "algorithm.as=verl", "algorithm.dual_clip=10.0").algorithm
    assert (algorithm.aggregation, algorithm.dual_clip, algorithm.clip_high) == ("token-mean", 10.0, 0.2)
    assert peers.shown("verl", algorithm.model_dump()) == "algorithm.as=verl: aggregation=token-mean; set otherwise: dual_clip=10"
    plain: Any = job(tmp_path, "grpo", "algorithm.as=trl", "algorithm.correction=null", "algorithm.aggregation=token-mean").algorithm
    assert (plain.correction, plain.sequence_count, plain.scale_eps) == (None, None, 1e-4)
    assert job(tmp_path, "gspo", "algorithm.as=paper").algorithm.model_copy(update={"as_": None}) == job(tmp_path, "gspo").algorithm


def test_the_resolved_configuration_loads_again(tmp_path: Path) -> None:
    config = job(tmp_path, "grpo", "algorithm.as=nemo_rl", "algorithm.scale=group")
    again = tmp_path / "config.yaml"
    again.write_text(dump(config))
    assert load(again, [], TrainConfig) == config


def test_unknown_combinations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm.as=trl: no settings here make topr TRL's \(they do for grpo, dapo, "):
        job(tmp_path, "topr", "algorithm.as=trl")
    with pytest.raises(ConfigError, match=r"^algorithm.as: .*'verl', 'trl', 'slime'.* \(got 'vrel'\)$"):
        job(tmp_path, "grpo", "algorithm.as=vrel")
