"""The sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.models.vision import VisionSizes

MAMBA, ATTENTION, MIXTURE, MLP = "M*E-"  # kinds of layers that are a single block each; see `Sizes.blocks`
_MAX_PARTS = 1 << 18  # layers x experts; ten times what the largest models have


@dataclass(frozen=True)
class Indexer:
    """The sizes of the indexer that chooses keys for a sparse attention."""

    heads: int
    head_dim: int
    topk: int  # keys that a query attends to
    interleaved: bool  # RoPE rotates neighbouring dimensions, not the two halves


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: those that layouts must divide, and those needed to build it."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int  # per-head dimension of queries and keys
    vocab: int
    ffn: int | None = None  # hidden units of dense MLPs; None: no dense MLPs
    experts: int = 0  # 0: no mixture of experts
    expert_ffn: int = 0
    shared_ffn: int = 0  # hidden units of all shared experts together; 0: no shared experts
    dense: int = 0  # number of first layers that have a dense MLP instead of experts
    # Key heads of its gated delta nets, or groups of its Mamba mixers, which tensor and context parallelism divide; 0: it has none.
    linear_heads: int = 0
    gated: bool = True  # MLPs and experts have a projection of gates
    blocks: str = ""  # the kind of each layer that is attention, a Mamba mixer or an MLP alone; empty: layers have attention and an MLP
    indexer: Indexer | None = None  # None: attention to all keys
    vision: VisionSizes | None = None  # of what sees images; None: a model of text

    @property
    def mixtures(self) -> int:
        """The number of layers with experts."""
        if self.blocks:
            return self.blocks.count(MIXTURE)
        return self.layers - self.dense if self.experts else 0

    @property
    def linear_parts(self) -> str:
        """What `linear_heads` counts, in words."""
        return "groups in its Mamba layers" if self.blocks else "key heads in its gated delta nets"

    @property
    def dense_width(self) -> float:
        """Hidden units of the MLP of the average layer without experts."""
        plain = self.layers - self.mixtures
        return (self.ffn or 0) * (self.blocks.count(MLP) / plain if self.blocks and plain else 1)

    @property
    def matrices(self) -> int:
        """The number of an MLP's or an expert's projections."""
        return 3 if self.gated else 2

    def __post_init__(self) -> None:
        """Raise ConfigError if there are too many layers and experts to list."""
        if self.layers * max(1, self.experts) > _MAX_PARTS:
            raise ConfigError(
                f"model.path: config.json has {self.layers} layers of {self.experts} experts, more than {_MAX_PARTS} together"
            )
