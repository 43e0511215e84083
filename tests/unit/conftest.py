"""Fixtures of the tests in one process."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megarl.data.tokenizer import load_tokenizer
from megarl.host.termination import SIGNALS
from tests.real_tokenizers import MODELS, real_tokenizers
from tools.make_tiny_model import build

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The command line takes signals over; after a test that runs it in this process, they mean what they meant before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of texts and images. No test may change it."""
    out = tmp_path_factory.mktemp("seeing") / "model"
    build(out, layers=2, hidden=64, experts=4, expert_hidden=32, seed=1, family="qwen3_vl_moe")
    return out


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizers of published models by name. No test may change them."""
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    for name, path in real_tokenizers(tmp_path_factory.mktemp("tokenizers")).items():
        like = tokenizers.get(MODELS[name].vocabulary)  # the same but for its template; loading takes seconds
        tokenizers[name] = load_tokenizer(path) if like is None else copy.copy(like)
        tokenizers[name].chat_template = (path / "chat_template.jinja").read_text()
    return tokenizers
