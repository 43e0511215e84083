"""The reward model on one rank: one score per response.

Axes: N responses.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.batch import pack_scored
from megarl.ranks.assemble import fetch
from megarl.ranks.critic import values
from megarl.ranks.megatron_worker import MegatronWorker, RankSettings
from megarl.ranks.step_plan import ScoringPlan

if TYPE_CHECKING:
    from megarl.parallel.grid import Grid
    from megarl.ranks.model import Model


class RewardModel:
    """A frozen value model whose output at a response's last token is the score."""

    def __init__(self, model: Model, grid: Grid) -> None:
        self._model, self._grid = model, grid

    def scores(self, plan: ScoringPlan) -> dict[int, float]:
        """Score the plan's responses; return the scores that this rank reports: those of its data-parallel share whose last token it holds.

        Raises FloatingPointError if a score is not finite.
        """
        members = plan.split[self._grid.dp_rank]
        batches = [pack_scored(fetch(plan.payload_N, chosen)) for chosen in members]
        score_of: dict[int, float] = {}
        for chosen, batch in zip(members, self._model.forward_tokens(batches, "score", values), strict=True):
            here_T = batch.mask_T & ~batch.extra_T["score"].isnan()
            score_of |= {
                chosen[n]: score for n, score in zip(batch.seq_T[here_T].tolist(), batch.extra_T["score"][here_T].tolist(), strict=True)
            }
        return score_of if self._grid.is_last_stage and self._grid.tp_rank == 0 else {}


class RewardWorker(MegatronWorker):
    """One rank of a group that holds only a reward model, outside a training run.

    Args:
        rank: its rank in the group.
        settings: the group's settings.
        path: the model's Hugging Face directory.
    """

    def __init__(self, rank: int, settings: RankSettings, path: Path) -> None:
        super().__init__(rank, settings)
        self._path = path

    def build_models(self) -> None:
        """Build the reward model."""
        self._reward = RewardModel(self._model(self._path, "value"), self._grid)

    def rewards(self, plan: ScoringPlan) -> dict[int, float]:
        """Score the plan's responses; return the scores that this rank reports, by response."""
        return self._reward.scores(plan)
