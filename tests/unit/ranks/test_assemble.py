"""What a rank fetches of a response is in its place, however many parts it comes in."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch import Batch, Sample, pack
from megarl.ranks import assemble

STAGES = [[0, 2], [1]]


def test_experts_of_a_response_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry t of layer l has the experts 10 t + l; the second response was not reported."""
    monkeypatch.setattr(assemble, "ray", SimpleNamespace(get=lambda references: list(references)))

    def part(begin: int, end: int) -> list[Any]:
        return [
            (10 * np.arange(begin, end)[:, None, None] + np.array(stage)[:, None]).repeat(2, axis=2).astype(np.uint8) for stage in STAGES
        ]

    plan: Any = SimpleNamespace(stages=STAGES, experts_N=[[part(0, 4), part(4, 5), part(5, 9)], None, [part(0, 3)]])
    found = assemble.routed_experts(plan, [2, 1, 0], torch.tensor([3, 2, 9]), [1, 2])
    assert found is not None and found.shape == (14, 2, 2)
    rows = [*range(3), None, None, *range(9)]
    assert found[:, :, 0].tolist() == [[-1, -1] if row is None else [10 * row + 1, 10 * row + 2] for row in rows]
    assert found[:, :, 1].equal(found[:, :, 0])


def test_rows_of_numbers_reach_the_ranks_that_split_the_samples_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher's rows [T, 3] beside a column [T], of four samples in two micro-batches, to ranks with an empty micro-batch."""
    monkeypatch.setattr(assemble, "ray", SimpleNamespace(put=lambda value: value, get=lambda references: list(references)))
    lengths = (4, 2, 3, 5)
    samples = [Sample(np.full(length + 1, n, np.int32), 1, np.zeros(length, np.float32), "stop") for n, length in enumerate(lengths)]

    def batch_of(*chosen: int) -> Batch:
        return pack([samples[n] for n in chosen])

    def rows(batch: Batch) -> torch.Tensor:
        return torch.stack([100 * batch.input_T + 10 * batch.position_T + column for column in range(3)], dim=1).float()

    theirs = [(1, 3), (0, 2)]
    made = [batch.with_extra(one=rows(batch)[:, 0], several=rows(batch)) for batch in (batch_of(*chosen) for chosen in theirs)]
    stored = assemble.columns(made, theirs, ["one", "several"])
    mine = [(0, 1, 2), (), (3,)]
    filled = assemble.with_columns([batch_of(*chosen) for chosen in mine], mine, stored, ["one", "several"])
    for batch in (filled[0], filled[2]):
        assert torch.equal(batch.extra_T["several"], rows(batch)) and torch.equal(batch.extra_T["one"], rows(batch)[:, 0])
    assert len(filled[1].extra_T["several"]) == 0


def test_numbers_move_to_the_same_response_after_another_prompt() -> None:
    """Each response token's number is the token; entries of the prompt have the first one's; an empty response takes none."""
    responses: list[list[int]] = [[11, 12, 13], [], [21, 22], []]
    prompts, shown = (4, 2, 1, 3), (2, 5, 6, 1)

    def batch_of(lengths: tuple[int, ...]) -> Batch:
        pairs = zip(lengths, responses, strict=True)
        texts = [(prompt, np.array([*range(prompt), *said], np.int32)) for prompt, said in pairs]
        return pack([Sample(tokens, prompt, np.zeros(len(tokens) - prompt, np.float32), "stop") for prompt, tokens in texts])

    read, own = batch_of(shown), batch_of(prompts)
    rows_TC = torch.stack([read.target_T, -read.target_T], 1)
    moved_TC = assemble.at_response(rows_TC, read, own)
    for n, said in enumerate(responses):
        mine = moved_TC[own.seq_T == n]
        if said:
            assert mine[:, 0].tolist() == [said[0]] * (prompts[n] - 1) + said
        assert mine.shape == (len(said) + prompts[n] - 1, 2) and mine[:, 0].equal(-mine[:, 1])
