"""Fixtures of the tests of data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megarl.data.tokenizer import load_tokenizer
from tests.real_tokenizers import MODELS, real_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="package")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreTrainedTokenizerBase]:
    """The tokenizers of published models by name. No test may change them."""
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    for name, path in real_tokenizers(tmp_path_factory.mktemp("tokenizers")).items():
        like = tokenizers.get(MODELS[name].vocabulary)  # the same but for its template; loading takes seconds
        tokenizers[name] = load_tokenizer(path) if like is None else copy.copy(like)
        tokenizers[name].chat_template = (path / "chat_template.jinja").read_text()
    return tokenizers


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model)
