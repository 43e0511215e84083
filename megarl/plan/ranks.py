"""What each rank of a group needs in each phase of a step: weights, gradients, optimizer, activations, and buckets of weight updates."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.config import Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.plan.activations import MicroBatchShape, Spec
from megarl.plan.devices import GB, IMBALANCE
from megarl.plan.facts import facts
from megarl.plan.parameters import shards, stage_layers
from megarl.plan.pipeline import OutputHead, Recompute, in_flight, stage_bytes
from megarl.plan.states import ITEM, States, states
from megarl.plan.tower import tower_bytes

CONTEXT = 3 * GB  # CUDA's context, NCCL's buffers, cuBLAS's workspaces: an estimate


@dataclass(frozen=True)
class PlannedModel:
    """A model on the ranks of a group."""

    name: str
    model: ModelDescription = field(repr=False)
    optimizer: OptimizerSettings | None  # None: it is not trained
    value: bool  # whether it has a scalar head
    micro_batch_tokens: int

    @property
    def trained(self) -> bool:
        return self.optimizer is not None


@dataclass(frozen=True)
class StageMemory:
    """The busiest rank of one pipeline stage: bytes by part, in the phase that needs most."""

    stage: int
    rank: int  # the first of the stage
    parameters: int  # of the first role
    phase: str
    parts: dict[str, float]
    sending: float  # of the policy's weights alone, with CUDA's context: what is beside the engines' in a weight update of shared GPUs
    waiting: float  # of all roles, without gradients: what is in host memory while engines use the GPU
    host: float  # of models that wait in host memory by `placement.offload`
    offloaded: float  # of optimizers that work in host memory

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class GroupMemory:
    """A group of ranks that hold models together."""

    name: str
    layout: Layout
    stages: list[StageMemory]

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)


@dataclass(frozen=True)
class Work:
    """What the ranks of a run do, as far as memory depends on it."""

    longest: int  # tokens of the longest sequence
    micro_batches: int  # of a mini-batch on one data-parallel rank
    sync_bytes: int  # what a weight update takes on a rank that sends
    kept_bytes: int = 0  # what its GPU keeps between weight updates
    senders: int = 1  # pipeline stages whose first rank sends
    offload: bool = False  # whether models that wait are in host memory
    shared: bool = False  # whether engines take turns with these ranks on their GPUs
    gpu: bool = True  # otherwise the layers are those for CPUs, and there is no CUDA context
    fused: bool = True  # whether a GPU has Transformer Engine's layers


def plan_group(roles: Sequence[PlannedModel], layout: Layout, settings: ModelSettings, work: Work) -> GroupMemory:
    """Plan the memory of a group of ranks.

    Args:
        roles: its models.
        layout: the layout of the ranks, which divides the models.
        settings: the section `model`.
        work: what the ranks do.
    """
    models = [_Model(role, layout, settings) for role in roles]
    return GroupMemory(
        "+".join(role.name for role in roles), layout, [_stage(models, layout, settings, stage, work) for stage in range(layout.pp)]
    )


class _Model:
    """A role, with what follows from its config.json and the layout."""

    def __init__(self, role: PlannedModel, layout: Layout, settings: ModelSettings) -> None:
        self.role, self.facts = role, facts(role.model)
        described = role.model if role.trained and not role.value else role.model.trunk
        self.predicts = described.predicts
        lora, tower = (settings.lora, settings.vision == "train") if role.trained else (None, False)
        self.chunks = shards(described, "value" if role.value else "lm", layout, settings.megatron, lora, tower)
        self.layers = stage_layers(self.facts.n.layers, layout, settings.megatron)


def _stage(models: Sequence[_Model], layout: Layout, settings: ModelSettings, stage: int, work: Work) -> StageMemory:
    model_states = [states(model.chunks[stage], layout, settings.dtype, model.role.optimizer) for model in models]
    # The reference of a model with adapters is that model, without them.
    own = [state for model, state in zip(models, model_states, strict=True) if not _is_within(model, models, settings)]
    everything = sum(own, States(0))
    buckets: dict[str, float] = {"sync buckets": work.kept_bytes} if stage < work.senders and work.kept_bytes else {}
    phases: dict[str, dict[str, float]] = {}
    for model, own_states in zip(models, model_states, strict=True):
        doing = "update" if model.role.trained else "forward"
        resident = everything if not work.offload else model_states[0] if _is_within(model, models, settings) else own_states
        phases[f"{model.role.name} {doing}"] = _parts(resident) | _activations(model, layout, settings, stage, work) | buckets
        if model.role.trained:  # Megatron copies the weights that are trained into its buffers
            copied = own_states.weights - ITEM[settings.dtype] * sum(chunk.frozen for chunk in model.chunks[stage])
            phases[f"{model.role.name} start"] = {"weights": resident.weights + copied, "gradients": resident.gradients}
    if stage < work.senders and work.sync_bytes:
        whole = _parts(model_states[0] if work.offload else everything)
        phases["sync"] = {**({"weights": model_states[0].weights} if work.shared else whole), "sync": work.sync_bytes}
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    context = CONTEXT if work.gpu else 0
    return StageMemory(
        stage=stage,
        rank=stage * layout.ranks // layout.pp,
        parameters=sum(chunk.elements for chunk in models[0].chunks[stage]),
        phase=phase,
        parts={**phases[phase], "context": context},
        sending=model_states[0].weights + context,
        waiting=everything.total - everything.gradients,
        host=everything.total - everything.gradients if work.offload else 0,
        offloaded=everything.host,
    )


def _is_within(model: _Model, models: Sequence[_Model], settings: ModelSettings) -> bool:
    return settings.lora is not None and model.role.name == "reference" and models[0].role.trained


def _parts(memory: States) -> dict[str, float]:
    return {"weights": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}


def recompute_of(settings: ModelSettings) -> Recompute:
    """What the section `model` says is recomputed, with the details that `model.megatron` may give."""
    fields = settings.megatron
    together = int(fields.get("recompute_num_layers") or 1) if settings.recompute == "full" else 1
    return Recompute(settings.recompute, together, tuple(fields.get("recompute_modules") or ("core_attn",)))


def _activations(model: _Model, layout: Layout, settings: ModelSettings, stage: int, work: Work) -> dict[str, float]:
    role, description, layers = model.role, model.facts, model.layers[stage]
    spec: Spec = "local" if not work.gpu else "te" if work.fused and settings.dtype != "float32" else "cuda"  # as `backend` chooses
    imbalance = IMBALANCE if work.gpu and layout.ep > 1 else 1.0  # a rank that holds all experts has exactly the tokens of its shard
    shape = MicroBatchShape(-(-role.micro_batch_tokens // layout.cp), work.longest, layout, settings.dtype, spec, imbalance)
    head = OutputHead(role.value, settings.fp32_head and not role.value, model.predicts) if stage == layout.pp - 1 else None
    # Without gradients, one layer's activations exist at a time, as when everything but the layers' inputs is recomputed.
    recompute = recompute_of(settings) if role.trained else Recompute("full")
    flying = in_flight(layout, stage, work.micro_batches)
    parts: dict[str, float] = {**stage_bytes(description, shape, layers, flying, recompute, head, working=work.gpu and role.trained)}
    if not role.trained:
        parts.pop("layer inputs", None)
    if stage == 0 and description.n.vision is not None:  # every token may be an image's
        trained = role.trained and settings.vision == "train"
        parts["tower"] = tower_bytes(description.n.vision, role.micro_batch_tokens, shape.item, trained=trained)
    logits, working = parts.pop("logits", 0), parts.pop("working set", 0)
    return {"activations": sum(parts.values()), "logits": logits, "working set": working}
