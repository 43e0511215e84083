"""The work of a vision tower in the split of a step."""

from collections.abc import Sequence

from megarl.config import Layout
from megarl.image_source import ImageSource
from megarl.images import Image, PlacedImage
from megarl.models.description import ModelDescription
from megarl.models.registry import completed
from megarl.ranks.step_plan import split_samples
from megarl.ranks.tower_work import TowerWork
from tests.published_models import QWEN3_VL_30B_A3B


def images(*sides: int) -> list[PlacedImage]:
    """Of so many tokens a side."""
    return [PlacedImage(0, Image(f"{side}", (32 * side, 32 * side), (1, 2 * side, 2 * side), 2, ImageSource("a"))) for side in sides]


def test_images_weigh_more_where_more_ranks_share_the_language_model() -> None:
    """Of Qwen3-VL-30B-A3B, whose tokens pass through 3 billion parameters, and patches, four to a token, through 0.4 billion."""
    model = ModelDescription.of(completed(QWEN3_VL_30B_A3B))
    one, eight, trained = (
        TowerWork(model, Layout(ranks=ranks, tp=ranks), trained=trained) for ranks, trained in ((1, False), (8, False), (8, True))
    )
    worth = one.tokens(images(32))
    assert 0.1 * 1024 < worth < 0.5 * 1024
    assert abs(eight.tokens(images(32)) - 8 * worth) <= 8 and abs(trained.tokens(images(32)) - 16 * worth) <= 16
    assert one.tokens(images(64)) > 4 * worth, "attention between its patches grows with their square"
    assert one.tokens([]) == 0


def test_responses_with_images_are_dealt_by_their_work() -> None:
    """Six of equal length, two of them with images: their rank gets fewer of the others, and no micro-batch has more tokens for that."""
    lengths, more = [[100]] * 6, [150, 0, 150, 0, 0, 0]

    def dealt(more_N: Sequence[int] | None) -> list[list[int]]:
        [shards] = split_samples(lengths, 1, 2, 200, more_N=more_N)
        assert all(len(micro_batch) <= 2 for shard in shards for micro_batch in shard)
        return [sorted(sample for micro_batch in shard for sample in micro_batch) for shard in shards]

    assert all((0 in one) != (2 in one) for one in dealt(more))
    assert dealt([400, 0, 0, 0, 0, 0])[0] == [0] and dealt(None) == dealt([0] * 6)
