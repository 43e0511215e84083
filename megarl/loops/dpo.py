"""`megarl dpo`: a policy from pairs of responses, without a reward model (DPO, cDPO)."""

from megarl.checks.without_engines import check_dpo
from megarl.config import DpoConfig
from megarl.loops.supervised import learn_pairs
from megarl.resume.finished import has_finished


def dpo(config: DpoConfig) -> None:
    """Train on the pairs; the policy is written to runs/<name>/model, its held-out numbers to summary.json."""
    if not has_finished(config):
        learn_pairs(config, config.algorithm, check_dpo(config))
