"""A teacher's server: what it says is read exactly, and refused by name where it cannot be what the policy is compared with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import ConfigError, TeacherServer
from megarl.engines.engine import TokenScores
from megarl.engines.teacher_server import check_server, score, server_of
from megarl.host.http_calls import Unanswered
from tests.teacher_server import NAME, serving
from tests.teacher_server import TeacherServer as Teacher
from tools.make_tiny_model import build

KEY, K = "distillation.server", 4
TEXTS = [[5, 9, 13, 40], [7, 6], [3, 3, 3, 60, 2, 8]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "model"
    build(path, layers=1, hidden=128, experts=2, expert_hidden=32, seed=1, family="qwen3")
    return path


def settings(server: Teacher, **given: Any) -> TeacherServer:
    return TeacherServer.model_validate({"url": server.url, "model": NAME, "backoff_s": 0, "attempts": 3, **given})


def scores(server: Teacher, named: int = K) -> list[TokenScores]:
    own = settings(server)
    return score(server_of(own, KEY), own, KEY, TEXTS, named)


@pytest.mark.parametrize("named", [0, K])
def test_scores_are_the_models(model: Path, named: int) -> None:
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with serving(model) as server:
        found = scores(server, named)
    for text, one in zip(TEXTS, found, strict=True):
        with torch.no_grad():
            logp_TV = exact(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
        assert one.token_TC[:, 0].tolist() == text[1:]
        assert np.array_equal(one.token_TC[:, 1:], logp_TV.topk(named).indices.numpy())
        assert one.logp_TC == pytest.approx(logp_TV.gather(1, torch.tensor(one.token_TC.astype(np.int64))).numpy(), abs=1e-5)


def test_a_server_that_fails_for_a_while_is_asked_again(model: Path) -> None:
    with serving(model, lambda reply, number: (503, "busy") if number == 2 else (200, reply)) as server:
        assert len(scores(server)) == 3 and len(server.bodies) == 4


def entries(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    def changed(reply: dict[str, Any], number: int) -> tuple[int, Any]:
        reply["choices"][0]["prompt_logprobs"] = change(reply["choices"][0]["prompt_logprobs"])
        return 200, reply

    return changed


def logits(found: list[Any]) -> list[Any]:
    return [one and {token: {"logprob": 0.0} for token in one} for one in found]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda reply, number: (200, {"choices": [{"text": "x"}]}), "the answer has no prompt_logprobs by token id: "),
        (entries(lambda found: [one and {f"t{token}": one[token] for token in one} for one in found]), "no prompt_logprobs by token id"),
        (entries(lambda found: found[:-1]), "prompt_logprobs of "),
        (
            entries(lambda found: [one and dict([*one.items()][: K - 1]) for one in found]),
            "prompt_logprobs of 3 tokens at token 1",
        ),
        (entries(lambda found: [one and {"1": {"logprob": -1}} for one in found]), r"prompt_logprobs without the token itself at token 1"),
        (entries(logits), r"prompt_logprobs at token 1 are no log-probs: their exponentials add up to [45]"),
        (lambda reply, number: (400, "max_logprobs is 3"), "status 400 Bad Request: .*max_logprobs is 3"),
        (lambda reply, number: (500, "out of memory"), r"status 500 .*out of memory.* \(3 attempts.*distillation\.server\.attempts=3"),
    ],
)
def test_a_server_that_does_not_score_is_named(model: Path, change: Any, said: str) -> None:
    with serving(model, change) as server, pytest.raises(Unanswered, match=rf"^distillation\.server\.url: {server.url}: .*{said}"):
        scores(server)


def test_a_server_is_checked_before_the_start(model: Path, tmp_path: Path) -> None:
    """Its models, their room, its tokenizer by what it makes of a text, and its log-probs."""
    other = tmp_path / "other"
    build(other, layers=1, hidden=128, experts=2, expert_hidden=32, seed=1, family="qwen3", vocab_size=128)
    text = (other / "tokenizer.json").read_text()
    with serving(model) as server:
        check_server(settings(server), KEY, model, K, 64)
        with pytest.raises(ConfigError, match=rf"^distillation\.server\.model: 'm' is not among .* {server.url}: teacher, other$"):
            check_server(settings(server, model="m"), KEY, model, K, 64)
        server.room = 65
        check_server(settings(server), KEY, model, K, 64)
        server.room = 64
        room = r"takes 64 tokens \(max_model_len\), and the longest context has 64 \(rollout\..*\), with 1 more for the answer$"
        with pytest.raises(ConfigError, match=rf"^distillation\.server: teacher at {server.url} {room}"):
            check_server(settings(server), KEY, model, K, 64)
        server.room = None
        (other / "tokenizer.json").write_text(swapped(text))
        with pytest.raises(ConfigError, match=r"^distillation\.server: the tokenizer of teacher at http\S+ differs from that of"):
            check_server(settings(server), KEY, other, K, 64)
    said = r"^distillation\.server\.url: \S+: status 404 Not Found: .*no such path"
    with serving(model, lambda reply, number: (404, "no such path")) as server, pytest.raises(ConfigError, match=said):
        check_server(settings(server), KEY, model, K, 64)


def swapped(tokenizer: str) -> str:
    """tokenizer.json with the ids of two digits exchanged."""
    read = json.loads(tokenizer)
    vocabulary = read["model"]["vocab"]
    here, there = ([token for token, _ in vocabulary].index(digit) for digit in "34")
    vocabulary[here], vocabulary[there] = vocabulary[there], vocabulary[here]
    return json.dumps(read)
