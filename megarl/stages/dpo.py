"""`megarl dpo`: a policy from pairs of responses, without a reward model (DPO, cDPO)."""

from __future__ import annotations

from megarl.config import DpoConfig
from megarl.stages.finished import has_finished
from megarl.stages.learning import learn_pairs
from megarl.stages.rank_checks import check_dpo


def dpo(config: DpoConfig) -> None:
    """Train on the pairs; the policy is written to runs/<name>/model, its held-out numbers to summary.json."""
    if not has_finished(config):
        learn_pairs(config, config.algorithm, check_dpo(config))
