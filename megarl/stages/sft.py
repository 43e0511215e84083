"""`megarl sft`: supervised training on response tokens, on the same ranks and layouts as the RL loop."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.algorithms.sft import Sft
from megarl.config import SftConfig
from megarl.data.demonstrations import Demonstration, mix
from megarl.stages.checks import check_sft
from megarl.stages.learning import learn, sample
from megarl.workers.learner import MiniBatch, mini_batch


def sft(config: SftConfig) -> None:
    """Trains on the demonstrations; leaves the model in runs/<name>/model."""
    shown, objective, settings = check_sft(config), Sft(), config.sft

    def plan(chosen: Sequence[Demonstration]) -> MiniBatch:
        return mini_batch(objective, [sample(one) for one in chosen], [0.0] * len(chosen), config.layout.dp, settings.micro_batch_tokens)

    def draw(step: int, indices: list[int]) -> MiniBatch:
        weak = step > settings.steps * (1 - config.data.corrupt_last)
        share = config.data.corrupt_copy if weak else 0.0
        return plan(mix(shown.right, shown.wrong, indices, share, config.seed, step))

    learn(config, objective, len(shown.right), draw, plan(shown.held_out) if shown.held_out else None)
