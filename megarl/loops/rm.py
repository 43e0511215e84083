"""`megarl rm`: a reward model from pairs of responses, saved as a sequence classifier that transformers loads."""

from collections.abc import Mapping
from pathlib import Path

from megarl.algorithms.reward_model import BradleyTerry
from megarl.checks.without_engines import check_rm
from megarl.config import RmConfig
from megarl.loops.supervised import learn_pairs
from megarl.resume.finished import has_finished
from megarl.rewards.scale import ScoreRange, write_range


def rm(config: RmConfig) -> None:
    """Train on the pairs; the reward model is written to runs/<name>/model, its held-out numbers to summary.json.

    The range of the held-out scores is written beside the model: a response that scores outside it is outside the reward model's training
    distribution.
    """

    def finish(model: Path, measured: Mapping[str, float]) -> None:
        write_range(model, ScoreRange(measured["rm/lowest"], measured["rm/highest"]))

    if not has_finished(config):
        learn_pairs(config, BradleyTerry(config.rm.centre), check_rm(config), finish)
