"""Fixtures of the tests of data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megarl.data.tokenizer import load_tokenizer
from tests.unit.data.templates import TEMPLATES, dressed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def tokenizers(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The tiny tokenizer with each of the templates."""
    return {name: dressed(tokenizer, name) for name in TEMPLATES}
