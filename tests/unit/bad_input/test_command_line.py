"""Bad input through the command line: one line with the dotted key and the numbers, before any process starts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import command as cli
from tests.e2e.job import RL


def refusal(runs: Path, model: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """The one line with which a configuration is refused."""
    config = runs / "job.yaml"
    config.write_text(RL.format(runs=runs / "out", model=model))
    assert cli.main(["train", str(config), *overrides]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megarl: error: ")]
    assert len(lines) == 1, lines
    assert not (runs / "out").exists(), "nothing was started"
    return lines[0].removeprefix("megarl: error: ")


def test_the_job_itself_passes(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(RL.format(runs=tmp_path / "out", model=tiny_model))
    assert cli.main(["train", str(config), "--check"]) == 0
    assert "passes every check" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.learning_rate=1", "optimizer.learning_rate: unknown key"),
        ("train.step=3", r"train.step: unknown key \(did you mean 'steps'\?\)"),
        ("model.megatron.moe_aux_los_coeff=0.1", r"model.megatron.moe_aux_los_coeff: .*did you mean 'moe_aux_loss_coeff'"),
        ("model.trust_remote_code=true", "model.trust_remote_code: "),
        ("algorithm.type=gpso", "^algorithm.type: unknown: 'gpso' .*'grpo'.*'gspo'"),
        ("algorithm.type=vapo", "^critic: algorithm.type=vapo needs a critic"),
        (
            'reward.source={"type":"reasoning_gym"} data.eval.dataset=countdown data.eval.params={}',
            "^data.eval.dataset: countdown: reasoning-gym's scorer evaluates the response as Python",
        ),
        ("critic.pretrain_steps=3", "^critic: algorithm.type=gspo has no critic"),
        ("algorithm.type=vapo critic.path=/nowhere", "^critic.path: .*/nowhere"),
        ("algorithm.type=rloo rollout.samples_per_prompt=1", "^rollout.samples_per_prompt=1: algorithm.type=rloo .* at least 2"),
        ("algorithm.kl_kind=k1 algorithm.kl_coef=0.1", "^algorithm: kl_kind=k1 with kl_in=loss: its gradient has expectation 0"),
        ("placement.critic.ranks=2", "^placement.critic: algorithm.type=gspo has no critic; leave this out"),
        (
            "placement.engines=shared rollout.replicas=2",
            r"^placement.engines=shared: rollout.replicas\*rollout.dp\*rollout.tp=2\*1\*1=2 is more than layout.ranks=1",
        ),
        (
            "placement.engines=shared rollout.dp=2 rollout.expert_parallel=true",
            r"^placement.engines=shared: rollout.replicas\*rollout.dp\*rollout.tp=1\*2\*1=2 is more than layout.ranks=1",
        ),
        (
            "placement.engines=shared cluster.gpus=true sync.transport=nccl",
            "^sync.transport=nccl with placement.engines=shared: on one GPU only",
        ),
        ("sync.delta=10", "^sync.delta=10: sends less over a network, but sync.transport=shm shares memory"),
        ("sync.delta=10 sync.transport=gloo", "^sync.delta=10: an update changes every weight of engines in float32"),
        ("sync.delta=1", "^sync.delta: .*greater than or equal to 2"),
        ("sync.overlap=true", "^sync.overlap=true: with rollout.mode=sync no engine generates during a sync"),
        (
            "sync.overlap=true rollout.mode=free rollout.max_lag=1 algorithm.correction.type=tis",
            r"^sync.overlap=true: receives over a network \(gloo, nccl\), not with sync.transport=shm",
        ),
        ("placement.reference.ranks=2", "^placement.reference: algorithm.kl_coef=0 keeps no reference"),
        ("placement.reward.ranks=2", "^placement.reward: reward.source.type=function is not a reward model"),
        ("algorithm.kl_coef=0.1 placement.reference.ranks=32", "^placement.reference.ranks=32: 32 data-parallel ranks for 16 sequences"),
        ("reward.source.type=reward_model reward.source.path=/nowhere", "^reward.source.path: .*/nowhere"),
        (
            "reward.source.type=reward_model reward.source.path=MODEL",
            "^reward.source.path: .* is a Qwen3MoeForCausalLM, but a reward model needs a trained scalar head",
        ),
        (  # which the plan looks at, too
            "cluster.gpus=true cluster.gpu_memory_gb=80 cluster.address=auto cluster.interface=eth0 sync.transport=nccl "
            "model.dtype=bfloat16 rollout.engine.args.nonsense=1",
            "^rollout.engine.args.nonsense: no such field of vLLM's AsyncEngineArgs",
        ),
        ("reward.normalise.prompts=65", "^reward.normalise.prompts=65: data.train holds 64 prompts"),
        ("reward.normalise.prompts=1", "^reward.normalise.prompts: .*greater than or equal to 2"),
        ("train.on_alarm=pause", "^train.on_alarm: .*'continue' or 'stop'"),
        ("model.weights=/nowhere", "^model.weights: no such directory: /nowhere"),
        ("model.weights=MODEL", "^model.weights: .* is not a step directory"),
        ("data.train.type=null", r"^data.train.type: required, but missing \(one of 'reasoning_gym', 'file', 'mixture', 'episodes'\)$"),
        ("data.train.file=3", r"^data.train.file: unknown key"),
        ("layout.ranks=3 layout.tp=2", r"^layout.ranks=3 is not divisible by tp\*pp\*cp=2\*1\*1=2"),
        ("layout.ranks=3 layout.tp=3", "layout.tp=3: model has 4 attention heads, not divisible by 3"),
        ("layout.ranks=4 layout.tp=4", "layout.tp=4: model has 2 key-value heads, not divisible by 4"),
        ("layout.ranks=3 layout.ep=3", "layout.ep=3: model has 8 experts, not divisible by 3"),
        ("layout.ranks=3 layout.pp=3", "layout.pp=3: model has 2 layers, not divisible by 3"),
        ("layout.ranks=2 layout.pp=2 layout.vpp=4", r"layout.vpp=4: model has 2 layers, not divisible by pp\*vpp=2\*4=8"),
        ("rollout.max_prompt_tokens=3", "data.train: item 0: prompt of [0-9]+ tokens is longer than rollout.max_prompt_tokens=3"),
        (
            "rollout.max_response_tokens=600 train.micro_batch_tokens=700",
            r"rollout.max_response_tokens=600 with max_prompt_tokens=16: 616 tokens, and the model supports at most 512",
        ),
        ("train.micro_batch_tokens=20", r"^train.micro_batch_tokens=20 is below rollout.max_prompt_tokens\+max_response_tokens=28"),
        ("train.mini_batches=5", r"^train.mini_batches=5 does not divide .*8\*4=32"),
        ("train.prompts_per_step=100", "train.prompts_per_step=100: data.train holds 64 prompts"),
        ("sync.transport=nccl", "sync.transport=nccl does not go with cluster.gpus=false"),
        ("reward.source.path=tests.e2e.nowhere:score", "reward.source.path: cannot import module 'tests.e2e.nowhere'"),
        ("reward.source.path=tests.e2e.rewards:nothing", "reward.source.path: .*'nothing'"),
    ],
)
def test_a_value_is_refused(override: str, line: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = refusal(tmp_path, tiny_model, capsys, *override.replace("MODEL", str(tiny_model)).split())
    assert re.search(line, found), found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"train: {steps: 1, steps: 2}", "the key 'steps' is given twice"),
        (b"name: \xff", "is not UTF-8: byte 6"),
        (b"name: [", "is not accepted as YAML"),
        (b"- 1", "must hold a mapping, not list"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "job.yaml"
    config.write_bytes(text)
    assert cli.main(["train", str(config)]) == 2
    [refused] = capsys.readouterr().err.splitlines()
    assert refused.startswith(f"megarl: error: config: {config} ") and line in refused


PAIRS = """
name: job
run_dir: {runs}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false}}
data:
  train: &words {{type: reasoning_gym, dataset: spell_backward, seed: 7, items: 8}}
  eval: *words
reward: {{source: {{type: reasoning_gym}}}}
rollout: {{max_prompt_tokens: 64, max_response_tokens: 64, kv_cache_mb: 16}}
"""


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt=1: a pair needs two responses"),
        ("reward.source={type: reward_model, path: x}", "reward.source.type=reward_model: .* has no ranks .*`megarl serve`"),
        ("reward.normalise={prompts: 8}", "reward.normalise: `megarl pairs` compares what reward.source says"),
        ("model.weights=/nowhere", "model.weights: "),
        ("rollout.max_response_tokens=4096", "rollout.max_response_tokens=4096 with .*: .* the model supports at most 512"),
        ("pairs.per_prompt=0", "pairs.per_prompt: "),
    ],
)
def test_pairs_that_cannot_be_made_are_refused(
    override: str, line: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pairs.yaml"
    config.write_text(PAIRS.format(runs=tmp_path / "out", model=tiny_model))
    assert cli.main(["pairs", str(config), "--check"]) == 0
    assert cli.main(["pairs", str(config), override]) == 2
    assert re.search(f"^megarl: error: {line}", capsys.readouterr().err, re.M) and not (tmp_path / "out").exists()


def test_a_language_model_is_not_served_as_a_reward_model(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(f"name: serve\nmodel: {{path: {tiny_model}, dtype: float32}}\ncluster: {{gpus: false}}\nserve: {{max_tokens: 64}}\n")
    assert cli.main(["serve", str(config)]) == 2
    assert "a reward model needs a trained scalar head" in capsys.readouterr().err


def test_a_missing_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"model\.path: .*nowhere", refusal(tmp_path, tmp_path / "nowhere", capsys))


@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_a_damaged_checkpoint_is_refused(fault: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tiny_model / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3, 5)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    found = refusal(tmp_path, model, capsys)
    assert found.startswith("model.path: ") and name in found
    assert "missing" in found if fault == "missing" else "[3, 5], expected [64, 128]" in found


@pytest.mark.parametrize("role", ["critic.path", "reward.source.path"])
@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        (
            "config.json",
            '"hidden_size": 128',
            '"hidden_size": 96',
            r"model.embed_tokens.weight has shape \[128, 128\], expected \[128, 96\]",
        ),
        (
            "config.json",
            '"max_position_embeddings": 512',
            '"max_position_embeddings": 20',
            ": 28 tokens, and the model supports at most 20",
        ),
        (
            "config.json",
            '"num_key_value_heads": 2',
            '"num_key_value_heads": 4',
            r"k_proj.weight has shape \[64, 128\], expected \[128, 128\]",
        ),
        ("tokenizer_config.json", '"<|end|>"', '"<|pad|>"', r"its tokenizer differs from model.path's: eos_token is '<\|pad\|>' in"),
    ],
    ids=["another size", "too few positions", "another shape", "another tokenizer"],
)
def test_a_critic_or_reward_model_that_does_not_fit_is_refused(
    role: str, file: str, old: str, new: str, line: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    text = (other / file).read_text()
    assert old in text
    (other / file).write_text(text.replace(old, new))
    critic = ("algorithm.type=vapo", f"critic.path={other}")
    given = critic if role == "critic.path" else (f"reward.source={{type: reward_model, path: {other}}}",)
    found = refusal(tmp_path, tiny_model, capsys, *given)
    assert found.startswith(f"{role}: ") and str(other) in found and re.search(line, found), found


def test_a_critic_of_another_depth_must_divide_too(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.distributed.tiny_training import make_checkpoint  # imports Megatron

    other = make_checkpoint(tmp_path / "other", num_hidden_layers=3)
    found = refusal(tmp_path, tiny_model, capsys, "algorithm.type=vapo", f"critic.path={other}", "layout.ranks=2", "layout.pp=2")
    assert found == f"critic.path: {other}: layout.pp=2: model has 3 layers, not divisible by 2"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n{"prompt": \n', "prompts.jsonl:2"),
        (
            json.dumps({"prompt": "x" * 90, "reward_model": {"ground_truth": "2"}}) + "\n",
            "prompts.jsonl:1: prompt of 92 tokens is longer .*=16",
        ),
    ],
    ids=["empty", "malformed", "long"],
)
def test_a_faulty_prompt_file_is_refused(
    content: str, line: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(content)
    found = refusal(tmp_path, tiny_model, capsys, f"data.train={{type: file, path: {prompts}}}")
    assert found.startswith("data.train") and re.search(line, found), found
