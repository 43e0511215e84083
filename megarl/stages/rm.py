"""`megarl rm`: a reward model from pairs of responses, saved as a sequence classifier that transformers loads."""

from __future__ import annotations

from megarl.algorithms.reward_model import BradleyTerry
from megarl.config import RmConfig
from megarl.stages.checks import check_rm
from megarl.stages.learning import learn_pairs


def rm(config: RmConfig) -> None:
    """Trains on the pairs; leaves the reward model in runs/<name>/model and its held-out numbers in summary.json."""
    learn_pairs(config, BradleyTerry(), check_rm(config))
