"""A language model that sees images: Qwen3-VL's vision tower, its features in the sequence, and multimodal RoPE.

The tower is on every rank of the first pipeline stage, whole: each of these computes the features of all images of the
micro-batch, and takes those of its own rows (its share of the sequence under sequence and context parallelism). Features of the tower's
last block replace the embeddings of the image's tokens; those of earlier blocks (deepstack) are added to the output of the first language
layers, which `check_layout` keeps on the first chunk. What belongs to a micro-batch travels in its `ImageSeqParams`, which layers see in
recomputation, too.

Axes: I images, P patches of all of them, F features (tokens of images), D hidden size, R rows of this rank's sequence before sequence
parallelism, A rows of the packed sequence of all context-parallel ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megarl.images import Image
from megarl.models.image_processor import ImageProcessor
from megarl.models.vision import VisionSizes
from megarl.parallel.attention import repeatable

EPSILON = 1e-6  # of the tower's norms
THETA = 10000.0  # of its rotary embedding


@dataclass
class ImageSeqParams(PackedSeqParams):
    """The bounds of packed sequences, with their images."""

    images: Sequence[Image] = ()  # of the micro-batch, in the order of their features
    axes_3A: Tensor | None = None  # int64, each row's positions by frame, row and column
    row_F: Tensor | None = None  # int64, the rows of this rank that hold tokens of images
    feature_F: Tensor | None = None  # int64, their features
    deepstack: Sequence[Tensor] = ()  # for each of the first layers, the features of this rank's share of the rows
    share_F: Tensor | None = None  # int64, these rows


class Tower(nn.Module):
    """Qwen3-VL's vision tower. Names of parameters are those of published checkpoints.

    Args:
        sizes: its sizes.
        dtype: of its parameters.
    """

    def __init__(self, sizes: VisionSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        patch = (sizes.frames, sizes.patch, sizes.patch)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv3d(sizes.channels, sizes.hidden, patch, patch)})
        self.pos_embed = nn.Embedding(sizes.side**2, sizes.hidden)
        self.blocks = nn.ModuleList([_Block(sizes) for _ in range(sizes.depth)])
        self.merger = _Merger(sizes, joined=False)
        self.deepstack_merger_list = nn.ModuleList([_Merger(sizes, joined=True) for _ in sizes.deepstack])
        self.to(dtype)

    def forward(self, pixels: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """Compute the features of images.

        Args:
            pixels: [P, channels * frames * patch * patch], as the model's processor cuts them: squares of merge x merge patches, one
                after the other.
            grids: each image's patches by frame, row and column.

        Returns:
            [F, D] of the last block, then of each deepstack block.
        """
        proj: Any = self.patch_embed["proj"]
        x_PH = F.linear(pixels.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)
        row_P, column_P, height_P, width_P = self._places(grids, pixels.device)
        x_PH = x_PH + self._positions(row_P, column_P, height_P, width_P).to(x_PH.dtype)
        turn = self._turns(row_P, column_P)
        lengths = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
        taken = list[Tensor]()
        for index, block in enumerate(self.blocks):
            x_PH = block(x_PH, turn, lengths)
            if index in self.sizes.deepstack:
                taken.append(self.deepstack_merger_list[len(taken)](x_PH))
        return [self.merger(x_PH), *taken]

    def _places(self, grids: Sequence[tuple[int, int, int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The row, column, rows and columns of each patch, int64 [P]."""
        merge, places = self.sizes.merge, list[Tensor]()
        for frames, rows, columns in grids:
            row, column = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
            squares = [place.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten() for place in (row, column)]
            sizes = [torch.full_like(squares[0], size) for size in (rows, columns)]
            places.append(torch.stack([*squares, *sizes]).repeat(1, frames))
        row_P, column_P, height_P, width_P = torch.cat(places, dim=1)
        return row_P, column_P, height_P, width_P

    def _positions(self, row_P: Tensor, column_P: Tensor, height_P: Tensor, width_P: Tensor) -> Tensor:
        """The learned positions, interpolated from their grid to the image's, corner to corner: [P, hidden]."""
        side = self.sizes.side
        taps = []
        for place_P, size_P in ((row_P, height_P), (column_P, width_P)):
            source_P = place_P.float() * (side - 1) / (size_P - 1).clamp(min=1)
            below_P = source_P.floor()
            low_P = below_P.long()
            taps.append(((low_P, 1 - (source_P - below_P)), ((low_P + 1).clamp(max=side - 1), source_P - below_P)))
        parts = [self.pos_embed(row * side + column) * (a * b)[:, None] for row, a in taps[0] for column, b in taps[1]]
        return torch.stack(parts, dim=1).sum(1)

    def _turns(self, row_P: Tensor, column_P: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each patch's rotation, float32 [P, 1, head]: half of the pairs turn by row, half by column."""
        dim = self.sizes.hidden // self.sizes.heads // 2
        speed = 1.0 / (THETA ** (torch.arange(0, dim, 2, dtype=torch.float32, device=row_P.device) / dim))
        angle = torch.cat([place[:, None].float() * speed for place in (row_P, column_P)], dim=-1)
        angle = torch.cat([angle, angle], dim=-1)[:, None]
        return angle.cos(), angle.sin()


class _Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); attention is between the patches of a frame."""

    def __init__(self, sizes: VisionSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1, self.norm2 = (nn.LayerNorm(sizes.hidden, eps=EPSILON) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(sizes.hidden, 3 * sizes.hidden), "proj": nn.Linear(sizes.hidden, sizes.hidden)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(sizes.hidden, sizes.ffn), "linear_fc2": nn.Linear(sizes.ffn, sizes.hidden)})

    def forward(self, x_PH: Tensor, turn: tuple[Tensor, Tensor], lengths: list[int]) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x_PH)).unflatten(1, (3, self.heads, -1)).unbind(1)
        q, k = (_turned(x, *turn) for x in (q, k))
        parts = zip(*(x.transpose(0, 1)[None].split(lengths, dim=2) for x in (q, k, v)), strict=True)
        attended = [repeatable(partial(F.scaled_dot_product_attention, *part)) for part in parts]
        x_PH = x_PH + self.attn["proj"](torch.cat(attended, dim=2)[0].transpose(0, 1).flatten(1))
        inner = F.gelu(self.mlp["linear_fc1"](self.norm2(x_PH)), approximate="tanh")
        return x_PH + self.mlp["linear_fc2"](inner)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head / 2) in float32."""
    one, two = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-two, one], dim=-1) * sin).to(x.dtype)


class _Merger(nn.Module):
    """A square of patches to one token: norm, two linear layers. `joined`: the norm is over the whole square, not over each patch."""

    def __init__(self, sizes: VisionSizes, *, joined: bool) -> None:
        super().__init__()
        self.wide = sizes.hidden * sizes.merge**2
        self.norm = nn.LayerNorm(self.wide if joined else sizes.hidden, eps=EPSILON)
        self.linear_fc1, self.linear_fc2 = nn.Linear(self.wide, self.wide), nn.Linear(self.wide, sizes.out)

    def forward(self, x_PH: Tensor) -> Tensor:
        normed = self.norm(x_PH.view(-1, self.norm.normalized_shape[0]))
        return self.linear_fc2(F.gelu(self.linear_fc1(normed.view(-1, self.wide))))


class ImageModel(GPTModel):
    """Megatron's language model, which also takes `ImageSeqParams`. With other sequence parameters it computes what GPTModel does."""

    def add_vision(self, sizes: VisionSizes, images: ImageProcessor | None) -> None:
        """Give the chunk what it needs of the tower: on the first stage all of it.

        Args:
            sizes: its sizes.
            images: cuts images into patches; None: the model is given none.
        """
        self.sections, self.images = sizes.sections, images
        if self.pre_process:
            self.vision = Tower(sizes, self.config.params_dtype)
            for parameter in self.vision.parameters():  # each rank has the gradient of its own rows: summed over their shards
                parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *given: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        hidden, rotation, *rest = super()._preprocess(input_ids, position_ids, *given, packed_seq_params=packed_seq_params, **named)
        if not isinstance(packed_seq_params, ImageSeqParams):
            if self.pre_process and self._is_trained:  # every micro-batch gives every parameter a gradient, as Megatron's overlaps need
                hidden = hidden + sum(parameter.sum() for parameter in self.vision.parameters()) * 0
            return hidden, rotation, *rest
        if self.pre_process:
            hidden = self._with_features(hidden, packed_seq_params)
        return hidden, self._rotation(packed_seq_params), *rest

    @property
    def _is_trained(self) -> bool:
        """Whether this pass computes gradients of the tower."""
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.vision.parameters())

    def _with_features(self, hidden: Tensor, params: ImageSeqParams) -> Tensor:
        """Put features into the embeddings [R / tp, 1, D] of this rank's share of the rows, and the deepstack features into `params`."""
        assert self.images is not None and params.row_F is not None and params.feature_F is not None
        share, group = hidden.shape[0], self.pg_collection.tp
        first = share * group.rank() if self.config.sequence_parallel else 0
        own = (params.row_F >= first) & (params.row_F < first + share)
        params.share_F = params.row_F[own] - first
        trained = self._is_trained
        with torch.set_grad_enabled(trained):
            pixels = torch.cat([self.images.pixels(image) for image in params.images]).to(hidden.device)
            features = self.vision(pixels, [image.grid for image in params.images])
            last, *taken = (feature_FD[params.feature_F[own], None].to(hidden.dtype) for feature_FD in features)
        params.deepstack = [feature.detach().requires_grad_() for feature in taken] if trained else taken
        hidden = hidden.index_copy(0, params.share_F, last)
        return _LateGradient.apply(hidden, params.deepstack, *taken) if trained else hidden

    def _rotation(self, params: ImageSeqParams) -> Tensor:
        """The angles of each row of the whole packed sequence, float32 [A, 1, 1, head]: every pair of a head's dimensions has its axis.

        Frequencies are dealt to frame, row and column in turn, as long as row and column have some left; the rest are the frame's.
        """
        assert params.axes_3A is not None
        speed = self.rotary_pos_emb.inv_freq
        angle_3AS = params.axes_3A.to(speed.device)[:, :, None].float() * speed
        turned = angle_3AS[0].clone()
        for axis in (1, 2):
            own = slice(axis, 3 * self.sections[axis], 3)
            turned[:, own] = angle_3AS[axis, :, own]
        return torch.cat([turned, turned], dim=-1)[:, None, None]


class _LateGradient(torch.autograd.Function):
    """The embeddings as they are.

    The backward pass, which comes after that of all layers, gives the tower's deepstack features the gradient that layers have left in
    leaves: a recomputed layer runs a backward pass of its own, which must end there.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: Sequence[Tensor], *features: Tensor) -> Tensor:
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None, *(leaf.grad for leaf in ctx.leaves)


class ImageLayer(TransformerLayer):
    """A layer after which deepstack features are added, if the micro-batch has some for it."""

    def forward(self, *given: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        hidden, *rest = super().forward(*given, packed_seq_params=packed_seq_params, **named)
        if isinstance(packed_seq_params, ImageSeqParams) and self.layer_number <= len(packed_seq_params.deepstack):
            hidden = hidden.index_add(0, packed_seq_params.share_F, packed_seq_params.deepstack[self.layer_number - 1])
        return hidden, *rest
