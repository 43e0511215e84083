"""A teacher that reads other prompts: each response token gets the number that the same model gives it after that prompt, on any layout."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from megarl.algorithms import Algorithm, PolicyAlgorithm
from megarl.batch import Sample
from megarl.config import DistillationSettings, Layout, OptimizerSettings
from megarl.observe.metrics import merge
from megarl.parallel.grid import Grid
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.step_plan import StepPlan
from megarl.ranks.step_worker import RLSpec
from tests.distributed.loop_ranks import object_store, rl_rank, teacher_column
from tests.distributed.replayed_steps import Token
from tests.distributed.split_episodes import REWARDS, plan_of
from tests.distributed.tiny_training import TINY, make_checkpoint
from tests.image_samples import END, PAD, START
from tests.image_samples import samples as pictured
from tests.rank_pool import Pool
from tests.rows import rows
from tools.make_tiny_model import build

SHAPES = ((4, 9, 6), (7, 3, 5), (5, None, 8), (3, 12, 7))  # tokens of the prompt, of what the teacher reads, of the response
SMALL, LARGE = 21, 1000  # capacities of a micro-batch
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "cp2": Layout(ranks=2, cp=2),
    "pp2": Layout(ranks=2, pp=2),
    "dp2": Layout(ranks=2),
    "tp2_cp2": Layout(ranks=4, tp=2, cp=2),
}


@dataclass(frozen=True)
class Case:
    """A step of a policy that is its own teacher."""

    path: Path
    top_k: int | None
    capacity: int = SMALL
    images: bool = False


@dataclass(frozen=True)
class Seen:
    """What one rank saw: the teacher's column of the loss tokens that it speaks for, and the update's metrics."""

    column: dict[Token, list[float]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Responses:
    """The policy's samples, what the teacher reads in the place of each prompt, and the samples as the teacher reads them."""

    samples: list[Sample]
    shown_N: list[np.ndarray | None]
    read: list[Sample]


def responses(case: Case) -> Responses:
    """Of text, or of none to three images in a prompt."""
    samples, shown_N = _with_images(case.path) if case.images else _texts()
    read = list[Sample]()
    for sample, shown in zip(samples, shown_N, strict=True):
        if shown is None:
            read.append(sample)
            continue
        starts = [place + 1 for place, token in enumerate(shown.tolist()) if token == START] if case.images else []
        images = [replace(placed, start=start) for placed, start in zip(sample.images, starts, strict=True)]
        tokens = np.array([*shown, *sample.tokens[sample.prompt_length :]], np.int32)
        read.append(replace(sample, tokens=tokens, prompt_length=len(shown), images=images))
    return Responses(samples, shown_N, read)


def _with_images(path: Path) -> tuple[list[Sample], list[np.ndarray | None]]:
    draw, own, shown_N = np.random.default_rng(5), pictured(path), list[np.ndarray | None]()
    for sample in own:
        tokens = draw.integers(10, 128, 4).tolist()
        for placed in sample.images:
            tokens += [START, *[PAD] * placed.image.tokens, END, *draw.integers(10, 128, 5).tolist()]
        shown_N.append(np.array(tokens, np.int32))
    return [replace(sample, rollout_logp=-draw.random(sample.response_length).astype(np.float32)) for sample in own], [None, *shown_N[1:]]


def _texts() -> tuple[list[Sample], list[np.ndarray | None]]:
    draw, samples, shown_N = np.random.default_rng(5), list[Sample](), list[np.ndarray | None]()
    for prompt, shown, response in SHAPES:
        tokens = draw.integers(1, TINY["vocab_size"], prompt + response).astype(np.int32)
        samples.append(Sample(tokens, prompt, -draw.random(response).astype(np.float32), "stop"))
        shown_N.append(None if shown is None else draw.integers(1, TINY["vocab_size"], shown).astype(np.int32))
    return samples, shown_N


def rank_of(grid: Grid, case: Case) -> tuple[ModelWorker, PolicyAlgorithm]:
    algorithm: PolicyAlgorithm = TypeAdapter(Algorithm).validate_python({"type": "reinforce"})
    teaching = DistillationSettings.model_validate({"prompt": "{prompt} {answer}", "top_k": case.top_k})
    spec = RLSpec(algorithm, OptimizerSettings(), updates=1, temperature=0.7, distillation=teaching)
    return rl_rank(grid, case.path, spec, "policy", "teacher"), algorithm


def step(grid: Grid, case: Case) -> Seen:
    """One step on the policy's samples, after which the teacher's prompts are shown to it."""
    (rank, algorithm), given = rank_of(grid, case), responses(case)
    plan: StepPlan = replace(plan_of(algorithm, given.samples, grid.dp_size, case.capacity), shown_N=given.shown_N)
    with object_store():
        rank.forward(plan.part(grid.dp_rank))
        column = teacher_column(rank)
        measured = rank.advantages(REWARDS, 0.0, False)
        measured = merge([measured, rank.update(0)])
    names = ("actor/grad_norm", "distillation/reverse_kl")
    return Seen(column, {name: value for name in names if name in measured and (value := measured[name].value()) is not None})


def read(grid: Grid, case: Case) -> dict[Token, list[float]]:
    """The same column, of a plan whose samples are what the teacher reads."""
    rank, algorithm = rank_of(grid, case)
    with object_store():
        rank.forward(plan_of(algorithm, responses(case).read, grid.dp_size, LARGE))
    return teacher_column(rank)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "model", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("name", "top_k"), rows([(name, top_k) for name in LAYOUTS for top_k in (None, 3)], [("cp2", None), ("pp2", 3), ("tp2", 3)])
)
def test_a_response_is_scored_after_what_the_teacher_reads(pool: Pool, path: Path, name: str, top_k: int | None) -> None:
    assert_scored(pool, LAYOUTS[name], Case(path, top_k))


@pytest.mark.long
@pytest.mark.parametrize("name", ["tp2", "cp2", "pp2"])
def test_a_response_to_images_is_scored_where_the_teacher_reads_them(pool: Pool, tmp_path: Path, name: str) -> None:
    """The images stand elsewhere in what it reads; the first response has the prompt itself."""
    build(tmp_path / "model", layers=4, hidden=128, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    assert_scored(pool, LAYOUTS[name], Case(tmp_path / "model", None, capacity=400, images=True))


def assert_scored(pool: Pool, layout: Layout, case: Case) -> None:
    """One rank and a layout give each response token the number that it has where the teacher's prompt is the sample's own."""
    one = pool.run(step, Layout(), case)[0]
    direct = pool.run(read, Layout(), case)[0]
    assert len(direct) == sum(sample.response_length for sample in responses(case).samples)
    assert one.column == {token: pytest.approx(row, abs=3e-5) for token, row in direct.items()}
    ranks = pool.run(step, layout, case)
    joined = {token: row for rank in ranks for token, row in rank.column.items()}
    assert joined == {token: pytest.approx(row, abs=3e-5) for token, row in direct.items()}
    norms = [rank.metrics["actor/grad_norm"] for rank in ranks if "actor/grad_norm" in rank.metrics]
    assert one.metrics["actor/grad_norm"] > 1e-4
    assert norms == pytest.approx([one.metrics["actor/grad_norm"]] * len(norms), rel=1e-4) and norms
