"""A sum of rewards of every kind: each part is scored, and fails, as it does alone."""

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ConfigError, ModelReward, RewardSettings, TrainConfig, load, model_of
from megarl.ranks.step_plan import turn_weight
from megarl.rewards.score import RewardUnavailable, Score, ScoreRequest
from megarl.rewards.sources import check, open_scorer
from megarl.step.reward import Judge, Reward, open_scorers
from tests.e2e.job import RL
from tests.unit.rewards.test_http import length_of, reply, serving

MATH = {"name": "right", "source": {"type": "math_verify"}, "weight": 2.0}
WORLD = {"name": "world", "source": {"type": "environment"}, "weight": 10.0}
MODEL = {"name": "judge", "source": {"type": "reward_model", "path": "/nowhere"}, "weight": 100.0}


def server(url: str) -> dict[str, Any]:
    source = {"type": "http", "url": url, "batch_size": 2, "attempts": 2, "backoff_s": 0.01, "timeout_s": 5.0}
    return {"name": "far", "source": source, "weight": 0.5}


def summed(*parts: dict[str, Any], **more: Any) -> RewardSettings:
    return RewardSettings.model_validate({"source": {"type": "sum", "parts": list(parts)}, **more})


def ask(response: str, answer: str, earned: float = 0.0, judged: float = 0.0, *, finished: bool = True) -> Any:
    return ScoreRequest("question", response, answer, {}, finished, earned, Score(judged, {"model": judged}))


def length_unless_22(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """The server of `length_of`, which has no score for one response."""
    if [sample["response"] for sample in body["samples"]] == ["22"]:
        reply(handler, b'{"scores": [null]}')
    else:
        length_of(handler, body)


def test_every_kind_of_reward_is_a_part_of_a_sum() -> None:
    with serving(length_unless_22) as there, open_scorer(summed(server(there.url), MATH, WORLD, MODEL)) as scorer:
        scores = scorer.score([ask("4", "4", 3.0, 0.25), ask("13", "4", 1.0, -1.0), ask("22", "22")])
        cut = scorer.score([ask("444", "4", 3.0, 0.25, finished=False)])
        assert sorted(len(body["samples"]) for body in there.bodies) == [1, 2], "in batches, and nothing that was cut"
    assert [score.value for score in scores] == [0.5 * 1 + 2 * 1 + 10 * 3 + 100 * 0.25, 0.5 * 2 + 2 * 0 + 10 * 1 - 100, None]
    assert scores[0].parts == {"far": 1.0, "far/right": 1.0, "right": 1.0, "world": 3.0, "judge": 0.25, "judge/model": 0.25}
    assert scores[2] == Score(None, error="abstained"), "where one of them has no score for a response, there is no sum"
    assert cut == [Score(10 * 3 + 100 * 0.25, {"world": 3.0, "judge": 0.25, "judge/model": 0.25})], "nobody has looked at the others"


def test_an_error_in_a_part_of_a_sum_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(length_of) as there:
        given = summed(MATH, server(there.url))
        check(given)
    with pytest.raises(ConfigError, match=r"^reward\.source\.parts\.1\.source\.url: http://127\S+: ConnectionRefusedError"):
        check(given)
    with pytest.raises(ConfigError, match=r"^reward\.eval\.parts\.1\.source\.url: http://127"):
        check(RewardSettings.model_validate({"source": MATH["source"], "eval": given.source.model_dump()}))
    with open_scorer(given) as scorer, pytest.raises(RewardUnavailable, match=r"^reward\.source\.parts\.1\.source\.url: .*\(2 attempts"):
        scorer.score([ask("4", "4")])
    monkeypatch.delenv("NO_TOKEN", raising=False)
    silent = server("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"^reward\.source\.parts\.0\.source\.token_env: the environment variable NO_TOKEN is not set"):
        open_scorer(summed({**silent, "source": {**silent["source"], "token_env": "NO_TOKEN"}}, MATH))
    broken = {"name": "own", "source": {"type": "function", "path": "nowhere:f"}}
    with pytest.raises(ConfigError, match=r"^reward\.source\.parts\.2\.source\.path: cannot import module 'nowhere'"):
        check(summed(WORLD, silent, broken))
    with pytest.raises(ValueError, match="judge and second are reward models, and the ranks hold one"):
        summed(MODEL, {**MODEL, "name": "second"})
    with pytest.raises(ValueError, match="a part of it is a reward model, and evaluations count what needs none"):
        summed(MATH, eval=summed(MODEL).source.model_dump())


def test_a_sum_beyond_every_bound_scores_nothing() -> None:
    with open_scorer(summed({**WORLD, "weight": 1000.0}, MODEL)) as scorer:
        [score] = scorer.score([ask("", "", 1e7, 0.0)])
    assert score.value is None and score.error == "bad return: the weighted sum is 1e+10, and beyond 1e+09 nothing is taken"


def test_the_ranks_read_the_responses_of_a_sum_with_a_reward_model() -> None:
    settings = summed(MATH, MODEL)
    found = model_of(settings.source)
    assert found is not None and found[0] == "reward.source.parts.1.source"
    with open_scorers(settings, print) as scorers:
        ranks: Any = SimpleNamespace(rewards=lambda responses: [len(response.text) / 4 for response in responses])
        train, held_out = scorers.rewards(ranks)
        assert train.on_ranks and held_out.on_ranks and train.judge is not None
        prompt: Any = SimpleNamespace(text="1+3", answer="4", meta={}, given="1+3", images=())
        said: Any = SimpleNamespace(text="4", prompt=0, finished=True, episode=None)
        [score] = train.scores([prompt], [said])
    assert score == Score(2 * 1.0 + 100 * 0.25, {"right": 1.0, "judge": 0.25, "judge/model": 0.25})
    with open_scorers(summed(MATH, MODEL, eval=MATH["source"]), print) as scorers:
        assert [reward.on_ranks for reward in scorers.rewards(ranks)] == [True, False]
    cut: Any = SimpleNamespace(text="4", finished=False)
    judge = Judge(ModelReward(path=Path("/nowhere"), unfinished=-3.0), ranks)
    assert [score.value for score in judge.scores([said, cut])] == [0.25, -3.0] and not Reward(settings, scorers.train).on_ranks


def test_turn_rewards_are_weighted_by_their_part() -> None:
    assert turn_weight(summed(MATH, WORLD)) == 10.0 and turn_weight(summed(MATH)) == 0.0
    assert turn_weight(RewardSettings.model_validate({"source": WORLD["source"]})) == 1.0
    assert turn_weight(summed(WORLD, normalise={"prompts": 8})) == 0.0


def test_a_sum_with_a_reward_model_has_ranks_for_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=tmp_path))
    part = "{name: judge, source: {type: reward_model, path: models/judge}}"
    given = [f"reward.source={{type: sum, parts: [{{name: right, source: {{type: math_verify}}}}, {part}]}}", "placement.reward={ranks: 2}"]
    config = load(tmp_path / "job.yaml", given, TrainConfig)
    found = model_of(config.reward.source)
    assert found is not None and found[1].path == Path.cwd() / "models/judge", "a relative path is that of where the command ran"
