"""RL on episodes of several turns: the step is the same on any layout, its experts are replayed, and what fails costs its episode alone."""

import json
from pathlib import Path

import pytest

from megarl.sandbox.level import level
from tests.e2e.job import Job, assert_same_step
from tests.e2e.lab import Lab

GAME = (
    "environment={source: {type: function, path: 'tests.e2e.games:Letters'}, max_turns: 3, max_turn_tokens: 6, step_s: 60, workers: 2}",
    "data.train={type: episodes, seed: 7, items: 64}",
    "data.eval={type: episodes, seed: 1000, items: 8}",
    "reward={source: {type: environment}}",
    "rollout.max_response_tokens=60",
    "routing.replay=r3",
    "train.steps=2",
)


def test_a_step_of_episodes_is_the_same_on_any_layout_and_a_failure_costs_its_episode(
    lab: Lab, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log-prob gap of whole conversations is that of single responses; no replayed expert is missing."""
    jobs = []
    for name, layout in (("one", ()), ("two", ("layout.ranks=2", "layout.cp=2"))):
        jobs.append(lab.run(Job(tmp_path / name, tiny_model, (*GAME, *layout))))
    assert capsys.readouterr().err.count(f"job: the environment runs in a sandbox: {level()} (") == 2
    one, two = jobs
    assert_same_step(two, one)
    first, again = one.steps()[0], two.steps()[0]
    for metric in ("environment/turns/mean", "environment/failed", "environment/tokens/mean", "environment/word/mean", "reward/max"):
        assert first[metric] == again[metric], metric
    assert 0 < first["environment/failed"] < 32 and first["environment/failed"] == first["events/reward/ValueError"]
    assert first["reward/missing"] == first["environment/failed"] / 32 and first["reward/mean"] == first["environment/reward/mean"]
    assert 1 < first["environment/turns/mean"] < 3 and first["environment/turns/max"] == 3 and first["environment/tokens/mean"] > 4
    assert first["response_length/max"] <= 18, "what the environment wrote is no part of it"
    assert first["training/logprob_gap_mean"] <= 1e-5 and first["actor/grad_norm"] > 0
    assert first["routing/replay_hit_rate"] == 1.0
    assert 0 < json.loads((one.runs / "job" / "summary.json").read_text())["score_end"]["sampled"] < 3


@pytest.mark.long
@pytest.mark.parametrize("game", ["Half", "Closed"])
def test_games_that_do_not_begin_cost_themselves_alone(lab: Lab, tmp_path: Path, tiny_model: Path, game: str) -> None:
    """They have an opening that no engine has read, and so no experts to replay."""
    settings = (GAME[0].replace("Letters", game), *GAME[1:], "data.eval={type: episodes, seed: 1001, items: 8}")
    job = lab.run(Job(tmp_path / "one", tiny_model, (*settings, "layout.ranks=2", "layout.ep=2")))
    for row in job.steps():
        assert row["environment/failed"] == row["events/reward/ValueError"] and (row["environment/failed"] == 32) == (game == "Closed")
        assert row.get("routing/replay_hit_rate") == (None if game == "Closed" else 1.0)
        assert row["actor/grad_norm"] == 0 if game == "Closed" else row["actor/grad_norm"] > 0


REWRITES = (  # the number of messages stands before each turn, so that every turn has a context of its own
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}{%- if m.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ messages | length }}<|assistant|>{%- endif -%}"
)


def with_template(model: Path, template: str, out: Path) -> Path:
    """The model with another chat template."""
    out.mkdir()
    for path in model.iterdir():
        (out / path.name).symlink_to(path)
    (out / "chat_template.jinja").unlink()
    (out / "chat_template.jinja").write_text(template)
    return out


@pytest.mark.long
def test_a_template_that_rewrites_turns_trains_every_turn_in_its_own_context(
    lab: Lab, long: bool, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log-probs and experts are the engine's in every context, on two ranks and in several micro-batches, with --long on one, too."""
    model = with_template(tiny_model, REWRITES, tmp_path / "model")
    layouts = {"two": ("layout.ranks=2", "train.micro_batch_tokens=92")} | ({"one": ()} if long else {})
    two, *others = (lab.run(Job(tmp_path / name, model, (*GAME, *own)), own_engine=True) for name, own in layouts.items())
    assert "job: the chat template rewrites some turns later" in capsys.readouterr().err
    row = two.steps()[0]
    for one in others:
        assert_same_step(two, one)
        for metric in ("environment/turns/mean", "environment/failed", "environment/contexts/mean", "response_length/mean", "reward/max"):
            assert row[metric] == one.steps()[0][metric], metric
    assert row["environment/contexts/mean"] == row["environment/turns/mean"] > 1
    assert row["response_length/max"] <= 18 and row["reward/mean"] == row["environment/reward/mean"]
    steps = [step for job in (two, *others) for step in job.steps()]
    assert len(steps) == 2 * len(layouts)
    for step in steps:
        assert step["training/logprob_gap_mean"] <= 1e-5 and step["routing/replay_hit_rate"] == 1.0 and step["actor/grad_norm"] > 0


AGENT = "environment={source: {type: agent, function: 'tests.e2e.agents:play'}, max_turns: 4, max_turn_tokens: 6, sandbox: {network: true}}"


@pytest.mark.long
def test_an_agent_over_openais_client_trains_and_each_context_is_as_the_engine_read_it(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """Two turns, a fork of the first and a conversation of its own: three contexts; agents fail in the first step, by their seeds."""
    job = lab.run(Job(tmp_path / "job", tiny_model, (*GAME, AGENT, "layout.ranks=2", "layout.cp=2")))
    assert job.steps()[0]["environment/failed"] > 0
    for step in job.steps():
        assert step["training/logprob_gap_mean"] <= 1e-5 and step["routing/replay_hit_rate"] == 1.0 and step["actor/grad_norm"] > 0
        assert step["environment/failed"] == step.get("events/reward/ValueError", 0) < 32
        assert step["environment/contexts/mean"] == 3 and step["environment/turns/mean"] == 4
        assert 0 < step["environment/word/mean"] < 1 and step["reward/mean"] == step["environment/reward/mean"]


CALLS = (
    "{%- for tool in tools or [] -%}<tool_call>{{ tool.function.name }}</tool_call>{%- endfor -%}{%- for m in messages -%}<|{{ m.role }}|>"
    "{{ m.content }}{%- if m.role == 'assistant' -%}<|end|>{%- endif -%}{%- endfor -%}<|assistant|>"
)


def test_tools_answer_and_a_reward_scores_the_last_turn(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    """Random weights call no tool: each episode is its first turn, and scores what a single response would."""
    model = with_template(tiny_model, CALLS, tmp_path / "model")
    tools = "environment={source: {type: tools, tools: [calculator]}, max_turns: 3}"
    [row] = lab.run(Job(tmp_path / "runs", model, ("train.steps=1", "rollout.max_prompt_tokens=64", tools))).steps()
    assert row["environment/turns/mean"] == 1.0 and row["environment/tool_calls/mean"] == 0.0
    assert row["reward/mean"] > 0 and row["training/logprob_gap_mean"] <= 1e-5
