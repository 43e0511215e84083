"""The supervised stages' ranks: metrics and gradient are the same on every layout, pairs stay whole, a reward model is transformers'."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megarl.algorithms.objective import Objective
from megarl.algorithms.reward_model import BradleyTerry
from megarl.algorithms.sft import Sft, StoredDistillation
from megarl.batch import Sample, pack_scored
from megarl.config import Layout, MuonSettings, OptimizerSettings
from megarl.models import hf as directory
from megarl.observe.metrics import Metric, merge, scalars
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import likeliest
from megarl.ranks.supervised_worker import MiniBatch, SupervisedWorker, TrainSpec, mini_batch
from tests.distributed.loop_ranks import supervised_rank
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import TINY, make_checkpoint
from tests.image_samples import samples as shown
from tests.rank_pool import Pool
from tests.rows import rows
from tests.unit.algorithms.cases import PAIR_LOSSES, PREFERENCES

PAIRS = 7  # three ranks of data cannot share them evenly
CAPACITY = 170  # tokens of a micro-batch: several are needed
OBJECTIVES: dict[str, Objective] = {
    "sft": Sft(),
    "sft_by_response": Sft("seq-mean-token-mean"),
    "taught": Sft(distillation=StoredDistillation(nll_weight=0.1)),
    "taught_jsd": Sft("seq-mean-token-mean", StoredDistillation(divergence="jsd")),
    "rm": BradleyTerry(centre=0.1),
    **PREFERENCES,
    "dpo": PAIR_LOSSES["dpo_average"],
}
# With each layout the objectives that the suite tries on it; `--long` tries all.
LAYOUTS: dict[str, tuple[Layout, list[str]]] = {
    "dp3_uneven": (Layout(ranks=3), ["dpo", "sft_by_response", "taught"]),
    "tp2": (Layout(ranks=2, tp=2), [*(kind for kind in PREFERENCES if kind != "dpo"), "taught"]),
    "pp2_vpp2": (Layout(ranks=2, pp=2, vpp=2), ["sft"]),
    "cp2": (Layout(ranks=2, cp=2), ["rm", "sft_by_response"]),
    "ep2": (Layout(ranks=2, ep=2), ["sft"]),
    "tp2_pp2": (Layout(ranks=4, tp=2, pp=2), ["sft", "rm", "simpo"]),
    "cp2_tp2": (Layout(ranks=4, cp=2, tp=2), ["dpo", "taught_jsd"]),
}


def samples(seed: int = 4, seeing: Path | None = None) -> list[Sample]:
    """Pairs of a prompt and two responses of different lengths; `seeing`: a model, of which some prompts show up to three images."""
    rng, made = np.random.default_rng(seed), list[Sample]()
    if seeing is not None:
        for asked in shown(seeing, (2, 0, 1, 3, 0, 1, 1), seed):
            for _ in range(2):
                tokens = np.concatenate([asked.tokens[: asked.prompt_length], rng.integers(10, 128, int(rng.integers(1, 25)))])
                logp = np.zeros(len(tokens) - asked.prompt_length, np.float32)
                made.append(Sample(tokens.astype(np.int32), asked.prompt_length, logp, "stop", images=asked.images))
        return made
    for _ in range(PAIRS):
        prompt = rng.integers(0, TINY["vocab_size"], int(rng.integers(2, 20)))
        for _ in range(2):
            response = rng.integers(0, TINY["vocab_size"], int(rng.integers(1, 25)))
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            made.append(Sample(tokens, len(prompt), np.zeros(len(response), np.float32), "stop"))
    return made


def plan(objective: Objective, dp: int, seed: int = 4, seeing: Path | None = None) -> MiniBatch:
    margins, capacity = [0.3 * (n // 2) for n in range(2 * PAIRS)], CAPACITY if seeing is None else 2 * CAPACITY
    given = samples(seed, seeing)
    teaches = isinstance(objective, Sft) and objective.distillation is not None
    return mini_batch(objective, given, margins, dp, capacity, taught_N=[named(one, seed) for one in given] if teaches else None)


def named(sample: Sample, seed: int, count: int = 5) -> np.ndarray:
    """What a teacher of random logits says of a response's tokens."""
    logit_TV = torch.randn(sample.response_length, TINY["vocab_size"], generator=torch.Generator().manual_seed(seed + len(sample.tokens)))
    value_TK, token_TK = logit_TV.log_softmax(1).topk(count)
    rest_T = torch.log1p(-value_TK.exp().sum(1, keepdim=True))
    return torch.cat([token_TK.float(), value_TK, rest_T], 1).numpy()


def worker(grid: Grid, path: Path, objective: Objective, muon: MuonSettings | None = None) -> SupervisedWorker:
    return supervised_rank(grid, path, TrainSpec(objective, OptimizerSettings(lr=1e-4, muon=muon), updates=3))


def learn(
    grid: Grid, path: Path, names: Sequence[str], muon: MuonSettings | None = None, seeing: Path | None = None
) -> dict[str, list[dict[str, Metric]]]:
    """Of each objective: held-out numbers, a step, held-out numbers."""
    found = {}
    for name in names:
        objective = OBJECTIVES[name]
        rank, held_out = worker(grid, path, objective, muon), plan(objective, grid.dp_size, 5, seeing)
        steps = [rank.measure(held_out), rank.train(plan(objective, grid.dp_size, seeing=seeing)), rank.measure(held_out)]
        found[name] = steps
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def one_rank(pool: Pool, model: Path) -> dict[str, list[dict[str, Metric]]]:
    return pool.run(learn, Layout(), model, list(OBJECTIVES))[0]


def counted(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers but those of the machine, which differ from pass to pass."""
    return {name: value for name, value in scalars(metrics).items() if not name.startswith(("perf/tflops_per_gpu", "perf/memory_"))}


@pytest.mark.parametrize("name", rows(LAYOUTS, ["dp3_uneven", "pp2_vpp2", "cp2_tp2"]))
def test_metrics_and_gradient_are_independent_of_the_layout(
    pool: Pool, model: Path, one_rank: dict[str, list[dict[str, Metric]]], name: str, long: bool
) -> None:
    layout, some = LAYOUTS[name]
    tried = list(OBJECTIVES) if long else some
    ranks = pool.run(learn, layout, model, tried)
    for objective in tried:
        for index, one in enumerate(one_rank[objective]):
            many = merge(rank[objective][index] for rank in ranks)
            # Adam's first step makes signs of gradients, also of those that rounding alone decides.
            assert counted(many) == pytest.approx(counted(one), rel=1e-5 if index < 2 else 1e-3, abs=1e-6 if index < 2 else 1e-4), (
                objective,
                index,
            )


SEEN = [
    *(("qwen3_vl_moe", layout) for layout in ("{ranks: 2}", "{ranks: 2, tp: 2, ep: 2}", "{ranks: 4, pp: 2, ep: 2, cp: 2}")),
    ("qwen3_5_moe_vl", "{ranks: 4, pp: 2, ep: 2, cp: 2}"),
]


@pytest.mark.parametrize(("family", "layout"), rows(SEEN, SEEN[2:3]))
def test_pairs_with_images_learn_the_same_on_every_layout(pool: Pool, make: Make, family: str, layout: str, long: bool) -> None:
    """Prompts with none to three images; the bounds are those of `test_image_steps`. DPO's accuracy before the step is that of ties."""
    path, names = make(family), ["dpo", "rm", "sft"] if long else ["dpo"]
    [one] = pool.run(learn, Layout(), path, names, None, path)
    ranks = pool.run(learn, Layout(**yaml.safe_load(layout)), path, names, None, path)
    for objective in names:
        for index, metrics in enumerate(one[objective]):
            expected, bound = counted(metrics), 2e-4 if index < 2 else 2e-3
            if index < 2:
                expected.pop("dpo/accuracy", None)
            many = {key: value for key, value in counted(merge(rank[objective][index] for rank in ranks)).items() if key in expected}
            assert many == pytest.approx(expected, rel=bound, abs=0.05 * bound), (objective, index)
    assert scalars(one["dpo"][1])["actor/grad_norm"] > 1e-3


@pytest.mark.parametrize("name", rows(["dp3_uneven", "tp2_pp2"], []))
def test_muon_learns_the_same_on_every_layout(pool: Pool, model: Path, one_rank: dict[str, list[dict[str, Metric]]], name: str) -> None:
    """A language model and a reward model, whose head is AdamW's."""
    names, muon = ["sft", "rm", "dpo"], MuonSettings(lr=1e-3)
    [one], ranks = pool.run(learn, Layout(), model, names, muon), pool.run(learn, LAYOUTS[name][0], model, names, muon)
    for objective in names:
        for index, metrics in enumerate(one[objective]):
            many, bound = counted(merge(rank[objective][index] for rank in ranks)), 1e-5 if index < 2 else 1e-3
            assert many == pytest.approx(counted(metrics), rel=bound, abs=0.1 * bound), (objective, index)
        assert counted(one[objective][2]) != counted(one_rank[objective][2]), "AdamW's"


def practise(grid: Grid, path: Path) -> dict[str, list[dict[str, Metric]]]:
    """Of each objective: two steps on the same mini-batch."""
    ranks = {name: worker(grid, path, objective) for name, objective in OBJECTIVES.items()}
    return {name: [rank.train(plan(OBJECTIVES[name], 1)) for _ in range(2)] for name, rank in ranks.items()}


def test_learning_shows_on_what_is_learned(pool: Pool, model: Path, one_rank: dict[str, list[dict[str, Metric]]]) -> None:
    for name, steps in pool.run(practise, Layout(), model)[0].items():
        first, second = map(scalars, steps)
        role, loss = "rm" if name == "rm" else "actor", f"{OBJECTIVES[name].name}/loss"
        assert second[loss] < first[loss]
        assert first[f"{role}/grad_norm"] > 1e-3 and first[f"{role}/lr"] == 1e-4
        assert f"{role}/lr" not in one_rank[name][0] and loss in one_rank[name][0]
    dpo = scalars(one_rank["dpo"][0])
    assert dpo["dpo/margin"] == dpo["dpo/chosen_shift"] == 0.0, "the policy starts as the reference"


def test_pairs_stay_whole_and_every_rank_has_as_many_micro_batches() -> None:
    split = plan(BradleyTerry(), dp=3).split
    assert len({len(shard) for shard in split}) == 1
    micro_batches = [members for shard in split for members in shard]
    assert sorted(n for members in micro_batches for n in members) == list(range(2 * PAIRS))
    for members in micro_batches:
        assert [n + 1 for n in members[0::2]] == list(members[1::2]) and all(n % 2 == 0 for n in members[0::2])
        assert sum(len(samples()[n].tokens) for n in members) <= CAPACITY
    with pytest.raises(ValueError, match="does not fit into a micro-batch of 20"):
        mini_batch(BradleyTerry(), samples(), [0.0] * 2 * PAIRS, 1, 20)


def test_a_scored_batch_feeds_every_token_and_judges_the_last() -> None:
    chosen = samples()[:3]
    batch = pack_scored(chosen)
    assert batch.length_N.tolist() == [len(sample.tokens) for sample in chosen] and batch.count_N.tolist() == [1, 1, 1]
    for n, sample in enumerate(chosen):
        mine = batch.seq_T == n
        assert batch.input_T[mine].tolist() == sample.tokens.tolist()
        assert batch.mask_T[mine].tolist() == [False] * (len(sample.tokens) - 1) + [True]


def scores(grid: Grid, path: Path, target: Path) -> list[float]:
    """Trains a reward model a little, saves it, and gives the score of each sample."""
    rank = worker(grid, path, BradleyTerry())
    rank.train(plan(BradleyTerry(), grid.dp_size))
    rank.save(target)
    batch = pack_scored(samples())
    [filled] = rank._trained.forward_tokens([batch], "score", lambda value_R1, row_T, part: value_R1[row_T, 0])
    return filled.extra_T["score"][filled.mask_T].tolist()


def test_transformers_gives_the_scores_of_a_trained_reward_model(pool: Pool, model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    ours = pool.run(scores, Layout(ranks=2, tp=2, ep=2), model, tmp_path / "rm")[0]
    assert directory.read_config(tmp_path / "rm")["num_labels"] == 1
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    with torch.no_grad():
        expected = [float(theirs(torch.tensor(sample.tokens[None].astype(np.int64))).logits) for sample in samples()]
    assert ours == pytest.approx(expected, abs=1e-5) and np.std(ours) > 1e-3


def hits(grid: Grid, logits_RV: torch.Tensor, target_T: torch.Tensor, vocabulary: int) -> list[bool]:
    width = logits_RV.shape[1] // grid.layout.tp
    shard = logits_RV[:, grid.tp_rank * width : (grid.tp_rank + 1) * width].contiguous()
    rows = torch.arange(1, len(logits_RV))
    return likeliest(shard, rows, target_T, grid.groups.tp, vocabulary).tolist()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_likeliest_token_is_found_over_all_shards_and_not_in_the_padding(pool: Pool, tp: int) -> None:
    logits_RV = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
    logits_RV[:, 11] += 5  # padding of the vocabulary
    best_T = logits_RV[1:, :11].argmax(-1)
    target_T = torch.where(torch.arange(59) % 2 == 0, best_T, (best_T + 1) % 11)
    arguments: Any = (logits_RV, target_T, 11)
    for found in pool.run(hits, Layout(ranks=tp, tp=tp), *arguments):
        assert found == [n % 2 == 0 for n in range(59)]
