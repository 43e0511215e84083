"""`megarl sft`: supervised training on the assistant's messages, on the same ranks and layouts as the RL loop."""

from collections.abc import Sequence

from megarl.algorithms.sft import Sft
from megarl.checks.without_engines import check_sft
from megarl.config import SftConfig
from megarl.data.conversations import Conversation, sample
from megarl.loops.supervised import Stage, learn
from megarl.ranks.supervised_worker import MiniBatch, mini_batch
from megarl.ranks.tower_work import TowerWork
from megarl.resume.finished import has_finished


def sft(config: SftConfig) -> None:
    """Train on the conversations; the model is written to runs/<name>/model."""
    if has_finished(config):
        return
    data, objective, settings = check_sft(config), Sft(config.sft.aggregation, config.sft.distillation), config.sft

    layout, tower = config.layout, TowerWork.of(config.model, config.layout)

    def plan(batch: Sequence[Conversation]) -> MiniBatch:
        taught_N = [one.taught for one in batch if one.taught is not None] or None
        given = [sample(one) for one in batch], [0.0] * len(batch)
        return mini_batch(objective, *given, layout.dp, settings.micro_batch_tokens, tower, taught_N)

    def draw(indices: list[int]) -> MiniBatch:
        return plan([data.train[index] for index in indices])

    held_out = plan(data.held_out) if data.held_out else None
    first = (data.train or data.held_out)[:1]
    learn(Stage(config, objective, draw, held_out), len(data.train), shuffle=config.data.shuffle, first=first)
