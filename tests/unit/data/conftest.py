"""Fixtures of the tests of data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megarl.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_model)
