"""The bytes that autograd keeps for the backward of one layer and of the head, on one rank.

Three specs: `local`, Megatron's local layers on a CPU (plain torch operations), which the tests measure to the byte; `cuda`, the same
layers with torch's CUDA kernels, whose RMSNorm keeps its input alone; `te`, Transformer Engine's. The last two were measured on an H200 for
two layers of Qwen3-30B-A3B (`tests/gpu/shards.py`); what that model does not have is an estimate: latent attention, dense layers, shared
experts, gated delta nets, attention without norms of its heads.

Axes: R rows of the packed micro-batch on a context-parallel rank, S = R / tp rows of its sequence-parallel shard, T routed tokens that a
rank's experts process.
"""

from dataclasses import dataclass
from typing import Literal

from megarl.config import Layout
from megarl.models.delta_nets import CHUNK
from megarl.models.indexer import SCORES
from megarl.models.sizes import ATTENTION, MAMBA
from megarl.plan.facts import Facts
from megarl.plan.states import ITEM

Spec = Literal["local", "cuda", "te"]
_MAMBA_CHUNK = 128  # of mamba_ssm's
_KERNEL_CHUNK = 64  # tokens of a chunk in flash-linear-attention's kernels


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch on one rank."""

    rows: int  # R
    longest: int  # tokens of the longest sequence
    layout: Layout
    dtype: str
    spec: Spec
    imbalance: float = 1.0  # tokens of the busiest rank's experts, relative to the mean

    @property
    def shard(self) -> int:
        """S, the rows of the sequence-parallel shard."""
        return self.rows // self.layout.tp

    @property
    def item(self) -> int:
        """Bytes per element."""
        return ITEM[self.dtype]


def layer_bytes(facts: Facts, shape: MicroBatchShape, *, experts: bool, linear: bool, block: str = "") -> dict[str, int]:
    """Return what one layer keeps for its backward.

    Args:
        facts: the model.
        shape: a micro-batch on a rank.
        experts: whether the layer's MLP is a mixture of experts.
        linear: whether it has a gated delta net or a Mamba mixer in the place of attention.
        block: its kind, if it is a single block (`Sizes.blocks`).

    Returns:
        Bytes by part.
    """
    parts = {"norms": _norms(facts.n.hidden, 1 if block else 2, shape)}
    if block == MAMBA:
        return {**parts, "mamba": _mamba(facts, shape)}
    if linear:
        parts["delta net"] = _delta_net(facts, shape)
    elif block in ("", ATTENTION):
        parts["attention"] = _latent_attention(facts, shape) if facts.latents else _attention(facts, shape)
    if block == ATTENTION:
        return parts
    if not experts:
        return {**parts, "mlp": _mlp(facts, facts.n.ffn or 0, shape)}
    return {
        **parts,
        "router": _router(facts, shape),
        "experts": _experts(facts, shape),
        "shared experts": _mlp(facts, facts.n.shared_ffn, shape) + facts.shared_gate * shape.shard * facts.n.hidden * shape.item,
    }


def routed(facts: Facts, shape: MicroBatchShape) -> int:
    """Return T: each expert-parallel rank contributes S * topk tokens, and those of an expert-tensor-parallel group are gathered."""
    return int(shape.shard * facts.topk * shape.layout.etp * shape.imbalance)


def head_bytes(facts: Facts, shape: MicroBatchShape, *, value: bool, fp32: bool) -> dict[str, int]:
    """Return what the last norm and the head keep. The gradient overwrites the logits.

    Args:
        facts: the model.
        shape: a micro-batch on a rank.
        value: whether the head yields one value instead of logits.
        fp32: whether the head computes in float32.

    Returns:
        Bytes by part.
    """
    n, tp = facts.n, shape.layout.tp
    columns = -(-n.vocab // tp)
    parts = {"norms": _norms(n.hidden, 1, shape)}
    if value:
        return {**parts, "logits": 4 * (shape.shard * n.hidden + n.hidden + shape.rows)}
    if fp32 and shape.item < 4:
        parts["norms"] += 4 * shape.rows * n.hidden + 4 * columns * n.hidden  # input and weight, cast
    return {**parts, "logits": shape.rows * columns * (4 if fp32 else shape.item)}


def predictor_bytes(facts: Facts, shape: MicroBatchShape, *, fp32: bool, full: bool) -> dict[str, int]:
    """Return what a multi-token prediction layer keeps, with the logits of its own: a layer, and the projection before it.

    Args:
        facts: the model.
        shape: a micro-batch on a rank.
        fp32: whether the head computes in float32.
        full: whether its layer is recomputed as a whole: then its own logits are gone before, and those of the model are still there.
    """
    state = shape.shard * facts.n.hidden * shape.item
    head = head_bytes(facts, shape, value=False, fp32=fp32)
    layer = sum(layer_bytes(facts, shape, experts=bool(facts.n.experts), linear=False).values())
    # The projection keeps both states, normalised; the norms' own outputs are not kept, nor is what the detached output layer is given.
    kept = layer + 2 * state + _norms(facts.n.hidden, 3, shape) - 3 * state
    if full:  # of the layer's inputs the model's state is there in any case, for its own output layer
        return {"predictor": state + max(kept - head["logits"], 0), "logits": head["logits"]}
    return {"predictor": kept, "logits": head["logits"]}


def layer_working_bytes(facts: Facts, shape: MicroBatchShape, *, experts: bool) -> int:
    """Return the gradients of activations that exist at once while a layer's MLP runs backward, on a GPU: of its input, its output and both
    projections; without Transformer Engine's fused activation also of the product. Weight gradients are added up as they are computed.
    Or the scores of an indexer, if these are more.

    Args:
        facts: the model.
        shape: a micro-batch on a rank.
        experts: whether the layer's MLP is a mixture of experts.
    """
    n, parts = facts.n, 2 if shape.spec == "te" else 3
    scores = (
        2 * 4 * SCORES if facts.chooses_keys(shape.longest) else 0
    )  # of an indexer, before and after its ReLU, when a layer runs forward
    if not experts:
        return max(scores, shape.item * shape.rows * (2 * n.hidden + parts * (n.ffn or 0) // shape.layout.tp))
    return max(scores, shape.item * routed(facts, shape) * (2 * n.hidden + parts * n.expert_ffn // shape.layout.etp))


def head_working_bytes(facts: Facts, shape: MicroBatchShape, *, value: bool, fp32: bool) -> int:
    """Return the gradients of the output layer's input and weight, which exist beside the logits' own, on a GPU.

    Args:
        facts: the model.
        shape: a micro-batch on a rank.
        value: whether the head yields one value instead of logits.
        fp32: whether the head computes in float32.
    """
    columns = 1 if value else -(-facts.n.vocab // shape.layout.tp)
    return (4 if fp32 or value else shape.item) * facts.n.hidden * (shape.rows + columns)


def _norms(width: int, count: int, shape: MicroBatchShape) -> int:
    """`count` RMSNorms: their input (on a CPU, input and normalised input in float32), and their output, which a linear layer keeps."""
    return count * shape.shard * _norm(width, shape)


def _norm(width: int, shape: MicroBatchShape) -> int:
    return 4 + width * ((8 + shape.item) if shape.spec == "local" else 2 * shape.item)


def _attention(facts: Facts, shape: MicroBatchShape) -> int:
    """Grouped-query attention between its norm and its residual: bytes per row, times R."""
    n, tp, item, local = facts.n, shape.layout.tp, shape.item, shape.spec != "te"
    query, key, heads, groups = n.heads * n.head_dim // tp, n.groups * n.head_dim // tp, n.heads // tp, n.groups // tp
    gate = query if facts.gated else 0
    packed = item * (query + gate + 2 * key)  # the projection's output, of which values (and keys) are views
    gated = gate * (4 + item)  # the gates' sigmoid in float32, and the gated output
    turned, out = item * (query + key), item * query
    scales = 4 * heads  # log-sum-exp of the softmax
    if not local:
        normed = 4 * (heads + groups) if facts.head_norm else 0
        whole = item * 2 * key if shape.layout.cp > 1 else 0  # keys and values of the last step of the ring
        return shape.rows * (packed + turned + out + scales + normed + whole + gated)
    normed = 0
    if shape.layout.cp > 1:
        turned = item * (query + 2 * key * shape.layout.cp)  # keys and values of all ranks
        packed = packed if item == 4 and facts.head_norm else 0
    if facts.head_norm and shape.spec == "cuda":
        normed = item * (query + key) + 4 * (heads + groups)
    elif facts.head_norm:  # in float32 the keys are still a view of the projection's output
        normed = 4 * (2 * query + (1 if item == 4 else 2) * key + heads + groups)
    rotary = 4 * item * facts.rotary  # cosine and sine, for queries and for keys
    return shape.rows * (packed + turned + 2 * out + scales + normed + rotary + gated) + _mask(facts, shape)


def _delta_net(facts: Facts, shape: MicroBatchShape) -> int:
    """A gated delta net between its norm and its residual; what `parallel/delta_net.py` keeps was measured."""
    nets, tp, item = facts.delta_nets, shape.layout.tp, shape.item
    assert nets is not None
    heads, channels, values = nets.heads // tp, nets.channels // tp, nets.values // tp
    wide = heads * nets.key_dim  # queries or keys, one for each value head
    projected = item * (channels + values + 2 * heads)
    convolved = item * 2 * channels  # before and after
    gated = item * 2 * values + 4 * 2 * values  # the answers, normalised and gated; the gate in float32
    if shape.spec == "te":
        rule = item * (2 * wide + _KERNEL_CHUNK * heads) + 4 * 2 * heads
    else:
        rule = 4 * int(13.5 * wide + 6 * values + values * nets.key_dim // CHUNK + (5.3 * CHUNK + 5) * heads)
    return shape.rows * (projected + convolved + rule + gated)


def _mamba(facts: Facts, shape: MicroBatchShape) -> int:
    """A Mamba mixer between its norm and its residual; what `parallel/mamba.py` keeps was measured."""
    nets, tp, item = facts.delta_nets, shape.layout.tp, shape.item
    assert nets is not None
    heads, channels, values, keys = nets.heads // tp, nets.channels // tp, nets.values // tp, nets.heads // tp * nets.key_dim
    projected = item * (channels + values + heads)
    if shape.spec == "te":  # mamba_ssm computes what is between again, but for the states at the chunks' begins and the norm's input
        return shape.rows * (projected + item * 2 * values + 4 * values * nets.key_dim // _MAMBA_CHUNK)
    states = 4 * (10 * values + 3 * keys + 2 * values * nets.key_dim // CHUNK + (3 * CHUNK + 7) * heads + 2 * (channels - values))
    return shape.rows * (projected + item * 2 * channels + states)


def _mask(facts: Facts, shape: MicroBatchShape) -> int:
    """The mask of torch's attention where ranks share a sequence, or a query sees a part of it only (in the average layer).

    With sparse attention each sequence has its own.
    """
    if facts.chooses_keys(shape.longest):
        return shape.item * shape.rows * shape.longest
    windowed = facts.windowed if facts.window is not None and shape.longest > facts.window else 0.0
    return int(shape.item * shape.longest**2 // shape.layout.cp * (1.0 if shape.layout.cp > 1 else windowed))


def _latent_attention(facts: Facts, shape: MicroBatchShape) -> int:
    """Multi-latent attention (MLA)."""
    n, tp, item, latents = facts.n, shape.layout.tp, shape.item, facts.latents
    assert latents is not None
    heads = n.heads // tp
    width, value = heads * (latents.plain + latents.rotary), heads * latents.value
    if shape.spec == "te":
        small = _norm(latents.query, shape) + _norm(latents.key_value, shape) + item * latents.rotary
        keys_values = heads * (latents.plain + latents.value)  # of which the values are a view
        mask = _mask(facts, shape) if facts.n.indexer else 0  # torch's attention
        return shape.shard * small + shape.rows * (item * (2 * width + keys_values + value) + 4 * heads) + mask
    small = (_norm(latents.query, shape) if latents.query else 0) + _norm(latents.key_value, shape)
    small += item * latents.rotary if item == 4 else 0  # the latent is a view of a wider projection
    # Megatron pads the values to the width of the keys (multi_latent_attention.py:97); keys and values are those of all ranks
    core = item * width * (2 + 2 * shape.layout.cp) + 4 * heads
    return shape.shard * small + shape.rows * (core + item * value + 4 * item * latents.rotary) + _mask(facts, shape)


def _mlp(facts: Facts, width: int, shape: MicroBatchShape) -> int:
    """An MLP: both projections and the input of the last one; plain torch also keeps the activation, its cast and the product. Without a
    gate: ReLU and its square."""
    kept = (3 if shape.spec == "te" else 5) if facts.n.gated else 2
    return shape.rows * (width // shape.layout.tp) * kept * shape.item


def _router(facts: Facts, shape: MicroBatchShape) -> int:
    """The router: scores, probabilities and the map of chosen experts, and where each token goes."""
    choices = facts.topk * (8 + 4 + 8)
    everywhere = facts.n.experts * (4 * 3 + 1 + 8 if shape.spec == "te" else 4 + 1)
    return shape.shard * (choices + everywhere)


def _experts(facts: Facts, shape: MicroBatchShape) -> int:
    """The experts: their tokens, both projections and the weighted activation (in plain torch, its parts too), input of the last one."""
    width = facts.n.expert_ffn // shape.layout.etp
    kept = (3 if shape.spec == "te" else 6) if facts.n.gated else 3
    width_per_token = facts.n.hidden + width * kept
    return routed(facts, shape) * (width_per_token * shape.item + 4)
