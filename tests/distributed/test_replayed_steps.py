"""Routing replay in the ranks' own steps: old log-probs, mini-batches, epochs, rollout after rollout, on several layouts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from megarl.config import Layout, RoutingSettings, TrainConfig, load
from megarl.models.description import ModelDescription
from megarl.observe.metrics import Metric, merge, scalars
from megarl.plan.facts import facts
from megarl.plan.host import routes
from megarl.plan.ranks import GroupMemory
from tests.distributed.replayed_steps import EXPERTS, LAYERS, LONGEST, RESPONSES, TOPK, Case, Seen, Went, samples_of, stages_of, steps
from tests.distributed.tiny_training import make_checkpoint
from tests.e2e.job import Job
from tests.rank_pool import Pool
from tests.rows import rows

LAYOUTS = {
    "one": Layout(),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "dp2": Layout(ranks=2),
    "cp2": Layout(ranks=2, cp=2),
    "dp2_tp2_ep2": Layout(ranks=4, tp=2, ep=2),
    "dp2_pp2": Layout(ranks=4, pp=2),
}
R2, R3 = RoutingSettings(replay="r2", sample=0.0), RoutingSettings(replay="r3")
WITH_CRITIC = RoutingSettings(replay="r3", critic=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "top2", num_experts=EXPERTS, num_experts_per_tok=TOPK)


@pytest.fixture(scope="module")
def told(pool: Pool, path: Path) -> Seen:
    """One rank, the engine's experts."""
    return pool.run(steps, LAYOUTS["one"], Case(path, R3))[0]


def joined(parts: Sequence[Went]) -> Went:
    """What all ranks saw of a pass."""
    whole: Went = {}
    for part in parts:
        for token, layers in part.items():
            assert whole.setdefault(token, {}).keys().isdisjoint(layers), "two ranks had the same token in the same layer"
            whole[token] |= layers
    return whole


def shown(ranks: Sequence[dict[str, Metric]]) -> dict[str, float]:
    return scalars(merge(ranks))


def lengths(rollout: int) -> list[int]:
    return [len(sample.tokens) - 1 for sample in samples_of(rollout, {})]


@pytest.mark.parametrize("recompute", rows(["none", "full"], ["full"]))
@pytest.mark.parametrize("name", rows(["one", "pp2_vpp2", "tp2_ep2", "cp2", "dp2_pp2"], ["pp2_vpp2"]))
def test_every_update_of_a_rollout_replays_what_its_old_log_probs_had(
    pool: Pool, path: Path, name: str, recompute: Literal["none", "full"]
) -> None:
    """Two mini-batches, two epochs, two rollouts; the routers learn, and would choose otherwise from the second update on."""
    case = Case(path, R2, rollouts=2, epochs=2, recompute=recompute)
    ranks = pool.run(steps, LAYOUTS[name], case)
    for rollout in range(2):
        recorded, *updates = (joined([seen.went[rollout][index] for seen in ranks]) for index in range(5))
        whole = {(n, position) for n, length in enumerate(lengths(rollout)) for position in range(length)}
        assert recorded.keys() == whole and all(layers.keys() == set(range(LAYERS)) for layers in recorded.values())
        for index, went in enumerate(updates):
            members = {n for seen in ranks for n in seen.members[index % 2]}
            assert len(members) == RESPONSES // 2 and went == {token: recorded[token] for token in whole if token[0] in members}
            told = shown([seen.updates[rollout][index] for seen in ranks])
            assert told["routing/replay_hit_rate"] == 1.0
            first = index == 0
            assert (told["actor/ratio_max"] == told["actor/ratio_inverse_max"] == 1.0) == first
            assert (told["routing/policy_changed_frac"] == 0.0) == first


@pytest.mark.parametrize("name", rows(["pp2_vpp2", "tp2_ep2", "dp2", "cp2", "dp2_tp2_ep2", "dp2_pp2"], ["tp2_ep2", "dp2", "pp2_vpp2"]))
def test_the_engines_experts_reach_the_ranks_that_need_them(pool: Pool, path: Path, told: Seen, name: str) -> None:
    """And no others: each rank fetches its own responses and its own stage's layers, every token goes where the engine sent it, and
    log-probs and the gradient's norm are those of one rank."""
    layout = LAYOUTS[name]
    ranks = pool.run(steps, layout, Case(path, R3))
    engine = {
        (n, position): {layer: frozenset(experts) for layer, experts in enumerate(layers)}
        for n, sample in enumerate(samples_of(0, {}))
        for position, layers in enumerate(sample.routed_experts.tolist())  # type: ignore[union-attr]
    }
    passes = [joined([seen.went[0][index] for seen in ranks]) for index in range(3)]
    assert passes[0] == engine and joined(passes[1:]) == engine
    for rank, seen in enumerate(ranks):
        own = {n for members in seen.members for n in members}
        stage = rank // (layout.ranks // layout.pp)
        assert len(own) == RESPONSES // layout.dp and seen.scored[0].keys() >= {
            f"routing_by_layer/rollout_changed_{layer}" for layer in stages_of(layout)[stage]
        }
        assert sorted(seen.fetched, key=str) == sorted([(n, part) for n in own for part in (None, stage)], key=str)
    logp = {token: lp for seen in ranks for token, lp in seen.logp.items()}
    assert logp == pytest.approx(told.logp, abs=2e-5)
    assert shown([seen.scored[0] for seen in ranks])["routing/replay_hit_rate"] == 1.0
    for one, many in zip(told.updates[0], zip(*(seen.updates[0] for seen in ranks), strict=True), strict=True):
        expected, found = shown([one]), shown(many)
        assert found["routing/replay_hit_rate"] == 1.0
        for number in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "actor/ppo_kl"):
            assert found[number] == pytest.approx(expected[number], rel=1e-3, abs=1e-5), number
    first = [shown([one[0] for one in parts]) for parts in ([told.updates[0]], [seen.updates[0] for seen in ranks])]
    assert first[0]["actor/grad_norm"] == pytest.approx(first[1]["actor/grad_norm"], rel=2e-5)


def test_log_probs_of_the_engine_with_its_experts(pool: Pool, path: Path, told: Seen) -> None:
    """Bypass mode: no pass before the updates; where the engine's experts are replayed, the ratio of the first update is 1."""
    case = Case(path, R3, old_logp="rollout", rollout_logp=told.logp)
    for layout in (LAYOUTS["one"], LAYOUTS["pp2_vpp2"]):
        ranks = pool.run(steps, layout, case)
        assert all(not seen.went[0][0] for seen in ranks), "no forward of its own"
        first, second = (shown([seen.updates[0][index] for seen in ranks]) for index in range(2))
        assert first["routing/replay_hit_rate"] == second["routing/replay_hit_rate"] == 1.0
        assert 1.0 <= first["actor/ratio_max"] < 1.0001 < second["actor/ratio_max"] and first["training/logprob_gap_max"] < 1e-4
        assert first["routing/rollout_changed_frac"] > 0.5, "the routers themselves would choose otherwise"
    [left] = pool.run(steps, LAYOUTS["one"], replace(case, routing=RoutingSettings(sample=1.0)))
    assert shown([left.updates[0][0]])["actor/ratio_max"] > 1.05


@pytest.mark.parametrize("name", rows(["one", "tp2_ep2", "pp2_vpp2"], ["tp2_ep2"]))
def test_a_critic_that_joins_micro_batches_finds_its_experts_again(pool: Pool, path: Path, name: str) -> None:
    """Three micro-batches to a mini-batch, joined in twos: of a token, the same rank sees the routers in its value and in its update."""
    ranks = pool.run(steps, LAYOUTS[name], Case(path, RoutingSettings(sample=0.0, critic=True), critic_together=2))
    recorded, *updates = (joined([seen.went[0][index] for seen in ranks]) for index in range(3))
    assert len(recorded) == sum(lengths(0)) and all(went.items() <= recorded.items() for went in updates)
    assert sum(map(len, updates)) == len(recorded)


@pytest.mark.parametrize(
    ("routing", "roles"), rows([(R3, "policy"), (R2, "policy"), (WITH_CRITIC, "policy+critic")], [(WITH_CRITIC, "policy+critic")])
)
@pytest.mark.parametrize("name", rows(["one", "pp2_vpp2", "dp2_pp2", "tp2_ep2"], ["pp2_vpp2"]))
def test_the_plan_bounds_the_experts_that_a_rank_holds(
    pool: Pool, path: Path, tmp_path: Path, name: str, routing: RoutingSettings, roles: str, long: bool
) -> None:
    """To the byte where all responses have the greatest length; of others a rank holds less."""
    layout = LAYOUTS[name]
    sizes = [
        "train.prompts_per_step=3",
        "train.mini_batches=2",
        "rollout.max_prompt_tokens=4",
        f"rollout.max_response_tokens={LONGEST - 4}",
    ]
    config = load(Job(tmp_path, path).write(), sizes, TrainConfig).model_copy(update={"routing": routing, "layout": layout})
    its = facts(ModelDescription.read(path))
    bound = routes(config, its, its, GroupMemory(roles, layout, []))
    for longest in (True, False) if long else (True,):
        case = Case(path, routing, longest=longest, critic_together=int("critic" in roles))
        held = shown([seen.scored[0] for seen in pool.run(steps, layout, case)])["routing/held_mb"] * 2**20
        assert held == bound if longest else 0.4 * bound < held < bound
