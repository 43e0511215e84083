"""Experts that are replayed: the tokens go to them on every layout, and everything else follows from that as on one rank.

Axes: T entries, L layers, K experts a token.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.batch import Batch
from megarl.config import Layout
from megarl.models.hf import read_config
from megarl.observe.metrics import Metric, merge, scalars
from megarl.parallel import schedule
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.optimizer import Trainable
from megarl.parallel.routing import Routing, RoutingPass
from megarl.parallel.weights import local_parameters
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import (
    BY_GRADIENTS,
    TINY,
    Job,
    assert_same_gradients,
    build,
    exported,
    global_batch,
    make_checkpoint,
    moved,
    shares,
)
from tests.rank_pool import Pool
from tests.rows import rows

LAYERS, EXPERTS, TOPK = 4, 8, 2
LAYOUTS = {
    "tp2_ep2": Layout(ranks=4, tp=2, ep=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "cp2": Layout(ranks=2, cp=2),
    "tp2_pp2": Layout(ranks=4, tp=2, pp=2),
    "dp2": Layout(ranks=2),
    "tp2_etp2": Layout(ranks=2, tp=2, etp=2),
}


@dataclass
class Seen:
    """What one rank saw."""

    logp: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)  # by pass: (sequence, position) -> log-prob
    experts: dict[tuple[int, int], dict[int, tuple[int, ...]]] = field(default_factory=dict)  # recorded, by entry and layer
    metrics: dict[str, dict[str, Metric]] = field(default_factory=dict)  # by pass
    router_grad: dict[str, float] = field(default_factory=dict)  # by recompute: the norm of the routers' gradients
    grads: dict[str, list[Tensor]] = field(default_factory=dict)


def drawn(batch: Batch, layers: int = LAYERS, experts: int = EXPERTS, topk: int = TOPK) -> Tensor:
    """Experts that no router would choose so: different ones for each token and layer. int16 [T, L, K]."""
    scores = torch.rand(len(batch), layers, experts, generator=torch.Generator().manual_seed(5))
    return scores.topk(topk, dim=2).indices.to(torch.int16)


def mine(grid: Grid, job: Job) -> list[Batch]:
    """This rank's micro-batches, one more without entries, with the experts of its layers."""
    batch = global_batch(job.sequences)
    parts = shares(batch.with_extra(routed_experts=drawn(batch)), job.micro_batches)[grid.dp_rank :: grid.dp_size]
    return [*parts, parts[0].take(torch.empty(0, dtype=torch.int64))]


def here(batches: list[Batch], routing: Routing) -> list[Batch]:
    """The micro-batches with the experts of this rank's layers alone."""
    return [batch.with_extra(routed_experts=batch.extra_T["routed_experts"][:, routing.layers]) for batch in batches]


def forward(grid: Grid, policy: Trainable, batches: list[Batch], routing: RoutingPass | None, *, learn: bool = False) -> dict[Any, float]:
    """The log-probs of one pass, on the ranks that report."""

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        assert "routed_experts" not in batch.extra_T, "the loss has no use for them"
        lp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, TINY["vocab_size"])
        return (batch.extra_T["weight"] * lp_T).sum(), batch.with_extra(lp=lp_T.detach())

    results = schedule.run(policy.chunks, batches, loss_fn, grid, forward_only=not learn, routing=routing)
    if routing is not None:
        routing.check()
    if not grid.is_last_stage or grid.tp_rank:
        return {}
    rows = [zip(part.seq_T.tolist(), part.position_T.tolist(), part.extra_T["lp"].tolist(), strict=True) for part in results]
    return {(sequence, position): logp for row in rows for sequence, position, logp in row}


def perturb(policy: Trainable, grid: Grid) -> None:
    """Other routers, the same on every layout."""
    for name, weight in sorted(local_parameters(policy.chunks, grid.ep_rank).items()):
        if name.endswith("mlp.router.weight"):
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            weight.data += 0.5 * torch.randn(weight.shape, generator=generator)


def replays(grid: Grid, job: Job) -> Seen:
    """Passes over the same tokens: recorded, replayed, with other routers, and with experts that were drawn."""
    seen, policy, batches = Seen(), build(grid, job), mine(grid, job)
    routing = Routing(policy.chunks, grid)
    external = here(batches, routing)

    def run(name: str, given: list[Batch], *, replay: bool, record: Any = "none") -> RoutingPass:
        with routing.follow("routed_experts", replay=replay, record=record) as followed:
            seen.logp[name] = forward(grid, policy, given, followed)
            seen.metrics[name] = followed.metrics("policy")
        return followed

    recorded = run("recorded", [batch.without("routed_experts") for batch in batches], replay=False, record="all").recorded
    assert recorded.keys() in ({*range(len(batches))}, set()), "nothing of what fills an interleaved schedule's last round"
    seen.logp["left alone"] = forward(grid, policy, batches, None)
    own = [batch.with_extra(routed_experts=recorded[index]) for index, batch in enumerate(batches)] if recorded else batches
    for batch in own if recorded else []:
        for entry, key in enumerate(zip(batch.seq_T.tolist(), batch.position_T.tolist(), strict=True)):
            found = dict(zip(routing.layers, map(tuple, batch.extra_T["routed_experts"][entry].tolist()), strict=True))
            seen.experts.setdefault(key, {}).update(found)
    run("replayed", own, replay=True)
    run("drawn", external, replay=True)
    perturb(policy, grid)
    run("compared", own, replay=False)
    run("replayed elsewhere", own, replay=True)
    return seen


def learns(grid: Grid, job: Job) -> Seen:
    """Gradients of a pass that replays experts that were drawn."""
    seen, policy = Seen(), build(grid, job)
    routing = Routing(policy.chunks, grid)
    policy.zero_grad()
    with routing.follow("routed_experts", replay=True) as followed:
        seen.logp["drawn"] = forward(grid, policy, here(mine(grid, job), routing), followed, learn=True)
        seen.metrics["drawn"] = followed.metrics("policy")
    parameters = local_parameters(policy.chunks, grid.ep_rank)
    seen.grads = {name: [weight.main_grad.clone()] for name, weight in parameters.items() if hasattr(weight, "main_grad")}
    seen.router_grad["norm"] = policy.step().grad_norm
    return seen


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "top2", num_experts=EXPERTS, num_experts_per_tok=TOPK)


@pytest.fixture(scope="module")
def alone(pool: Pool, path: Path) -> Seen:
    [seen] = pool.run(replays, Layout(), Job(path))
    return seen


def replayed_gradients(grid: Grid, job: Job) -> dict[str, Tensor]:
    """`tiny_training.gradients`, of a pass that replays experts that were drawn."""
    policy = build(grid, job)
    routing, before = Routing(policy.chunks, grid), exported(grid, policy, job)
    policy.zero_grad()
    with routing.follow("routed_experts", replay=True) as followed:
        forward(grid, policy, here(mine(grid, job), routing), followed, learn=True)
    policy.step()
    return moved(before, exported(grid, policy, job))


def joined(ranks: list[Seen], name: str) -> dict[tuple[int, int], float]:
    return {key: value for seen in ranks for key, value in seen.logp[name].items()}


def shown(ranks: list[Seen], name: str) -> dict[str, float]:
    return scalars(merge(seen.metrics[name] for seen in ranks))


def close(one: dict[Any, float], other: dict[Any, float], atol: float = 2e-5) -> bool:
    return one.keys() == other.keys() and all(abs(one[key] - other[key]) <= atol for key in one)


def test_recorded_experts_give_the_same_bits_again_whatever_the_routers_say(alone: Seen) -> None:
    assert alone.logp["recorded"] == alone.logp["left alone"] == alone.logp["replayed"]
    assert shown([alone], "replayed") == {
        **{f"routing_by_layer/policy_changed_{layer}": 0.0 for layer in range(LAYERS)},
        **{"routing/policy_changed_frac": 0.0, "routing/policy_changed_tokens": 0.0, "routing/replay_hit_rate": 1.0},
    }
    compared, elsewhere = shown([alone], "compared"), shown([alone], "replayed elsewhere")
    assert compared["routing/policy_changed_frac"] > 0.2 and "routing/replay_hit_rate" not in compared
    assert elsewhere["routing/replay_hit_rate"] == 1.0 and elsewhere["routing/policy_changed_frac"] > 0.2
    assert not close(alone.logp["compared"], alone.logp["replayed elsewhere"], 1e-3)
    assert len(alone.experts) == len(global_batch(Job.sequences)) and all(
        found.keys() == set(range(LAYERS)) for found in alone.experts.values()
    )


@pytest.mark.parametrize("name", rows(LAYOUTS, ["cp2", "pp2_vpp2", "dp2"]))
def test_replay_is_the_same_on_every_layout(pool: Pool, path: Path, alone: Seen, name: str) -> None:
    layout = LAYOUTS[name]
    ranks = pool.run(replays, layout, Job(path, micro_batches=2))
    assert joined(ranks, "recorded") == joined(ranks, "replayed") == joined(ranks, "left alone")
    for one in ("drawn", "replayed elsewhere"):
        assert close(joined(ranks, one), alone.logp[one])
        assert shown(ranks, one)["routing/replay_hit_rate"] == 1.0
    recorded: dict[tuple[int, int], dict[int, set[int]]] = {}
    for seen in ranks:
        for key, layers in seen.experts.items():
            for layer, experts in layers.items():
                if -1 not in experts:
                    recorded.setdefault(key, {})[layer] = set(experts)
    same = [recorded[key][layer] == set(experts) for key, layers in alone.experts.items() for layer, experts in layers.items()]
    assert recorded.keys() == alone.experts.keys() and sum(same) >= 0.999 * len(same)  # a near-tie may break the other way
    for number, value in shown([alone], "compared").items():
        assert shown(ranks, "compared")[number] == pytest.approx(value, abs=0.01)


@pytest.mark.parametrize("name", rows(["one", "tp2_ep2"], ["tp2_ep2"]))
def test_in_bfloat16_the_bits_are_the_same_too(pool: Pool, tmp_path: Path, name: str) -> None:
    """Which is where routers waver: other sums of the same tokens choose other experts."""
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=2, num_experts=EXPERTS, num_experts_per_tok=TOPK)
    layout = LAYOUTS.get(name, Layout())
    job = Job(path, micro_batches=2, dtype="bfloat16")
    ranks = pool.run(replays, layout, job)
    assert joined(ranks, "recorded") == joined(ranks, "replayed") == joined(ranks, "left alone")
    assert shown(ranks, "replayed elsewhere")["routing/replay_hit_rate"] == 1.0
    plain, again = pool.run(learns, layout, job), pool.run(learns, layout, replace(job, recompute="full"))
    assert plain[0].router_grad["norm"] == again[0].router_grad["norm"] > 0
    assert all(torch.equal(one.grads[key][0], two.grads[key][0]) for one, two in zip(plain, again, strict=True) for key in one.grads)


@pytest.mark.parametrize("name", rows(["one", "tp2_ep2", "pp2_vpp2", "cp2"], ["tp2_ep2"]))
def test_gradients_of_replayed_experts(pool: Pool, path: Path, alone: Seen, name: str) -> None:
    """Bit for bit the same with every recompute, and the norm as on one rank; the routers learn from the experts that were replayed."""
    layout = LAYOUTS.get(name, Layout())
    job = Job(path, micro_batches=2)
    plain = pool.run(learns, layout, job)
    assert close(joined(plain, "drawn"), alone.logp["drawn"])
    routers = [grad for seen in plain for weight, [grad] in seen.grads.items() if weight.endswith("mlp.router.weight")]
    assert all(grad.norm() > 1e-4 for grad in routers)
    for recompute in ("full", "selective"):
        megarl = {"recompute_modules": ["moe"]} if recompute == "selective" else {}
        again = pool.run(learns, layout, replace(job, recompute=recompute, megatron=megarl))
        assert all(shown(ranks, "drawn")["routing/replay_hit_rate"] == 1.0 for ranks in (plain, again))
        for one, other in zip(plain, again, strict=True):
            assert one.grads.keys() == other.grads.keys()
            assert all(torch.equal(one.grads[weight][0], other.grads[weight][0]) for weight in one.grads)


@pytest.mark.parametrize("name", rows(LAYOUTS, ["pp2_vpp2", "cp2"]))
def test_each_element_of_the_gradient_of_replayed_experts_is_independent_of_the_layout(pool: Pool, path: Path, name: str) -> None:
    job = Job(path, micro_batches=2, optimizer=BY_GRADIENTS)
    [one] = pool.run(replayed_gradients, Layout(), job)
    assert_same_gradients(pool.run(replayed_gradients, LAYOUTS[name], job)[0], one)


def test_replayed_experts_and_their_gradients_are_those_of_transformers(pool: Pool, path: Path, alone: Seen) -> None:
    """Whose routers are made to take the same experts: probs = softmax over all experts, the chosen ones' normalised."""
    from transformers import AutoModelForCausalLM

    [seen] = pool.run(learns, Layout(), Job(path))
    batch, model = global_batch(Job.sequences), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    experts_TLK, place = drawn(batch).long(), dict[str, Tensor]()

    def routed(layer: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            chosen = experts_TLK[place["entries"], layer]
            probs = logits.softmax(-1).gather(1, chosen)
            return logits, probs / probs.sum(-1, keepdim=True), chosen

        return forward

    gates = [layer.mlp.gate for layer in model.model.layers]
    for index, gate in enumerate(gates):
        gate.forward = routed(index, gate)
    theirs: dict[tuple[int, int], float] = {}
    for n in range(Job.sequences):
        own = (batch.seq_T == n).nonzero().squeeze(1)
        place["entries"] = own
        logp_T = model(batch.input_T[None, own]).logits[0].log_softmax(-1).gather(-1, batch.target_T[own, None])[:, 0]
        (batch.extra_T["weight"][own] * logp_T).sum().backward()
        theirs |= {(n, position): lp for position, lp in zip(batch.position_T[own].tolist(), logp_T.tolist(), strict=True)}
    assert close(seen.logp["drawn"], theirs)
    for index, gate in enumerate(gates):
        torch.testing.assert_close(seen.grads[f"decoder.layers.{index}.mlp.router.weight"][0], gate.weight.grad, rtol=1e-3, atol=1e-6)


def test_a_pass_without_gradients_gives_the_bits_of_one_with_them(pool: Pool, tmp_path: Path) -> None:
    """Or else old and reference log-probs differ from the policy's before the first update (`upstream.SortedTopK`)."""
    many = make_checkpoint(tmp_path / "top4", num_experts=EXPERTS, num_experts_per_tok=4)
    [(without, learning)] = pool.run(passes, Layout(), Job(many))
    assert without == learning


def passes(grid: Grid, job: Job) -> tuple[dict[Any, float], dict[Any, float]]:
    policy, batches = build(grid, job), shares(global_batch(job.sequences), 1)
    return forward(grid, policy, batches, None), forward(grid, policy, batches, None, learn=True)


@pytest.mark.parametrize(
    ("experts", "fault"),
    [(-1, r"layer 0: \d+ of \d+ tokens went to the experts"), (0, r"tokens that are to go to the same expert twice: layer 0: 1, ")],
    ids=["missing", "one of them several times"],
)
def test_tokens_that_are_not_replayed_stop_the_run(pool: Pool, path: Path, experts: int, fault: str) -> None:
    """The second is what an engine reports that has never written a token's experts: all 0."""
    with pytest.raises(AssertionError, match=f"RoutingError: routing replay on rank 0: {fault}"):
        pool.run(forgets, Layout(), Job(path), experts)


def forgets(grid: Grid, job: Job, experts: int) -> None:
    """Replays with one token's experts all the same."""
    policy = build(grid, job)
    batches = mine(grid, job)
    batches[0].extra_T["routed_experts"][3] = experts
    with Routing(policy.chunks, grid).follow("routed_experts", replay=True) as followed:
        forward(grid, policy, batches, followed)


@pytest.mark.parametrize("failed", ["one", "all"])
@pytest.mark.parametrize("name", ["dp2", "pp2_vpp2"])
def test_an_episode_that_no_engine_has_read_has_nothing_to_replay(pool: Pool, path: Path, name: str, failed: str) -> None:
    """It failed before its first turn: its opening has no loss token, and no experts were reported."""
    ranks = pool.run(unread, LAYOUTS[name], Job(path), failed == "all")
    hit_rate = scalars(merge(ranks)).get("routing/replay_hit_rate")
    assert hit_rate == (None if failed == "all" else 1.0)


def unread(grid: Grid, job: Job, every: bool) -> dict[str, Metric]:
    """Learns with replay from micro-batches of which the first sequences, or all, were never read by an engine."""
    policy = build(grid, job)
    routing, given = Routing(policy.chunks, grid), list[Batch]()
    for batch in here(mine(grid, job), routing):
        unread_N = torch.ones_like(batch.count_N, dtype=torch.bool) if every else torch.arange(len(batch.count_N)) == 0
        unread_T, experts_TLK = batch.spread(unread_N), batch.extra_T["routed_experts"].clone()
        experts_TLK[unread_T] = -1
        weight_T = batch.extra_T["weight"].masked_fill(unread_T, 0.0)
        batch = replace(batch, mask_T=batch.mask_T & ~unread_T, count_N=batch.count_N * ~unread_N).with_extra(weight=weight_T)
        given.append(batch.without("routed_experts") if every else batch.with_extra(routed_experts=experts_TLK))
    policy.zero_grad()
    with routing.follow("routed_experts", replay=True) as followed:
        forward(grid, policy, given, followed, learn=True)
        return followed.metrics("policy")


@dataclass(frozen=True)
class Counts:
    """What one rank saw of the routers' own choices, in a step whose tokens were replayed or not."""

    logp: dict[tuple[int, int], float]
    shown: dict[str, Metric]
    layers: list[int]
    bias: dict[int, Tensor]  # by layer, what the step has added to the experts' biases: +-0.01 as their tokens are few or many
    load: dict[int, float]  # by layer, the load-balancing loss


def counts(grid: Grid, job: Job, replay: bool) -> Counts:
    """A step over tokens whose experts were drawn."""
    hf, policy = read_config(job.path), build(grid, job)
    routing, batch = Routing(policy.chunks, grid), global_batch(job.sequences)
    experts, topk = int(hf.get("n_routed_experts") or hf["num_experts"]), int(hf["num_experts_per_tok"])
    whole = batch.with_extra(routed_experts=drawn(batch, int(hf["num_hidden_layers"]), experts, topk))
    routers = [part for chunk in policy.chunks for part in chunk.modules() if isinstance(part, TopKRouter)]
    before = [None if router.expert_bias is None else router.expert_bias.clone() for router in routers]
    losses = get_moe_metrics_tracker().metrics
    losses.clear()
    policy.zero_grad()
    with routing.follow("routed_experts", replay=replay) as followed:
        parts = here(shares(whole, job.micro_batches)[grid.dp_rank :: grid.dp_size], routing)
        logp = forward(grid, policy, parts, followed, learn=True)
        shown = followed.metrics("policy")
    policy.step()
    pairs = zip(routers, before, strict=True)
    bias = {router.layer_number - 1: router.expert_bias - old for router, old in pairs if old is not None}
    values = losses["load_balancing_loss"].values.tolist() if losses else []
    return Counts(logp, shown, routing.layers, bias, {layer: values[layer] for layer in routing.layers if values})


@pytest.mark.parametrize("family", rows(["deepseek_v3", "glm4_moe"], ["deepseek_v3"]))
def test_stacks_that_are_partly_dense_with_sigmoid_routers_in_groups_and_biases(pool: Pool, make: Make, family: str) -> None:
    """Replay is the same on other layouts; biases follow what routers choose themselves, in the first layer what they choose without it."""
    job = Job(make(family), micro_batches=2, megatron={"moe_router_bias_update_rate": 0.01})
    [one], [left] = pool.run(counts, Layout(), job, True), pool.run(counts, Layout(), job, False)
    assert one.layers == [1, 2, 3] and one.bias.keys() == set(one.layers)
    batch = global_batch(Job.sequences)
    hf = read_config(job.path)
    load_E = drawn(batch, 4, 8, int(hf["num_experts_per_tok"]))[:, 1].long().flatten().bincount(minlength=8).double()
    replayed_E = 0.01 * (load_E.mean() - load_E).sign().float()
    assert torch.equal(one.bias[1], left.bias[1]) and one.bias[1].abs().sum() > 0
    assert not torch.allclose(one.bias[1], replayed_E, atol=1e-3), "had the router counted what was replayed"
    for layout in (Layout(ranks=2, pp=2), Layout(ranks=2, tp=2, ep=2)):
        ranks = pool.run(counts, layout, job, True)
        logp = {key: value for rank in ranks for key, value in rank.logp.items()}
        assert close(logp, one.logp) and scalars(merge(rank.shown for rank in ranks))["routing/replay_hit_rate"] == 1.0
        assert {layer for rank in ranks for layer in rank.layers} == {1, 2, 3}
        assert all(torch.equal(rank.bias[1], one.bias[1]) for rank in ranks if 1 in rank.bias)


def test_load_balancing_sees_what_the_routers_choose_themselves(pool: Pool, path: Path) -> None:
    [one], [left] = (pool.run(counts, Layout(), Job(path, megatron={"moe_aux_loss_coeff": 0.01}), replay) for replay in (True, False))
    assert one.load[0] == left.load[0] > 0 and one.load[3] != left.load[3]
