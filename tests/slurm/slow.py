"""A reward function that makes a step last."""

import time
from typing import Any

from tests.e2e import rewards


def share_of_letters(**given: Any) -> float:
    time.sleep(0.07)
    return rewards.share_of_letters(**given)
