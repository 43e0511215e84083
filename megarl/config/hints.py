"""Hints for the refusal of an unknown key: the key that was meant, even if it was given by its name in verl, TRL, slime or OpenRLHF."""

import difflib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

PASSES = "counted in steps, not in passes over the data"
OFFLOAD = "optimizer.megatron: {optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0}"
# Keys of other systems (with the enclosing section where it matters), and their counterparts here: a key, then after a colon anything else
# worth knowing, such as a different unit. A hint names only the keys that the verb has.
ALIASES: dict[str, tuple[str, ...]] = {
    "learning_rate": ("optimizer.lr",),
    "lr": ("optimizer.lr", "critic.optimizer.lr"),
    "adam_beta1": ("optimizer.betas",),
    "adam_beta2": ("optimizer.betas",),
    "max_grad_norm": ("optimizer.clip_grad",),
    "grad_clip": ("optimizer.clip_grad",),
    "use_muon": ("optimizer.muon",),
    "muon_lr": ("optimizer.muon.lr",),
    "muon_momentum": ("optimizer.muon.momentum",),
    **dict.fromkeys(("muon_nesterov", "muon_use_nesterov"), ("optimizer.muon.nesterov",)),
    **dict.fromkeys(("muon_num_ns_steps", "newton_schulz_steps"), ("optimizer.muon.ns_steps",)),
    **dict.fromkeys(("muon_scale_mode", "muon_extra_scale_factor", "adjust_lr_fn"), ("optimizer.muon.adjust_lr",)),
    "lr_warmup_steps": ("optimizer.warmup_steps",),
    "lr_warmup_iters": ("optimizer.warmup_steps",),
    "lr_scheduler_type": ("optimizer.decay",),
    "lr_decay_style": ("optimizer.decay",),
    "min_lr": ("optimizer.min_lr_fraction",),
    "min_lr_ratio": ("optimizer.min_lr_fraction",),
    "n": ("rollout.samples_per_prompt",),
    "eval.n": ("eval: a list of sets, each with a name, a source and its n",),
    "val_kwargs.n": ("eval: a list of sets, each with a name, a source and its n",),
    "num_generations": ("rollout.samples_per_prompt",),
    "n_samples_per_prompt": ("rollout.samples_per_prompt",),
    "rollout_n": ("rollout.samples_per_prompt",),
    "rollout_top_p": ("rollout.top_p",),
    "rollout_top_k": ("rollout.top_k",),
    "rollout_stop": ("rollout.stop",),
    "rollout_stop_token_ids": ("rollout.stop_token_ids",),
    "max_assistant_turns": ("environment.max_turns",),
    "rollout_temperature": ("rollout.temperature",),
    "max_prompt_length": ("rollout.max_prompt_tokens",),
    "rollout_max_prompt_len": ("rollout.max_prompt_tokens",),
    "max_response_length": ("rollout.max_response_tokens",),
    "max_completion_length": ("rollout.max_response_tokens",),
    "max_new_tokens": ("rollout.max_response_tokens",),
    "rollout_max_response_len": ("rollout.max_response_tokens",),
    "max_tokens": ("rollout.max_response_tokens",),
    "max_length": ("sft.max_tokens", "rm.max_tokens", "dpo.max_tokens", "rollout.max_response_tokens"),
    "max_model_len": ("rollout.max_response_tokens: an engine has room for that and max_prompt_tokens",),
    "filter_overlong_prompts": ("rollout.max_prompt_tokens: a longer prompt is refused, and none is left out",),
    "enforce_eager": ("rollout.engine.args: {enforce_eager: true}; on a CPU it is always so",),
    "max_seq_length": ("sft.max_tokens", "rm.max_tokens", "dpo.max_tokens"),
    "gpu_memory_utilization": ("rollout.gpu_memory_fraction",),
    "vllm_gpu_memory_utilization": ("rollout.gpu_memory_fraction",),
    "tensor_model_parallel_size": ("layout.tp", "rollout.tp"),
    "tensor_parallel_size": ("rollout.tp", "layout.tp"),
    "pipeline_model_parallel_size": ("layout.pp",),
    "virtual_pipeline_model_parallel_size": ("layout.vpp",),
    "context_parallel_size": ("layout.cp",),
    "expert_model_parallel_size": ("layout.ep",),
    "expert_tensor_parallel_size": ("layout.etp",),
    "n_gpus_per_node": ("layout.ranks",),
    "nnodes": ("layout.ranks: GPUs, not nodes",),
    "train_batch_size": ("train.prompts_per_step", "sft.batch_size", "rm.batch_size", "dpo.batch_size"),
    "rollout_batch_size": ("train.prompts_per_step",),
    "per_device_train_batch_size": tuple(f"{verb}.micro_batch_tokens: tokens, not sequences" for verb in ("train", "sft", "rm", "dpo")),
    "use_dynamic_bsz": tuple(f"{verb}.micro_batch_tokens: it is always so" for verb in ("train", "sft", "rm", "dpo")),
    "ppo_mini_batch_size": ("train.mini_batches: how many, not how large: prompts_per_step / ppo_mini_batch_size",),
    "num_steps_per_rollout": ("train.mini_batches",),
    "global_batch_size": (
        "train.mini_batches: how many, not how large: prompts_per_step * samples_per_prompt / global_batch_size",
        *("sft.batch_size", "rm.batch_size", "dpo.batch_size"),
    ),
    "ppo_epochs": ("train.epochs",),
    "num_iterations": ("train.epochs",),
    "num_train_epochs": tuple(f"{verb}.steps: {PASSES}" for verb in ("train", "sft", "rm", "dpo")),
    "total_epochs": tuple(f"{verb}.steps: {PASSES}" for verb in ("train", "sft", "rm", "dpo")),
    "total_training_steps": ("train.steps", "sft.steps"),
    "max_steps": ("train.steps", "sft.steps", "rm.steps", "dpo.steps"),
    "num_rollout": ("train.steps",),
    "ppo_max_token_len_per_gpu": ("train.micro_batch_tokens",),
    "max_tokens_per_gpu": ("train.micro_batch_tokens",),
    "clip_ratio": ("algorithm.clip_low", "algorithm.clip_high"),
    "clip_ratio_low": ("algorithm.clip_low",),
    "clip_ratio_high": ("algorithm.clip_high",),
    "eps_clip": ("algorithm.clip_low",),
    "eps_clip_high": ("algorithm.clip_high",),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "beta": ("algorithm.kl_coef", "algorithm.beta"),
    "kl_loss_coef": ("algorithm.kl_coef",),
    "init_kl_coef": ("algorithm.kl_coef",),
    "use_kl_loss": ("algorithm.kl_coef",),
    "kl_loss_type": ("algorithm.kl_kind",),
    "entropy_coeff": ("algorithm.entropy_coef",),
    "use_kl_in_reward": ("algorithm.kl_in: loss or reward",),
    "norm_adv_by_std_in_grpo": ("algorithm.scale: none, or group for true",),
    "loss_mode": ("algorithm.type",),
    "tau_pos": ("algorithm.tau_positive",),
    "tau_neg": ("algorithm.tau_negative",),
    "critic_warmup": ("critic.pretrain_steps",),
    "adv_estimator": ("algorithm.type",),
    "advantage_estimator": ("algorithm.type",),
    "loss_type": ("algorithm.type",),
    "lam": ("algorithm.gae_lambda",),
    "tis_imp_ratio_cap": ("algorithm.correction.cap",),
    "use_tis": ("algorithm.correction.type",),
    "loss_agg_mode": ("algorithm.aggregation",),
    "train_files": ("data.train.path",),
    "val_files": ("data.eval.path",),
    "prompt_data": ("data.train.path",),
    "eval_prompt_data": ("eval",),
    "dataset_name": ("data.train.path",),
    "input_key": ("data.train.prompt_key",),
    "label_key": ("data.train.answer_key",),
    "apply_chat_template": ("data.chat",),
    "apply_chat_template_kwargs": ("data.template_args",),
    "chat_template_kwargs": ("data.template_args",),
    "enable_thinking": ("data.template_args: {enable_thinking: ...}",),
    "custom_reward_function": ("reward.source.path",),
    "reward_funcs": ("reward.source.path",),
    "rm_path": ("reward.source.path",),
    "overlong_buffer": ("reward.overlong",),
    "mask_truncated_completions": ("train.drop_truncated",),
    "test_freq": ("train.eval_every",),
    "eval_steps": ("train.eval_every", "sft.eval_every"),
    "eval_interval": ("train.eval_every",),
    "val_before_train": ("train.eval_at_start",),
    "save_freq": ("save.every",),
    "save_steps": ("save.every",),
    "save_interval": ("save.every",),
    "save_total_limit": ("save.keep_last",),
    "max_ckpt_to_keep": ("save.keep_last",),
    "resume_mode": ("save.resume",),
    "resume_from_checkpoint": ("save.resume",),
    "experiment_name": ("name",),
    "run_name": ("name",),
    "output_dir": ("run_dir",),
    "default_local_dir": ("run_dir",),
    "report_to": ("log.trackers",),
    "logger": ("log.trackers",),
    "wandb": ("log.trackers: [wandb]",),
    "use_wandb": ("log.trackers: [wandb]",),
    "project_name": ("log.project",),
    "wandb_project": ("log.project",),
    "entity_name": ("log.entity",),
    "wandb_entity": ("log.entity",),
    "wandb_group": ("log.group",),
    "model_name_or_path": ("model.path",),
    "hf_checkpoint": ("model.path",),
    "ref_load": ("model.path",),
    "lora_rank": ("model.lora.rank",),
    "lora_alpha": ("model.lora.alpha",),
    "target_modules": ("model.lora.targets",),
    "lora_adapter_path": ("model.lora.init",),
    **dict.fromkeys(("use_peft", "peft_config"), ("model.lora",)),
    "gradient_checkpointing": ("model.recompute",),
    "recompute_granularity": ("model.recompute",),
    "bf16": ("model.dtype",),
    "torch_dtype": ("model.dtype",),
    "param_offload": ("placement.offload",),
    "cpu_offload": (OFFLOAD,),
    "optimizer_offload": (OFFLOAD,),
    "optimizer_cpu_offload": (OFFLOAD,),
    "partial_rollout": ("rollout.mode: budget or free",),
    "colocate": ("placement.engines",),
    "use_rollout_routing_replay": ("routing.replay",),
    "still_timeout_s": ("cluster.stall_timeout_s",),
}
# Keys of other systems that have no counterpart here, and why.
NO_KEY = {
    "use_remove_padding": "always so: no batch has padding",
    "trust_remote_code": "code in a model directory is never run",
    "lora_dropout": "not here: adapters have no dropout",
}
MAX_LEAVES = 1000  # keys of an unknown section that are looked up


def hint_key(key: Sequence[str], section: Sequence[str], everywhere: Sequence[str], value: Any = None) -> str:
    """Return the text that follows "unknown key": the key that was meant, or why there is none; empty if neither is known.

    Args:
        key: the parts of the dotted key.
        section: the names in its section.
        everywhere: all dotted keys of the verb.
        value: the value given for the key; if it is a mapping, such as verl's `actor_rollout_ref`, the keys inside are looked up too.
    """
    name = key[-1]
    if _plain(name) in NO_KEY:
        return f" ({NO_KEY[_plain(name)]})"
    if meaning := _meant(key, everywhere):
        return f" (here it is {meaning[0]}{meaning[1]})"
    known = [hint for path in islice(_leaves(value), MAX_LEAVES) if (hint := _inside(path, everywhere))][:2]
    if known:
        return f" ({', '.join(known)})"
    near = difflib.get_close_matches(name, sorted(section), n=1)
    if near:
        return f" (did you mean {near[0]!r}?)"
    elsewhere = [candidate for candidate in everywhere if candidate.rpartition(".")[2] == name]
    if elsewhere:
        return f" (there is {min(elsewhere, key=lambda candidate: (candidate.count('.'), candidate))})"
    leaves = {candidate.rpartition(".")[2]: candidate for candidate in reversed(everywhere)}
    near = difflib.get_close_matches(name, sorted(leaves), n=1, cutoff=0.75)
    return f" (did you mean {leaves[near[0]]!r}?)" if near else ""


def _inside(path: Sequence[str], everywhere: Sequence[str]) -> str:
    """Return the hint for a key inside an unknown section; empty if nothing is known about it."""
    key, meaning = ".".join(path), _meant(path, everywhere)
    if _plain(path[-1]) in NO_KEY:
        return f"{key}: {NO_KEY[_plain(path[-1])]}"
    return f"{key} is {meaning[0]} here{meaning[1]}" if meaning else ""


def _meant(path: Sequence[str], everywhere: Sequence[str]) -> tuple[str, str] | None:
    """Return the counterparts of another system's key (at most two), and anything else worth knowing; None if there are none."""
    names = [_plain(name) for name in path]
    aliases = ALIASES.get(".".join(names[-2:]), ALIASES.get(names[-1], ()))
    meanings = [(key, colon + more) for key, colon, more in (alias.partition(": ") for alias in aliases) if key in everywhere][:2]
    return (" or ".join(key for key, _ in meanings), meanings[0][1]) if meanings else None


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the path of keys to each value in a nested mapping."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from ((name, *path) for path in _leaves(inner)) if isinstance(inner, dict) else [(str(name),)]
