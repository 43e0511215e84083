"""FLOPs of a vision tower, and the bytes that it needs beside its weights."""

from megarl.models.vision import VisionSizes


def tower_flops(sizes: VisionSizes, tokens: float) -> float:
    """FLOPs of a forward pass over one image of so many tokens: of matrices, and of attention between all of its patches."""
    patches, hidden, wide = tokens * sizes.merge**2, sizes.hidden, sizes.hidden * sizes.merge**2
    block = 4 * hidden**2 + 2 * hidden * sizes.ffn + 2 * hidden * patches
    merged = (wide**2 + wide * sizes.out) * (1 + len(sizes.deepstack))
    return 2 * (patches * (sizes.pixels * hidden + sizes.depth * block) + tokens * merged)


def tower_bytes(sizes: VisionSizes, tokens: int, item: int, *, trained: bool) -> int:
    """Bytes of a pass over images of so many tokens: pixels, features, and what one block computes, or every block keeps for a backward.

    Args:
        sizes: the tower's sizes.
        tokens: of all images of a micro-batch.
        item: bytes of an element.
        trained: whether the tower is trained.
    """
    patches, features = tokens * sizes.merge**2, 1 + len(sizes.deepstack)
    # Two norms' inputs and outputs, queries, keys and values, the former two turned, the attention's output, the MLP's two inner values.
    block = patches * (item * (10 * sizes.hidden + 2 * sizes.ffn) + 4 * sizes.heads)
    merged = item * tokens * (3 * sizes.hidden * sizes.merge**2 + sizes.out) * features
    return 4 * patches * sizes.pixels + merged + block * (sizes.depth if trained else 1)
