"""A teacher's engine: its columns are what the model says of the tokens, at the sampling temperature, in every context."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch import Sample, pack
from megarl.config import TeacherEngines
from megarl.data.taught import LEAST
from megarl.engines import teacher
from megarl.engines.engine import RolloutError, Scoring, Setup, TokenScores, as_rollout
from megarl.engines.teacher import Columns, EngineTeacher, named
from megarl.models.image_processor import ImageProcessor
from tests.engines.engine_host import Host
from tests.engines.test_images import logp
from tests.engines.transformers_reference import TIMEOUT_S
from tests.image_samples import samples
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

LONGEST, K, VOCABULARY = 24, 5, 120  # the policy's vocabulary is smaller than the teacher's
UNITS = [[(7, 0, 0), (3, 1, 0)], [(4, 1, 1), (5, 2, 0), (9, 3, 0)]]


def responses() -> list[Sample]:
    """A response; one of two contexts; a prompt of one token with nothing after it; and one of the greatest length."""
    draw = np.random.default_rng(1)

    def sample(length: int, prompt: int, starts: tuple[int, ...] = ()) -> Sample:
        tokens = draw.integers(3, VOCABULARY, length).astype(np.int32)
        return Sample(tokens, prompt, np.zeros(length - prompt, np.float32), "stop", starts=starts)

    return [sample(9, 4), sample(17, 3, (11,)), sample(1, 1), sample(LONGEST, LONGEST - 1)]


async def scored(
    path: Path, temperature: float, top_k: int | None, longest: int = LONGEST, shown: Sequence[Sample] = ()
) -> list[list[np.ndarray]]:
    """The columns of `UNITS`, of the responses above or of those shown."""
    one, columns = EngineTeacher.__new__(EngineTeacher), Columns(top_k, VOCABULARY)
    from megarl.engines.vllm.engine import VllmEngine

    one._engine, one._columns, one._timeout_s = VllmEngine("teacher 0"), columns, TIMEOUT_S
    setup = Setup(path, "float32", as_rollout(TeacherEngines(kv_cache_mb=32), longest), 1, gpu=False)
    scoring = Scoring(named(top_k, 128, VOCABULARY), temperature)

    async def given(response: Sample) -> Sample:
        return response

    class Store:
        put = staticmethod(lambda value: value)

    kept, teacher.ray = teacher.ray, Store
    try:
        await one._engine.start(Setup(**{**vars(setup), "scoring": scoring}))
        stored = await one.score(UNITS, [given(response) for response in shown or responses()])
    finally:
        teacher.ray = kept
        await one.close()
    assert [samples for samples, _ in stored] == [[7, 3], [4, 5, 9]]
    return [[column[teacher.COLUMN] for column in unit] for _, unit in stored]


def logits(path: Path, tokens: np.ndarray, temperature: float) -> Any:
    """log softmax of transformers' logits at every token but the last, float64 [T, V]."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return (model(torch.tensor(tokens[None].astype(np.int64))).logits[0, :-1].double() / temperature).log_softmax(-1)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, K), (1.0, None)])
def test_columns_are_the_models(host: Host, tiny: Path, temperature: float, top_k: int | None) -> None:
    units, given = host.run(scored, tiny, temperature, top_k), responses()
    texts = [given[0].tokens, given[1].tokens[:11], given[1].tokens[11:], given[2].tokens, given[3].tokens]
    for tokens, column in zip(texts, [column for unit in units for column in unit], strict=True):
        assert column.dtype == np.float32 and len(column) == len(tokens) - 1
        if len(tokens) == 1:
            continue
        exact_TV = logits(tiny, tokens, temperature)
        if top_k is None:
            assert column == pytest.approx(exact_TV.gather(1, torch.tensor(tokens[1:, None].astype(np.int64)))[:, 0].numpy(), abs=1e-5)
            continue
        best_TK = exact_TV[:, :VOCABULARY].topk(top_k)
        assert np.array_equal(column[:, :top_k], best_TK.indices.numpy())
        assert column[:, top_k:-1] == pytest.approx(best_TK.values.numpy(), abs=1e-5)
        assert column[:, -1] == pytest.approx((1 - best_TK.values.exp().sum(1)).log().numpy(), abs=1e-5)
    assert sum(map(len, (column for unit in units for column in unit))) == len(pack(given))


def test_what_the_named_tokens_leave_is_never_nothing() -> None:
    token_TC, logp_TC = np.array([[9, 4, 2]], np.int32), np.log(np.array([[1e-9, 0.75, 0.25]], np.float32))
    row = Columns(2, 10).column(TokenScores(token_TC, logp_TC))[0]
    assert row == pytest.approx([4, 2, np.log(0.75), np.log(0.25), np.log(LEAST)], abs=1e-6)


def test_a_teacher_that_names_too_few_of_the_policys_tokens_is_refused() -> None:
    scores = TokenScores(np.array([[1, 9, 2], [1, 3, 2]], np.int32), np.full((2, 3), -1.0, np.float32))
    with pytest.raises(RolloutError, match=r"distillation.top_k=2: of 2 tokens that the teacher names at one place, 1 are of"):
        Columns(2, 9).column(scores)


@pytest.mark.long
def test_a_teacher_sees_the_images_of_every_context(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "model"
    build(path, layers=2, hidden=64, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe", initializer_range=0.12)
    first, second, one, text = samples(path, (2, 3, 1, 0))
    moved = [replace(placed, start=placed.start + len(first.tokens)) for placed in second.images]
    both = replace(
        first,
        tokens=np.concatenate([first.tokens, second.tokens]),
        rollout_logp=np.zeros(len(first.tokens) + len(second.tokens) - first.prompt_length, np.float32),
        starts=(len(first.tokens),),
        images=[*first.images, *moved],
    )
    units = host.run(scored, path, 0.7, None, 256, [text, both, one, text])
    model, processor = transformers_model(path).eval(), ImageProcessor(path)
    for sample, column in zip([text, first, second, one, text], [column for unit in units for column in unit], strict=True):
        assert column == pytest.approx(logp(model, processor, replace(sample, prompt_length=1), 0.7).numpy(), abs=1e-5)
