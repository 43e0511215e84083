"""What the ranks of the pool do in the distributed tests: build the tiny model, train on its share of one global batch, report.

Axes: T predicted tokens, R rows of local logits, V local vocabulary shard.
"""

import json
import os
import signal
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from megarl.batch import Batch, Sample, pack
from megarl.config import LoraSettings, ModelSettings, Mtp, OptimizerSettings
from megarl.host.network import interface_towards
from megarl.models.description import ModelDescription
from megarl.observe.metrics import Metric, merge
from megarl.parallel import schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid, destroy_grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.lora import adapters_of, put_adapters, put_factor
from megarl.parallel.muon import matrices_of
from megarl.parallel.optimizer import Trainable, make_trainable
from megarl.parallel.packing import pack_micro
from megarl.parallel.predictor import PredictorPass
from megarl.parallel.weights import load_hf
from megarl.sync import gloo, wire
from megarl.sync.store import connect_store, listen_store
from tests.distributed.exported import tensors_of

TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 4,  # every expert takes every token: no near-ties for a layout to break differently
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}


def make_checkpoint(path: Path, seed: int = 7, **changes: Any) -> Path:
    """A Hugging Face directory with the tiny configuration and weights drawn from a seed. No tokenizer."""
    from safetensors.torch import save_file

    config = {**TINY, **changes}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in ModelDescription.of(config).expected().items():
        drawn = torch.randn(*shape, generator=generator)
        tensors[name] = 1 + 0.1 * drawn if len(shape) == 1 else 0.06 * drawn
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


LISTEN = "0A"  # the state's number in /proc/net/tcp


@dataclass(frozen=True)
class Job:
    """One training comparison."""

    path: Path
    micro_batches: int = 4  # of the whole batch, over all data-parallel ranks
    sequences: int = 12
    steps: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    megatron: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)  # further settings of it
    lora: LoraSettings | None = None
    mtp: Mtp = "drop"
    mtp_loss_weight: float = 0.3

    @property
    def description(self) -> ModelDescription:
        """Of the model."""
        return ModelDescription.read(self.path, mtp=self.mtp)


@dataclass(frozen=True)
class Report:
    """What one rank saw."""

    loss: list[float]  # this rank's share of each step's loss; 0 on ranks that report nothing
    grad_norm: list[float]
    logp: dict[tuple[int, int], float]  # (sequence, position) -> log-prob in the last step
    runs: int  # micro-batches that `loss_fn` saw in the last step
    predicted: dict[str, Metric] = field(default_factory=dict)  # of the multi-token prediction layer, in the last step
    predictor_norm: list[float | None] = field(default_factory=list)


def global_batch(sequences: int) -> Batch:
    """Sequences of 4 to 40 tokens with weights that differ from token to token."""
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(sequences):
        length = int(rng.integers(4, 41))
        prompt = int(rng.integers(1, length))
        tokens = rng.integers(0, TINY["vocab_size"], length).astype(np.int32)
        samples.append(Sample(tokens, prompt, np.zeros(length - prompt, np.float32), "stop"))
    batch = pack(samples)
    weight = torch.from_numpy(rng.normal(size=len(batch)).astype(np.float32)) / len(batch)
    return batch.with_extra(weight=torch.where(batch.mask_T, weight, 0.0))


def shares(batch: Batch, parts: int) -> list[Batch]:
    """The batch in `parts` micro-batches of whole sequences."""
    return [batch.take((batch.seq_T % parts == part).nonzero().squeeze(1)) for part in range(parts)]


def build(grid: Grid, job: Job) -> Trainable:
    """The loaded policy of this rank, ready to train."""
    model = job.description
    settings = ModelSettings(path=job.path, dtype=job.dtype, recompute=job.recompute, megatron=job.megatron)
    config, adapted = transformer_config(model, settings, grid.layout, choose()), job.lora is not None
    chunks = build_chunks(config, model, choose(), grad=not adapted, adapted=adapted)
    load_hf(chunks, model, grid)
    if job.lora is not None:
        put_adapters(chunks, model, job.lora, grid)
        if job.lora.init is None:
            stir(chunks, grid)
    optimizer = OptimizerSettings.model_validate({"lr": 1e-3, **job.optimizer})
    return make_trainable(chunks, optimizer, 10, matrices_of(chunks, model, grid, optimizer.muon))


def stir(chunks: list[Any], grid: Grid) -> None:
    """Give each B random numbers, the same on every layout: it begins as 0, and the gradient of A with it."""
    for adapter in adapters_of(chunks).values():
        for weight, parameter in adapter.parts():
            if weight.name.endswith("lora_B"):
                generator = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
                put_factor(weight, parameter, 0.1 * torch.randn(weight.op.shapes[0], generator=generator), grid)


def train(grid: Grid, job: Job) -> Report:
    """Optimizer steps on this rank's share of the global batch, from the loaded weights."""
    return learn(grid, build(grid, job), job)


# AdamW's first step moves a weight by lr * gradient / (|gradient| + eps): with these by a thousand gradients, to their last bits but four.
BY_GRADIENTS = {"lr": 1e7, "eps": 1e4, "clip_grad": 1e9}


def gradients(grid: Grid, job: Job) -> dict[str, Tensor]:
    """On rank 0 a thousand times the gradient of every weight, by Hugging Face's name, through the real optimizer and export.

    Args:
        grid: of the rank.
        job: trains with `BY_GRADIENTS`.
    """
    policy = build(grid, job)
    before = exported(grid, policy, job)
    learn(grid, policy, job)
    return moved(before, exported(grid, policy, job))


def exported(grid: Grid, policy: Trainable, job: Job) -> dict[str, Tensor]:
    """The policy's weights by Hugging Face's name, on rank 0."""
    return tensors_of(policy.chunks, job.description, grid, torch.float32)


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    """By how much each weight has fallen."""
    return {name: weight - after[name] for name, weight in before.items()}


def assert_same_gradients(many: dict[str, Tensor], one: dict[str, Tensor]) -> None:
    """Every element to 1e-4 of the largest of its tensor, which is not 0."""
    assert many.keys() == one.keys() and one
    for name, gradient in one.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        assert (many[name] - gradient).abs().max() <= 1e-4 * largest, name


def learn(grid: Grid, policy: Trainable, job: Job, *, forward_only: bool = False) -> Report:
    """Optimizer steps on this rank's share of the global batch, or with `forward_only` only their loss."""
    reports = grid.is_last_stage and grid.tp_rank == 0
    losses, norms, own_norms, runs = [], [], list[float | None](), 0
    logp: dict[tuple[int, int], float] = {}

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, tuple[float, Tensor, Tensor, Tensor]]:
        lp_T, entropy_T = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, TINY["vocab_size"])
        total = (batch.extra_T["weight"] * (lp_T + 0.1 * entropy_T)).sum()
        return total, (float(total), batch.seq_T, batch.position_T, lp_T.detach())

    mine = shares(global_batch(job.sequences), job.micro_batches)[grid.dp_rank :: grid.dp_size]
    for _ in range(job.steps):
        policy.zero_grad()
        predictor = None
        if job.mtp == "train":
            predictor = PredictorPass(policy.chunks, grid, TINY["vocab_size"], job.mtp_loss_weight)
        results = schedule.run(policy.chunks, mine, loss_fn, grid, forward_only=forward_only, predictor=predictor)
        if not forward_only:
            info = policy.step()
        norms.append(0.0 if forward_only else info.grad_norm)
        own_norms.append(None if forward_only else info.predictor_norm)
        losses.append(sum(loss for loss, *_ in results) if reports else 0.0)
        runs = len(results)
        if grid.is_last_stage:
            for (_, seq_T, _, _), batch in zip(results, mine, strict=True):
                assert set(seq_T.tolist()) <= set(batch.seq_T.tolist()), "results are not in the order of the micro-batches"
        for _, seq_T, position_T, lp_T in results if reports else []:
            logp |= {(int(s), int(p)): float(lp) for s, p, lp in zip(seq_T, position_T, lp_T, strict=True)}
    predicted = merge(predictor.results) if predictor is not None and reports else {}
    return Report(losses, norms, logp, runs, predicted, own_norms)


def plain(grid: Grid, job: Job) -> Report:
    """The same steps without Megatron's schedule, gradient buffers and optimizer: one row of tokens, autograd, torch's AdamW."""
    description = ModelDescription.read(job.path)
    settings = ModelSettings(path=job.path, dtype=job.dtype)
    [model] = build_chunks(transformer_config(description, settings, grid.layout, choose()), description, choose(), grad=True)
    load_hf([model], description, grid)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    batch = global_batch(job.sequences)
    packed = pack_micro(batch, cp_rank=0, cp_size=1, tp=1, device=choose().device)
    local = batch.take(packed.entry_T)
    losses, norms = [], []
    for _ in range(job.steps):
        adam.zero_grad()
        logits_RV = model(packed.input_ids, packed.position_ids, None, packed_seq_params=packed.params)[0]
        log_p = logits_RV.log_softmax(-1)
        lp_T = log_p.gather(-1, local.target_T[:, None])[:, 0]
        loss = (local.extra_T["weight"] * (lp_T - 0.1 * (log_p.exp() * log_p).sum(-1))).sum()
        loss.backward()
        losses.append(float(loss))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        adam.step()
    logp = {(int(s), int(p)): float(lp) for s, p, lp in zip(local.seq_T, local.position_T, lp_T, strict=True)}
    return Report(losses, norms, logp, 1)


def disagree(grid: Grid, job: Job) -> None:
    """Brings one micro-batch more than the others on the last rank."""
    policy = build(grid, job)
    batches = shares(global_batch(4), 2)[: 1 + (grid.rank == grid.world - 1)]
    schedule.run(policy.chunks, batches, lambda *_: (torch.zeros(()), None), grid, forward_only=True)


def forward_only(grid: Grid, job: Job) -> list[int]:
    """Entries that each loss_fn saw; the second of three micro-batches is empty."""
    policy = build(grid, job)
    first, last = shares(global_batch(4), 2)
    batches = [first, first.take(torch.empty(0, dtype=torch.int64)), last]

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, int]:
        assert not logits_RV.requires_grad
        return torch.zeros(()), len(batch)

    return schedule.run(policy.chunks, batches, loss_fn, grid, forward_only=True)


def not_finite(grid: Grid, job: Job) -> tuple[bool, bool]:
    """(step skipped, weights as before) after a gradient that is not a number."""
    policy = build(grid, job)
    before = [parameter.clone() for chunk in policy.chunks for parameter in chunk.parameters()]

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
        return logits_RV.sum() * torch.nan, None

    policy.zero_grad()
    schedule.run(policy.chunks, shares(global_batch(4), 2)[:1], loss_fn, grid, forward_only=False)
    skipped = policy.step().skipped
    after = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    return skipped, all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def end_of_the_template(grid: Grid) -> None:
    """The process that forked this rank is killed, and this rank with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def missing(grid: Grid) -> None:
    """A collective to which the last rank does not come: it leaves the grid."""
    if grid.rank == grid.world - 1:
        destroy_grid()
        return
    with grid.together("meet"):
        torch.distributed.all_reduce(torch.zeros(1), group=grid.groups.control)


def process_groups(grid: Grid) -> tuple[list[tuple[int, ...]], int]:
    """The ranks of each of this rank's groups, and its threads."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [tuple(torch.distributed.get_process_group_ranks(group)) for group in groups], len(os.listdir("/proc/self/task"))


def dp_rank(grid: Grid) -> int:
    """This rank's among those that share a batch."""
    return grid.dp_rank


def listening(grid: Grid) -> set[str]:
    """The local addresses (hexadecimal, as the kernel prints them) on which this process listens."""
    torch.distributed.all_reduce(torch.zeros(1), group=grid.groups.tp)
    mine = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1].split(":")[0])
    return found


def share_a_device(grid: Grid, host: str) -> set[str]:
    """Where this process listens with a further group, made while the interface of `host` is named."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(host)
    with gloo.one_device():
        group = torch.distributed.distributed_c10d.ProcessGroupGloo(PrefixStore("further", grid.store), 0, 1, timedelta(seconds=60))
        found = listening(grid)
    assert group.size() == 1
    return found


def meet_for_weights(grid: Grid, host: str) -> set[str]:
    """Where this process listens once two members of a group for weights have met at `host`: it had itself set gloo to loopback."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    if grid.rank == 0:
        store, port = listen_store(host, 2, 60.0)
        grid.store.set("weights", str(port))
    else:
        port = int(grid.store.get("weights"))
        store = connect_store(host, port, 2, 60.0)
    group = wire.join(wire.Rendezvous("gloo", host, port, 2, 60.0), store, grid.rank)
    found = listening(grid)
    wire.broadcast(group, torch.zeros(8, dtype=torch.uint8)).wait()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    return found if grid.rank else set()  # the other has the store


def torch_is_untouched(grid: Grid) -> bool:
    """Whether torch.cuda and the tensor's methods are torch's own although Megatron runs."""
    return torch.cuda.current_device.__module__ == "torch.cuda" and torch.Tensor.cuda.__qualname__ == "TensorBase.cuda"
