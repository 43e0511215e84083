"""On-policy distillation in the real loop: the policy comes closer to a teacher of another family, wherever the teacher is."""

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.batch import Sample, pack
from megarl.checks.train import check_train
from megarl.config import ConfigError, OptimizerSettings, TeacherServer, TrainConfig, load
from megarl.engines.teacher_server import check_server, score, server_of
from megarl.host.http_calls import Unanswered
from megarl.rewards.score import RewardUnavailable
from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tests.teacher_server import NAME, serving
from tests.vllm_server import NAME as MODEL
from tests.vllm_server import ROOM, serving_with_vllm
from tools.lone_policy import lone_policy
from tools.make_tiny_model import build

SETTINGS = ("algorithm={type: reinforce}", "train.steps=8", "train.mini_batches=1", "train.prompts_per_step=16", "optimizer.lr=2.0e-3")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "model"
    build(path, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1, family="qwen3")
    return path


@pytest.mark.long
def test_the_policy_comes_closer_to_its_teacher(lab: Lab, tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    """Apart on two ranks, the teacher gives the first step the log-probs that it gives on the policy's rank."""
    given = (*SETTINGS, f"distillation.teacher={teacher}")
    shared = lab.run(Job(tmp_path / "shared", tiny_model, given)).steps()
    assert shared[-1]["distillation/k3_kl"] < 0.8 * shared[0]["distillation/k3_kl"]
    alarms = json.loads((tmp_path / "shared" / "job" / "summary.json").read_text())["alarms"]
    assert not {"rewards_equal", "groups_equal", "learned_nothing"} & set(alarms)
    apart = lab.run(Job(tmp_path / "apart", tiny_model, (*given, "train.steps=1", "placement.teacher={ranks: 2, tp: 2}"))).steps()
    for name in ("distillation/reverse_kl", "distillation/k3_kl", "actor/grad_norm"):
        assert apart[0][name] == pytest.approx(shared[0][name], rel=1e-4), name


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    other = tmp_path / "other"
    build(other, layers=2, hidden=128, experts=8, expert_hidden=64, seed=2, family="qwen3", vocab_size=120)
    config = load(Job(tmp_path, tiny_model).write(), [*SETTINGS, f"distillation.teacher={other}"], TrainConfig)
    with pytest.raises(ConfigError, match=r"distillation\.teacher: "):
        check_train(config)


def test_the_policy_learns_from_itself_where_it_sees_the_answer(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """With the answer in its prompt it is at a distance from itself, and the update has a gradient."""
    given = (*SETTINGS, "train.steps=1")
    step = lab.run(Job(tmp_path / "shown", tiny_model, (*given, "distillation.prompt='{prompt} ({answer})'"))).steps()[0]
    assert step["distillation/k3_kl"] > 1e-4 and step["actor/grad_norm"] > 1e-4 and step["distillation/shown"] == 1


def test_a_template_that_names_no_column_is_refused_before_the_start(tmp_path: Path, tiny_model: Path) -> None:
    config = load(Job(tmp_path, tiny_model).write(), [*SETTINGS, "distillation.prompt='{prompt} {hint}'"], TrainConfig)
    with pytest.raises(ConfigError, match=r"^distillation\.prompt: .* has no column 'hint'"):
        check_train(config)


@pytest.mark.long
def test_named_tokens_bring_the_policy_closer_wherever_teacher_and_policy_are(
    lab: Lab, tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    given = (*SETTINGS, f"distillation.teacher={teacher}", "distillation.top_k=8")
    shared = lab.run(Job(tmp_path / "shared", tiny_model, given)).steps()
    assert shared[-1]["distillation/reverse_kl"] < 0.8 * shared[0]["distillation/reverse_kl"]
    split = ("train.steps=1", "layout={ranks: 2, tp: 2}", "placement.teacher={ranks: 2, cp: 2}")
    apart = lab.run(Job(tmp_path / "apart", tiny_model, (*given, *split))).steps()
    for name in ("distillation/reverse_kl", "distillation/forward_kl", "actor/grad_norm"):
        assert apart[0][name] == pytest.approx(shared[0][name], rel=1e-4), name


@pytest.mark.long
def test_a_teacher_on_engines_gives_the_loss_and_gradient_of_one_on_ranks(
    lab: Lab, long: bool, tmp_path: Path, tiny_model: Path, teacher: Path
) -> None:
    """On one engine; with --long on two, which share the responses."""
    given = (*SETTINGS, f"distillation.teacher={teacher}", "train.steps=1", "distillation.top_k=8", "rollout.temperature=0.8")
    on_ranks = lab.run(Job(tmp_path / "ranks", tiny_model, given)).steps()[0]
    engines = f"placement.teacher_engines={{replicas: {1 + long}, kv_cache_mb: 64}}"
    apart = lab.run(Job(tmp_path / "apart", tiny_model, (*given, engines, "layout={ranks: 2, tp: 2}"))).steps()[0]
    for name in ("distillation/reverse_kl", "distillation/forward_kl", "actor/grad_norm"):
        assert apart[name] == pytest.approx(on_ranks[name], rel=1e-5), name


def test_a_server_teaches_as_ranks_do(lab: Lab, tmp_path: Path, tiny_model: Path, teacher: Path) -> None:
    """Also where it has scored some requests at its second attempt; one that gives up ends the run with a checkpoint."""
    given = (*SETTINGS, "train.steps=1")
    on_ranks = lab.run(Job(tmp_path / "ranks", tiny_model, (*given, f"distillation.teacher={teacher}"))).steps()[0]
    with serving(teacher, lambda reply, number: (503, "busy") if number % 7 == 0 else (200, reply)) as server:
        url = f"distillation.server={{url: '{server.url}', model: {NAME}, backoff_s: 0}}"
        served = lab.run(Job(tmp_path / "served", tiny_model, (*given, url))).steps()[0]
    for name in ("distillation/reverse_kl", "distillation/k3_kl", "actor/grad_norm"):
        assert served[name] == pytest.approx(on_ranks[name], rel=1e-5), name
    with serving(teacher, lambda reply, number: (200, reply) if number < 4 else (418, "tea")) as server:
        url = f"distillation.server={{url: '{server.url}', model: {NAME}, backoff_s: 0}}"
        with pytest.raises(RewardUnavailable, match=rf"^distillation\.server\.url: {server.url}: status 418 .*tea"):
            lab.run(Job(tmp_path / "failed", tiny_model, (*given, url)))


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory, teacher: Path) -> Iterator[str]:
    """The address of vLLM's own server of the teacher."""
    with serving_with_vllm(teacher, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


def megatron_logp(path: Path, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Megatron's log-probs of all tokens after each token of each text but the last; in a process of its own."""
    policy, _, _ = lone_policy(path, OptimizerSettings())
    vocabulary = policy.description.vocab
    samples = [Sample(np.array(text, np.int32), 1, np.zeros(len(text) - 1, np.float32), "stop") for text in texts]

    def read(logits_RV: torch.Tensor, row_T: torch.Tensor, batch: object) -> torch.Tensor:
        return logits_RV[row_T, :vocabulary].float().log_softmax(-1)

    return [policy.forward_tokens([pack([sample])], "all_logp", read)[0].extra_T["all_logp"].detach().numpy() for sample in samples]


@pytest.mark.long
def test_vllms_own_server_gives_megatrons_log_probs(vllm_url: str, teacher: Path) -> None:
    """Of the tokens and of the likeliest ones, of texts of any length, and where one begins as another; what does not fit is refused."""
    settings = TeacherServer(url=vllm_url, model=MODEL, attempts=1)
    server, draw, named = server_of(settings, "distillation.server"), np.random.default_rng(1), 20
    texts = [draw.integers(2, 128, length).tolist() for length in (2, 3, 17, 60, 128, 129, ROOM - 1)]
    texts += [texts[-1], texts[-1][:150], [*texts[4], *texts[2]]]
    check_server(settings, "distillation.server", teacher, named, ROOM - 1)
    scored = score(server, settings, "distillation.server", texts, named)
    with multiprocessing.get_context("spawn").Pool(1) as process:
        exact = process.apply(megatron_logp, (teacher, texts))
    for text, one, logp_TV in zip(texts, scored, exact, strict=True):
        assert one.token_TC[:, 0].tolist() == text[1:] and one.token_TC.shape == (len(text) - 1, 1 + named)
        assert one.logp_TC == pytest.approx(np.take_along_axis(logp_TV, one.token_TC.astype(np.int64), 1), rel=1e-5)
        assert one.logp_TC[:, 1:] == pytest.approx(-np.sort(-logp_TV)[:, :named], rel=1e-5)
    with pytest.raises(ConfigError, match=rf"^distillation\.server: teacher at {vllm_url} takes {ROOM} tokens \(max_model_len\), and"):
        check_server(settings, "distillation.server", teacher, named, ROOM)
    with pytest.raises(Unanswered, match=rf"status 400 Bad Request: .*maximum context length is {ROOM} tokens"):
        score(server, settings, "distillation.server", [[3] * ROOM], named)
    with pytest.raises(Unanswered, match=r"status 400 Bad Request: .*prompt logprobs of 21, which is greater than max allowed: 20"):
        score(server, settings, "distillation.server", texts[:1], 21)


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("distillation.top_k=8",)])
def test_vllms_own_server_teaches_as_ranks_do(
    lab: Lab, tmp_path: Path, tiny_model: Path, teacher: Path, vllm_url: str, more: tuple[str, ...]
) -> None:
    given = (*SETTINGS, "train.steps=1", *more)
    on_ranks = lab.run(Job(tmp_path / "ranks", tiny_model, (*given, f"distillation.teacher={teacher}"))).steps()[0]
    server = f"distillation.server={{url: '{vllm_url}', model: {MODEL}}}"
    served = lab.run(Job(tmp_path / "served", tiny_model, (*given, server))).steps()[0]
    for name in ("distillation/reverse_kl", "distillation/forward_kl" if more else "distillation/k3_kl", "actor/grad_norm"):
        assert served[name] == pytest.approx(on_ranks[name], rel=1e-5), name
