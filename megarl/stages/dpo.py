"""`megarl dpo`: a policy from pairs of responses, without a reward model (DPO, cDPO)."""

from __future__ import annotations

from megarl.config import DpoConfig
from megarl.stages.learning import Pairs, check_preferences, learn_pairs


def check_dpo(config: DpoConfig) -> Pairs:
    """All checks of `megarl dpo`; its pairs."""
    return check_preferences(config, "lm")


def dpo(config: DpoConfig) -> None:
    """Trains on the pairs; leaves the policy in runs/<name>/model and its held-out numbers in summary.json."""
    learn_pairs(config, config.algorithm, check_dpo(config))
