"""AdamW, and Muon, through Megatron's distributed optimizer: gradient buffers, clipping, the learning rate."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, ChainedOptimizer
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP as PREDICTOR
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megarl.config import OptimizerSettings
from megarl.observe.metrics import Mean, Metric
from megarl.parallel.backend import choose
from megarl.parallel.build import sum_in_buffers
from megarl.parallel.muon import Matrices, MuonBesideAdam
from megarl.parallel.slices import MUON
from megarl.parallel.weights import unwrap

STYLES = {"linear": "linear", "cosine": "cosine", "wsd": "WSD", "inverse_sqrt": "inverse-square-root"}  # Megatron's names


@dataclass(frozen=True)
class StepInfo:
    """The outcome of one optimizer step."""

    grad_norm: float  # global, before clipping
    lr: float
    skipped: bool  # true if the gradient was not finite: nothing has changed
    predictor_norm: float | None = None  # of the gradient of a multi-token prediction layer, which is clipped by itself

    @property
    def norms(self) -> str:
        """The norms, for a message."""
        own = "" if self.predictor_norm is None else f", and that of the multi-token prediction layer (mtp/grad_norm) {self.predictor_norm}"
        return f"grad_norm is {self.grad_norm}{own}"

    def metrics(self, role: str) -> dict[str, Metric]:
        """The step's metrics of a model in this role."""
        further = {} if self.predictor_norm is None else {"mtp/grad_norm": Mean(self.predictor_norm, 1.0)}
        return {f"{role}/grad_norm": Mean(self.grad_norm, 1.0), f"{role}/lr": Mean(self.lr, 1.0), **further}


def learning_rate(step: int, settings: OptimizerSettings, total_steps: int) -> float:
    """The learning rate of one optimizer step: linear warm-up to lr at step warmup_steps - 1, then Megatron's decay. Stateless.

    Args:
        step: optimizer steps taken before this one.
        settings: the optimizer settings.
        total_steps: step at which the decay reaches lr * min_lr_fraction, where the rate stays.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    total = max(total_steps, settings.warmup_steps + 1)  # Megatron asserts that the decay has at least one step
    annealing = max(1, round(settings.anneal_fraction * total))
    low = settings.lr * settings.min_lr_fraction
    schedule = _schedule(STYLES[settings.decay], settings.lr, low, settings.warmup_steps, total, annealing, settings.anneal)
    schedule.num_steps = step
    return schedule.get_lr({})


@lru_cache(maxsize=8)
def _schedule(style: str, high: float, low: float, warmup: int, total: int, annealing: int, anneal: str) -> OptimizerParamScheduler:
    """Megatron's schedule without an optimizer, cached: `learning_rate` queries it for every step."""
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[]),
        init_lr=0.0,
        max_lr=high,
        min_lr=low,
        lr_warmup_steps=warmup,
        lr_decay_steps=total,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=annealing,
        lr_wsd_decay_style=anneal,
    )


class Trainable:
    """Model chunks with gradient buffers, and their optimizer. Create it with `make_trainable`.

    Args:
        chunks: the model's chunks on this rank.
        optimizer: the optimizer of their parameters.
        settings: the section `optimizer`.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel], optimizer: ChainedOptimizer, settings: OptimizerSettings, total_steps: int
    ) -> None:
        self.chunks = chunks
        self.optimizer = optimizer
        self.steps = 0  # optimizer steps taken
        self._whole = True  # this rank has all the weights of the last step, gathered
        self._settings, self._total = settings, total_steps
        self._predicts = any(unwrap(chunk).predicts for chunk in chunks)

    @property
    def muon(self) -> bool:
        """Whether Muon updates the matrices."""
        return self._settings.muon is not None

    def gradients(self) -> list[Tensor]:
        """The gradient buffers; `zero_grad` zeroes them before they are next read."""
        return [buffer.grad_data for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def state(self) -> list[Tensor]:
        """The optimizer's tensors on the device: the float32 copies of the weights, and the moments."""
        parts = [part.optimizer for part in self.optimizer.chained_optimizers if part.optimizer is not None]
        copies = [tensor for part in parts for group in part.param_groups for tensor in group["params"]]
        moments = [value for part in parts for moment in part.state.values() for value in moment.values() if isinstance(value, Tensor)]
        return [tensor for tensor in (*copies, *moments) if tensor.device == copies[0].device]  # the others are offloaded

    def wait_for_weights(self) -> None:
        """Wait until this rank has all the weights of the last step. Collective.

        With `overlap_param_gather` Megatron gathers them in the next forward pass; any other reader must call this first. It gathers only
        once per step: parked weights have no storage to be gathered into.
        """
        for chunk in self.chunks if not self._whole else ():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        self._whole = True

    def zero_grad(self) -> None:
        """Zero the gradient buffers. Call it before each `schedule.run` that trains."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> StepInfo:
        """Take one step of the optimizer with the buffered gradients, clipped. Collective.

        If the gradient is not finite, nothing changes: no weight, no moment, no step count.
        """
        rate = learning_rate(self.steps, self._settings, self._total)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())  # without that of a multi-token prediction layer
        own = float(self.optimizer._get_grad_norm_for_group(PREDICTOR)) if self._predicts else None
        if not math.isfinite(norm + (own or 0.0)):
            return StepInfo(norm, rate, skipped=True, predictor_norm=own)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (group["max_lr"] / self._settings.lr)
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        for part in self.optimizer.chained_optimizers:
            parameters = defaultdict[str | None, list[Tensor]](list)
            for parameter in part.get_parameters():
                parameters[getattr(parameter, GRAD_NORM_GROUP_ATTR, None)].append(parameter)
            for group, held in parameters.items():
                clip_grad_by_total_norm_fp32(held, max_norm=self._settings.clip_grad, total_norm=norm if group is None else own)
        self._whole = False
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        return StepInfo(norm, rate, skipped=False, predictor_norm=own)


def make_trainable(
    chunks: Sequence[MegatronModule], settings: OptimizerSettings, total_steps: int, matrices: Mapping[Tensor, Matrices] = {}
) -> Trainable:
    """Wrap this rank's loaded chunks for training. Collective. Load the weights first: the optimizer copies them to float32.

    Args:
        chunks: from `build.build_chunks`, with grad.
        settings: the optimizer settings.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        matrices: the parameters that Muon updates (`muon.matrices_of`).

    Returns:
        The chunks in data-parallel wrappers, which hold the gradients in float32, and their optimizer.
    """
    config = get_model_config(chunks[0])
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, **settings.ddp})
    wrapped = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]
    sum_in_buffers(chunks, config.gradient_accumulation_fusion)
    optimizer_config = OptimizerConfig(
        **settings.megatron,
        overlap_param_gather=ddp.overlap_param_gather,
        optimizer="adam",
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    # Vectors (norms) are not decayed.
    overrides = get_standard_config_overrides(optimizer_config)
    if settings.muon is not None:
        key = ParamKey(predicate=ParamPredicate(MUON, matrices.__contains__))
        own: Any = {MUON: True, "max_lr": settings.muon.lr or settings.lr}  # Megatron allows `optimizer` only where it builds Muon itself
        overrides[key] = own
    optimizer = get_megatron_optimizer(optimizer_config, wrapped, config_overrides=overrides, use_gloo_process_groups=False)
    choose().fuse_optimizer(optimizer)
    if settings.muon is not None:
        for part in (part for part in optimizer.chained_optimizers if not part.is_stub_optimizer):
            part.optimizer = MuonBesideAdam(part, matrices, settings.muon)
    config.finalize_model_grads_func = finalize_model_grads
    # float32 and bfloat16 need no loss scale. Megatron's (1 here) is a method of the optimizer, whose weight shards are views with an
    # autograd graph: a model that references its optimizer is never freed, because the cycle passes through C++ (see
    # `schedule._drop_graph`).
    config.grad_scale_func = None
    config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return Trainable(wrapped, optimizer, settings, total_steps)
