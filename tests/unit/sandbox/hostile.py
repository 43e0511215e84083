"""What a response can make a reward function do: each function takes what it needs to know of the host from `meta`, and returns a score.

Imported in the sandbox by tests/unit/sandbox/test_hostile.py; nothing of it may be called outside of it.
"""

from typing import Any

from tests.unit.sandbox import breaking, meddling, misreporting, neighbours, reaching  # noqa: F401  # each adds its attacks
from tests.unit.sandbox.attacks import HOSTILE as HOSTILE


def score(response: str, meta: dict[str, Any]) -> Any:
    return 1.0 if response == "right" else HOSTILE[response](meta)
