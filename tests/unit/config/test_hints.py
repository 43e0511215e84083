"""What follows "unknown key": names of other systems lead to ours, a slip to the key of the same section."""

from pathlib import Path

import pytest

from megarl.config import ConfigError, SftConfig, TrainConfig, load
from megarl.config.hints import ALIASES, NO_KEY
from megarl.config.loading import _dotted
from megarl.imports import find
from megarl.verbs import VERBS

CONFIG = """
name: hints
model: {path: nowhere}
algorithm: {type: gspo}
data: {train: {type: file, path: x.jsonl}, eval: {type: file, path: x.jsonl}}
reward: {source: {type: math_verify}}
train: {steps: 1, prompts_per_step: 8}
"""


def test_every_alias_leads_to_a_key() -> None:
    known = {key for verb in VERBS.values() for key in _dotted(find(verb.config))}
    assert {place.partition(": ")[0] for places in ALIASES.values() for place in places} <= known
    assert not (set(ALIASES) | set(NO_KEY)) & {key for key in known if "." not in key}
    assert not set(ALIASES) & set(NO_KEY)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("optimizer.learning_rate", " (here it is optimizer.lr)"),
        ("learning_rate", " (here it is optimizer.lr)"),
        ("rollout.n", " (here it is rollout.samples_per_prompt)"),
        ("rollout.rollout_top_p", " (here it is rollout.top_p)"),
        ("algorithm.clip_ratio", " (here it is algorithm.clip_low or algorithm.clip_high)"),
        ("data.train_batch_size", " (here it is train.prompts_per_step)"),
        ("train.stesp", " (did you mean 'steps'?)"),
        ("train.temperature", " (there is rollout.temperature)"),
        ("data.max_respons_tokens", " (did you mean 'rollout.max_response_tokens'?)"),
        ("train.xyzzy", ""),
        ("model.trust_remote_code", " (code in a model directory is never run)"),
        ("n-samples-per-prompt", " (here it is rollout.samples_per_prompt)"),
        ("data.eval.n", " (here it is eval: a list of sets, each with a name, a source and its n)"),
        ("ppo_mini_batch_size", " (here it is train.mini_batches: how many, not how large: prompts_per_step / ppo_mini_batch_size)"),
        (
            "global-batch-size",
            " (here it is train.mini_batches: how many, not how large: prompts_per_step * samples_per_prompt / global_batch_size)",
        ),
        ("num_train_epochs", " (here it is train.steps: counted in steps, not in passes over the data)"),
        (
            "optimizer.cpu_offload",
            " (here it is optimizer.megatron: {optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0})",
        ),
        ("rollout.enforce_eager", " (here it is rollout.engine.args: {enforce_eager: true}; on a CPU it is always so)"),
        ("rollout.max_model_len", " (here it is rollout.max_response_tokens: an engine has room for that and max_prompt_tokens)"),
        ("critic_warmup", " (here it is critic.pretrain_steps)"),
        ("algorithm.use_kl_in_reward", " (here it is algorithm.kl_in: loss or reward)"),
        ("algorithm.norm_adv_by_std_in_grpo", " (here it is algorithm.scale: none, or group for true)"),
        ("partial_rollout", " (here it is rollout.mode: budget or free)"),
        ("data.filter_overlong_prompts", " (here it is rollout.max_prompt_tokens: a longer prompt is refused, and none is left out)"),
        ("use_dynamic_bsz", " (here it is train.micro_batch_tokens: it is always so)"),
        ("model.use_remove_padding", " (always so: no batch has padding)"),
        ("algorithm.loss_mode", " (here it is algorithm.type)"),
        ("model.lora_rank", " (here it is model.lora.rank)"),
        ("optimizer.muon_num_ns_steps", " (here it is optimizer.muon.ns_steps)"),
        ("optimizer.use_muon", " (here it is optimizer.muon)"),
    ],
)
def test_an_unknown_key_gets_a_hint(tmp_path: Path, key: str, hint: str) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "a.yaml", [f"{key}=1"], TrainConfig)
    assert str(refused.value) == f"{key}: unknown key{hint}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "actor_rollout_ref.actor.optim.lr=1",
            "actor_rollout_ref: unknown key (actor.optim.lr is optimizer.lr or critic.optimizer.lr here)",
        ),
        (
            "trainer.total_epochs=3",
            "trainer: unknown key (total_epochs is train.steps here: counted in steps, not in passes over the data)",
        ),
        (
            "actor_rollout_ref={rollout: {val_kwargs: {n: 4}}, model: {use_remove_padding: true}}",
            "actor_rollout_ref: unknown key (rollout.val_kwargs.n is eval here: a list of sets, each with a name, a source and its n, "
            "model.use_remove_padding: always so: no batch has padding)",
        ),
        ("trian.xyzzy=3", "trian: unknown key (did you mean 'train'?)"),
        (
            "actor={a: {n: 1}, b: {c: {}}, d: [], ppo_epochs: 2, save_freq: 3}",
            "actor: unknown key (a.n is rollout.samples_per_prompt here, ppo_epochs is train.epochs here)",
        ),
    ],
)
def test_keys_of_another_systems_section_are_known(tmp_path: Path, override: str, told: str) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "a.yaml", [override], TrainConfig)
    assert str(refused.value) == told


def test_a_foreign_key_leads_to_a_key_of_the_same_verb(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "name: a\nmodel: {path: m}\ndata: {train: {type: file, path: x}}\nsft: {steps: 1, train_batch_size: 2}"
    )
    with pytest.raises(ConfigError, match=r"^sft.train_batch_size: unknown key \(here it is sft.batch_size\)$"):
        load(tmp_path / "a.yaml", [], SftConfig)
    text = (tmp_path / "a.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace("train_batch_size", "global_batch_size"))
    with pytest.raises(ConfigError, match=r"^sft.global_batch_size: unknown key \(here it is sft.batch_size\)$"):
        load(tmp_path / "a.yaml", [], SftConfig)


def test_all_contradictions_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    faults = [
        "algorithm.type=ppo",
        "train.mini_batches=7",
        "train.micro_batch_tokens=8",
        "train.best=eval/x/avg@1",
        "placement.reward.ranks=2",
    ]
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "a.yaml", faults, TrainConfig)
    assert [line.partition("=")[0].partition(":")[0] for line in str(refused.value).splitlines()] == [
        *("train.mini_batches", "critic", "train.best", "placement.reward", "train.micro_batch_tokens"),
    ]


def test_an_invalid_value_does_not_hide_contradictions_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    faults = ["train.mini_batches=7", "train.best=eval/x/avg@1", "rollout.top_p=2", "log.samplse=1", "train.micro_batch_tokens=many"]
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "a.yaml", faults, TrainConfig)
    assert [line.partition("=")[0].partition(":")[0] for line in str(refused.value).splitlines()] == [
        *("log.samplse", "rollout.top_p", "train.micro_batch_tokens", "train.mini_batches", "train.best"),
    ]


def test_an_invalid_value_is_not_replaced_by_its_default_in_other_checks(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as refused:  # mini_batches=64 would be too many for the default of prompts_per_step
        load(tmp_path / "a.yaml", ["train.mini_batches=1000", "train.prompts_per_step=lots"], TrainConfig)
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == ["train.prompts_per_step"]


def test_a_key_that_is_part_of_a_longer_one_is_not_confused_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as refused:
        load(tmp_path / "a.yaml", ["train.mini_batches=7", "log.samples=many"], TrainConfig)
    fault, contradiction = str(refused.value).splitlines()
    assert fault.startswith("log.samples: ") and "samples_per_prompt" in contradiction
