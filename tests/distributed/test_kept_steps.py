"""Steps of the RL loop's own ranks under a truncated sampling: log-probs, entropies and gradients over the kept tokens on every layout.

Axes: T entries of a response, V vocabulary.
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from megarl.algorithms.grpo import Grpo
from megarl.config import Layout, OptimizerSettings, Truncation
from megarl.observe.metrics import Metric, merge, scalars
from megarl.parallel.grid import Grid
from megarl.ranks.step_plan import StepPlan
from megarl.ranks.step_worker import RLSpec
from tests.distributed.loop_ranks import object_store, rl_rank
from tests.distributed.replayed_steps import Reference, Store, Token, old_logps, plan_of, samples_of
from tests.distributed.test_kept_tokens import plain_kept
from tests.distributed.tiny_training import make_checkpoint
from tests.rank_pool import Pool
from tests.rows import rows

TEMPERATURE = 0.7  # of `plain_kept`
RULES = Truncation(min_p=0.02, top_k=90, top_p=0.9)
ALGORITHM = Grpo(kl_coef=0.04)
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "dp2_tp2": Layout(ranks=4, tp=2),
    "tp2_cp2": Layout(ranks=4, tp=2, cp=2),
}


@dataclass(frozen=True)
class Case:
    """Two rollouts of a policy and its reference, two mini-batches and two epochs each; or one with a single update."""

    path: Path
    truncation: Truncation | None = RULES
    old_logp: Literal["forward", "update"] = "forward"


@dataclass
class Seen:
    """What one rank saw."""

    scored: list[dict[str, Metric]] = field(default_factory=list)  # by rollout
    updates: list[dict[str, Metric]] = field(default_factory=list)
    logp: list[dict[Token, float]] = field(default_factory=list)  # by rollout, the old log-probs where this rank speaks for them
    drift: list[float] = field(default_factory=list)  # by rollout, the largest difference to the reference's


def plan_for(rollout: int, dp: int, parts: int) -> StepPlan:
    samples = samples_of(rollout, {})
    responses: Any = [
        SimpleNamespace(
            payload=Reference(n, None, sample),
            experts=None,
            prompt_length=sample.prompt_length,
            length=sample.response_length,
            loss_tokens=sample.loss_tokens,
        )
        for n, sample in enumerate(samples)
    ]
    return plan_of(responses, [], ALGORITHM, dp, parts)


def advantages_of(plan: StepPlan) -> np.ndarray:
    reward_N, group_N = torch.tensor(plan.reward_N, dtype=torch.float64), torch.tensor(plan.group_N)
    return ALGORITHM.advantages(reward_N, group_N, None).float().numpy()


def steps(grid: Grid, case: Case) -> Seen:
    """The steps of one rank."""
    whole = case.old_logp == "forward"
    spec = RLSpec(
        ALGORITHM if whole else ALGORITHM.model_copy(update={"kl_coef": 0.0}),
        OptimizerSettings(lr=1e-3),
        updates=100,
        temperature=TEMPERATURE,
        old_logp=case.old_logp,
        truncation=case.truncation,
    )
    rank = rl_rank(grid, case.path, spec, "policy", *(["reference"] if whole else []))
    seen = Seen()
    with object_store(Store()):
        for rollout in range(2 if whole else 1):
            plan = plan_for(rollout, grid.dp_size, 2 if whole else 1)
            seen.scored.append(rank.forward(plan, score=False))
            if whole:
                seen.logp.append(old_logps(rank))
                gaps = [(batch.extra_T["old_logp"] - batch.extra_T["ref_logp"])[batch.mask_T].abs() for batch in rank._flat()]
                seen.drift.append(float(torch.cat(gaps).nan_to_num(0.0).max()))
            rank.advantages(advantages_of(plan), spec.algorithm.kl_coef, False)
            seen.updates += [rank.update(part) for part in plan.trained * (2 if whole else 1)]
    return seen


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def one_rank(pool: Pool, path: Path) -> Seen:
    return pool.run(steps, Layout(), Case(path))[0]


def plain(path: Path) -> tuple[dict[Token, float], float, float, float, float]:
    """In float64, by transformers and a sorted vocabulary: the first rollout's log-probs, and of its first mini-batch the gradient's norm
    and the mean entropy; the mean number of kept tokens, and the share of targets outside."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    plan = plan_for(0, 1, 2)
    advantage_N, first = advantages_of(plan), {n for members in plan.split[0][0] for n in plan.responses(members)}
    logp, total, entropies, kept, outside = dict[Token, float](), torch.zeros((), dtype=torch.float64), list[float](), 0, 0
    for n, sample in enumerate(samples_of(0, {})):
        ids, begin = torch.tensor(sample.tokens.tolist())[None], sample.prompt_length - 1
        logits_TV, target_T = model(ids).logits[0, begin:-1], ids[0, begin + 1 :, None]
        kept_TV = plain_kept(logits_TV.detach(), RULES)
        outside += int((~kept_TV.gather(1, target_T)).sum())
        kept_TV.scatter_(1, target_T, True)
        kept += int(kept_TV.sum())
        log_p = (logits_TV / TEMPERATURE).masked_fill(~kept_TV, -torch.inf).log_softmax(-1)
        lp_T = log_p.gather(1, target_T)[:, 0]
        logp |= {(n, begin + place): lp for place, lp in enumerate(lp_T.tolist())}
        if n in first:
            assert plan.weight_N is not None
            total = total - float(plan.weight_N[n]) * float(advantage_N[n]) * lp_T.sum()
            entropies += (-(log_p.exp() * log_p.masked_fill(~kept_TV, 0.0)).sum(-1)).tolist()
    total.backward()  # ratio 1, and a reference that is the policy: its KL has no slope
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]).norm()
    return logp, float(norm), float(np.mean(entropies)), kept / len(logp), outside / len(logp)


def shown(ranks: list[dict[str, Metric]]) -> dict[str, float]:
    return scalars(merge(ranks))


def test_a_step_over_kept_tokens_is_that_of_float64(pool: Pool, path: Path, one_rank: Seen) -> None:
    logp, norm, entropy, kept, outside = plain(path)
    assert one_rank.logp[0] == pytest.approx(logp, abs=2e-5)
    first, scored = shown([one_rank.updates[0]]), shown([one_rank.scored[0]])
    assert first["actor/grad_norm"] == pytest.approx(norm, rel=1e-5) and first["actor/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert first["actor/ratio_max"] == first["actor/ratio_inverse_max"] == 1.0
    assert 10 < kept < 90 and scored["sampling/kept"] == pytest.approx(kept, rel=1e-12)
    assert outside > 0.05 and scored["sampling/outside_frac"] == pytest.approx(outside, rel=1e-12)
    tokens = len(logp)
    assert scored["sampling/kept_mb"] * 2**20 == pytest.approx(4 * kept * tokens + 5 * tokens, rel=1e-12)
    assert one_rank.drift[0] == 0.0 < one_rank.drift[1], "the reference reads the policy's kept tokens"
    [over_all] = pool.run(steps, Layout(), Case(path, None))
    assert not any(name.startswith("sampling/") for name in over_all.scored[0])
    assert shown([over_all.updates[0]])["actor/grad_norm"] != pytest.approx(norm, rel=1e-2), "which the whole distribution has not"


@pytest.mark.parametrize("name", rows(list(LAYOUTS), ["tp2"]))
def test_steps_over_kept_tokens_are_independent_of_the_layout(pool: Pool, path: Path, one_rank: Seen, name: str) -> None:
    ranks = pool.run(steps, LAYOUTS[name], Case(path))
    logp = {token: lp for seen in ranks for token, lp in seen.logp[0].items()}
    assert logp == pytest.approx(one_rank.logp[0], abs=2e-5)
    expected, found = shown([one_rank.scored[0]]), shown([seen.scored[0] for seen in ranks])
    for number in ("sampling/kept", "sampling/outside_frac"):
        assert found[number] == pytest.approx(expected[number], rel=1e-12), number
    for index, one in enumerate(one_rank.updates):
        expected, found = shown([one]), shown([seen.updates[index] for seen in ranks])
        for number in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/kl_loss"):
            rel = 2e-5 if index == 0 else 2e-3
            assert found[number] == pytest.approx(expected[number], rel=rel, abs=1e-6 if index == 0 else 1e-4), (index, number)
        assert (found["actor/ratio_max"] == found["actor/ratio_inverse_max"] == 1.0) == (index in (0, 4))


@pytest.mark.parametrize("name", ["tp2"])
def test_a_single_update_finds_its_own_kept_tokens(pool: Pool, path: Path, name: str) -> None:
    """No pass before it, and nothing held: its log-probs are the old ones."""
    [one] = pool.run(steps, Layout(), Case(path, old_logp="update"))
    ranks = pool.run(steps, LAYOUTS[name], Case(path, old_logp="update"))
    expected, found = shown([one.updates[0]]), shown([seen.updates[0] for seen in ranks])
    assert not one.scored[0] and "sampling/kept_mb" not in found and found["actor/ratio_max"] == 1.0
    for number in ("actor/grad_norm", "actor/entropy", "sampling/kept", "sampling/outside_frac"):
        assert found[number] == pytest.approx(expected[number], rel=2e-5), number
