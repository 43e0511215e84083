"""Everything that can be refused before a process starts: model directory, layout, prompts, reward function, transports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megarl.config import (
    ClusterSettings,
    ConfigError,
    DataSettings,
    EvalConfig,
    EvalData,
    ModelReward,
    PromptSource,
    RolloutSettings,
    RunSettings,
    SftConfig,
    TrainConfig,
)
from megarl.data.demonstrations import Demonstration, demonstrations
from megarl.data.prompts import Prompt, load_prompts
from megarl.data.tokenizer import check_same_tokenizer, load_tokenizer
from megarl.models.families import check_checkpoint, check_layout
from megarl.models.megatron_fields import check_fields
from megarl.observe import writers
from megarl.observe.metrics import Metric, scalars
from megarl.rewards.score import check as check_reward
from megarl.rollout.engine import check_engine

SAME_HOST_OR_CPU = {"gloo": False, "shm": False, "nccl": True, "cuda_ipc": True}


@dataclass(frozen=True)
class Data:
    """Prompts that passed every check."""

    train: list[Prompt]
    eval: list[Prompt]


def check_model(config: RunSettings) -> dict[str, Any]:
    """The model's config.json, once the checkpoint is whole and the layout divides it. Raises ConfigError."""
    hf = check_checkpoint(config.model.path)
    check_layout(hf, config.layout)
    check_fields(config.model.megatron)
    writers.check(config.log)
    check_cluster(config.cluster)
    return hf


def check_cluster(settings: ClusterSettings) -> None:
    """ConfigError where this machine has not the network interface or, for a session of its own, the GPUs."""
    if settings.address is not None:
        return
    known = psutil.net_if_addrs()
    if settings.interface is not None and settings.interface not in known:
        raise ConfigError(f"cluster.interface={settings.interface}: not one of this machine's ({', '.join(sorted(known))})")
    if settings.gpus and not any(Path("/dev").glob("nvidia[0-9]*")):
        raise ConfigError("cluster.gpus=true: this machine has no GPU (cluster.gpus=false runs all of it on the CPU)")


def check_prompts(
    config: RunSettings, data: DataSettings | EvalData, rollout: RolloutSettings, source: PromptSource, key: str
) -> list[Prompt]:
    """Every prompt of a source, tokenised; ConfigError for the first that is malformed or too long."""
    return load_prompts(source, load_tokenizer(config.model.path), data.chat, data.template, rollout.max_prompt_tokens, key)


def check_length(hf: dict[str, Any], rollout: RolloutSettings) -> None:
    """ConfigError where prompt and response together exceed what the model was built for."""
    longest, limit = rollout.max_prompt_tokens + rollout.max_response_tokens, int(hf["max_position_embeddings"])
    if longest > limit:
        raise ConfigError(
            f"rollout.max_response_tokens={rollout.max_response_tokens}: with max_prompt_tokens={rollout.max_prompt_tokens} that makes "
            f"{longest} tokens, and the model takes {limit}"
        )


def check_reward_model(config: TrainConfig, path: Path) -> None:
    """ConfigError where the reward model is not whole, cannot be laid out, or reads other tokens than the policy writes."""
    hf = check_checkpoint(path, head="value", key="reward.source.path")
    check_layout(hf, config.placement.reward or config.layout)
    check_same_tokenizer(config.model.path, "model.path", path, "reward.source.path")
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if longest > int(hf["max_position_embeddings"]):
        raise ConfigError(f"reward.source.path: {path} takes {hf['max_position_embeddings']} tokens, and a response may have {longest}")


def check_train(config: TrainConfig) -> Data:
    """All checks of `megarl train`."""
    hf = check_model(config)
    if config.model.base is not None and check_checkpoint(config.model.base, key="model.base")["architectures"] != hf["architectures"]:
        raise ConfigError(f"model.base: {config.model.base} is of another architecture than model.path={config.model.path}")
    check_length(hf, config.rollout)
    if SAME_HOST_OR_CPU[config.sync.transport] != config.cluster.gpus:
        raise ConfigError(f"sync.transport={config.sync.transport} does not go with cluster.gpus={str(config.cluster.gpus).lower()}")
    check_engine(hf, config.model.dtype, config.rollout, gpu=config.cluster.gpus)
    if config.critic is not None:
        path = config.critic.path
        check_layout(
            hf if path is None else check_checkpoint(path, head="value", key="critic.path"), config.placement.critic or config.layout
        )
    if config.placement.reference is not None:
        check_layout(hf, config.placement.reference)
    if isinstance(config.reward.source, ModelReward):
        check_reward_model(config, config.reward.source.path)
    check_reward(config.reward)
    data = Data(
        train=check_prompts(config, config.data, config.rollout, config.data.train, "data.train"),
        eval=check_prompts(config, config.data, config.rollout, config.data.eval, "data.eval"),
    )
    if len(data.train) < config.train.prompts_per_step:
        raise ConfigError(f"train.prompts_per_step={config.train.prompts_per_step}: data.train holds {len(data.train)} prompts")
    return data


def check_value(config: TrainConfig) -> Data:
    """All checks of `megarl value`."""
    if config.critic is None or config.critic.pretrain_steps == 0:
        raise ConfigError("critic.pretrain_steps: `megarl value` needs at least 1")
    data = check_train(config)
    if len(data.eval) < config.train.prompts_per_step:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step}: data.eval, which is measured on, holds {len(data.eval)}"
        )
    return data


def check_sft(config: SftConfig) -> tuple[list[Demonstration], list[Demonstration]]:
    """All checks of `megarl sft`: the right demonstrations, and the imperfect ones of the same prompts (none where none are asked for)."""
    check_model(config)
    tokenizer, data = load_tokenizer(config.model.path), config.data
    limit = config.sft.max_tokens
    if limit > config.sft.micro_batch_tokens:
        raise ConfigError(f"sft.micro_batch_tokens={config.sft.micro_batch_tokens} is below sft.max_tokens={limit}")
    if config.sft.batch_size < config.layout.dp:
        raise ConfigError(f"sft.batch_size={config.sft.batch_size} is less than one for each of {config.layout.dp} data-parallel ranks")
    prompts = load_prompts(data.train, tokenizer, data.chat, data.template, limit, "data.train", "sft.max_tokens")
    make = partial(demonstrations, prompts, tokenizer, data.demonstration, max_tokens=limit, key="data.train")
    return make(copied=False), make(copied=True) if data.corrupt_copy and data.corrupt_last else []


def check_eval(config: EvalConfig) -> list[Prompt]:
    """All checks of `megarl eval`; its prompts."""
    hf = check_model(config)
    check_length(hf, config.rollout)
    check_engine(hf, config.model.dtype, config.rollout, gpu=config.cluster.gpus)
    if isinstance(config.reward.source, ModelReward) and config.reward.eval is None:
        raise ConfigError("reward.source.type=reward_model: `megarl eval` has no ranks to run it on; say in reward.eval what it counts")
    check_reward(config.reward)
    return check_prompts(config, config.data, config.rollout, config.data.eval, "data.eval")


def check_gap(config: TrainConfig, metrics: Mapping[str, Metric]) -> None:
    """RuntimeError where engines and trainer disagree about the log-probs of the first step's responses: they do not run one model."""
    limit = config.sync.logprob_gap or {"float32": 1e-4, "bfloat16": 5e-2}[config.model.dtype]
    gap = scalars(metrics).get("training/logprob_gap_mean")
    if gap is not None and not gap <= limit:  # None: no response of the step is trained on
        raise RuntimeError(f"step 1: mean |log-prob of engine - of trainer| is {gap:.3g}, more than sync.logprob_gap={limit:g}")
