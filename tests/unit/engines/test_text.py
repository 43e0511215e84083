"""The text of a response: what ended it is no part of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.batch import Sample
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.generate import Sampling, text_of
from megarl.models.hf import CONFIG, GENERATION, end_tokens


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["", "with a stop text"])
def test_each_token_that_ends_a_response_is_left_out(stop: tuple[str, ...], tiny_model: Path) -> None:
    tokenizer, second, asked_for, last = load_tokenizer(tiny_model), 60, 61, 62
    sampling = Sampling(1, 1.0, 8, 0, stop_token_ids=[asked_for], stop=stop)
    said = [40, 41]
    for end in (tokenizer.eos_token_id, second, asked_for):
        sample = Sample(np.array([7, *said, end], np.int32), 1, np.zeros(3, np.float32), "stop")
        assert text_of(sample, sampling, tokenizer, {second}) == tokenizer.decode(said)
    completed = Sample(np.array([7, *said, last], np.int32), 1, np.zeros(3, np.float32), "stop")
    assert text_of(completed, sampling, tokenizer, {second}) == tokenizer.decode([*said, last] if stop else said)
    nothing = Sample(np.array([7], np.int32), 1, np.zeros(0, np.float32), "abort")
    assert text_of(nothing, sampling, tokenizer, {second}) == ""


def test_the_end_tokens_are_those_of_the_generation_defaults(tmp_path: Path) -> None:
    """As vLLM has it: config.json's count where there are no generation defaults."""
    for file, content, ends in (
        (CONFIG, {"eos_token_id": 5}, {5}),
        (CONFIG, {"eos_token_id": [5, 6]}, {5, 6}),
        (CONFIG, {}, set()),
        (GENERATION, {"eos_token_id": [7, 8]}, {7, 8}),
        (GENERATION, {"temperature": 1.0}, set()),
    ):
        (tmp_path / file).write_text(json.dumps(content))
        assert end_tokens(tmp_path) == ends
