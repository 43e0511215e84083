"""The balance of images between data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import Layout, ModelSettings
from megarl.images import PlacedImage
from megarl.models.description import ModelDescription
from megarl.plan.facts import facts
from megarl.plan.forward import forward_flops
from megarl.plan.parameters import language_elements
from megarl.plan.tower import tower_flops

LENGTH = 4096  # tokens of a sequence whose attention is counted


class TowerWork:
    """The tower's work on images, in tokens: those with which the language model's layers have as much.

    A data-parallel replica shares the work of its layers, and each rank of its first stage does all of the tower's. Of a step's passes
    (log-probs, forward, backward) a frozen tower takes part in half.

    Args:
        model: the model.
        layout: the layout of its ranks.
        trained: whether the tower is trained.
    """

    def __init__(self, model: ModelDescription, layout: Layout, *, trained: bool) -> None:
        self._sizes = model.sizes.vision
        token = forward_flops(facts(model), language_elements(model), LENGTH) / (layout.tp * layout.cp * layout.pp)
        self._share = (1.0 if trained else 0.5) / token

    @classmethod
    def of(cls, settings: ModelSettings, layout: Layout) -> TowerWork | None:
        """The work on images of the model of a run's section `model`; None if it sees none."""
        model = ModelDescription.read(settings.path, drop_images=settings.drop_images)
        return None if model.sizes.vision is None else cls(model, layout, trained=settings.vision == "train")

    def tokens(self, images: Sequence[PlacedImage]) -> int:
        """The tokens that these images are worth beside their own."""
        assert self._sizes is not None
        return round(sum(tower_flops(self._sizes, one.image.tokens) for one in images) * self._share)
