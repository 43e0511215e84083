"""The signs of over-optimisation, each told once, by name and with advice."""

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from megarl.config import RoutingSettings
from megarl.observe.alarms import Alarms, lasting_signs

Row = Mapping[str, float]
STEPS = {event: sign.steps for event, sign in lasting_signs(RoutingSettings(), ahead=True).items()}
KL_STEPS, OUTSIDE_STEPS, REROUTED_STEPS = STEPS["kl_beyond_target"], STEPS["reward_outside_range"], STEPS["rollout_routing"]


def given(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """(number of the row, event) of every alarm."""
    alarms = Alarms()
    return [(number, event) for number, row in enumerate(rows) for event in alarms.check(number, row)]


def evaluated(rate: float) -> dict[str, float]:
    return {"eval/heldout/avg@1": rate, "eval/heldout/greedy": rate, "eval/heldout/stderr": 0.03}


def stepped(reward: float) -> Row:
    return {"reward/mean": reward}


def test_a_rising_reward_with_a_falling_pass_rate_raises_an_alarm() -> None:
    rows = [evaluated(0.25), stepped(1.0), stepped(2.0), evaluated(0.5), stepped(3.0), evaluated(0.45), stepped(4.0), evaluated(0.2)]
    assert given([*rows, evaluated(0.0)]) == [(7, "over_optimisation")]
    [message] = [text for alarms in [Alarms()] for number, row in enumerate(rows) for text in alarms.check(number, row).values()]
    assert message.startswith(
        "step 7: over-optimisation: the held-out score of heldout is 0.2, down from 0.5, while the reward has risen from 1.5 to 3"
    )


@pytest.mark.parametrize(
    "rows",
    [
        [evaluated(0.5), stepped(2.0), stepped(1.0), evaluated(0.2)],  # both fall: a collapse, and no over-optimisation
        [evaluated(0.5), stepped(1.0), stepped(2.0), evaluated(0.4)],  # noise: 2.3 standard errors
        [evaluated(0.5), stepped(1.0), stepped(2.0), evaluated(0.2) | {"eval/heldout/stderr": 0.1}],  # of few prompts
        [evaluated(0.5), stepped(2.0), stepped(1.0), stepped(1.1), stepped(2.1), evaluated(0.2)],  # the reward of one step
        [evaluated(0.5), evaluated(0.2)],  # nothing was trained
        [evaluated(0.2), stepped(1.0), stepped(2.0), evaluated(0.5)],
    ],
)
def test_healthy_runs_raise_no_alarm(rows: Sequence[Row]) -> None:
    assert given(rows) == []


def test_kl_beyond_twice_its_target_raises_an_alarm() -> None:
    far, near = ({"actor/reference_kl": kl, "actor/kl_target": 6.0} for kl in (12.1, 11.9))
    assert given([far] * (KL_STEPS - 1) + [near] + [far] * KL_STEPS) == [(2 * KL_STEPS - 1, "kl_beyond_target")]
    assert given([{"actor/reference_kl": 100.0}] * (KL_STEPS + 1)) == []


@pytest.mark.parametrize("name", ["reward/outside/mean", "reward/judge/outside/mean"])
def test_scores_outside_the_reward_models_range_raise_an_alarm(name: str) -> None:
    """A reward model alone, or a part of a sum."""
    far, near = ({name: share} for share in (0.3, 0.2))
    assert given([far] * (OUTSIDE_STEPS - 1) + [near] + [far] * OUTSIDE_STEPS) == [(2 * OUTSIDE_STEPS - 1, "reward_outside_range")]


@pytest.mark.parametrize(("replay", "names"), [("off", ["rollout_routing", "policy_routing"]), ("r2", ["rollout_routing"]), ("r3", [])])
def test_rerouted_tokens_raise_an_alarm_unless_replayed(replay: Literal["off", "r2", "r3"], names: list[str]) -> None:
    row = {"routing/rollout_changed_frac": 0.06, "routing/policy_changed_frac": 0.07}
    alarms = Alarms(RoutingSettings(replay=replay, alarm=0.05))
    found = [(number, event) for number in range(REROUTED_STEPS + 2) for event in alarms.check(number, row)]
    assert found == [(REROUTED_STEPS - 1, name) for name in names]
    assert not [event for number in range(9) for event in Alarms(RoutingSettings(alarm=0.08)).check(number, row)]
    assert given([row] * 9) == []


ALIVE = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/unscored": 0.1,
    "reward/missing": 0.1,
    "frac_reward_zero_std": 0.5,
    "response_length/mean": 20.0,
    "response_length/clip_ratio": 0.1,
    "actor/grad_norm": 0.3,
    "actor/entropy": 0.8,
    "actor/reference_kl": 2.0,
    "actor/ppo_kl": 0.001,
    "rollout_corr/kl": 0.001,
}
DEAD = {
    "all_truncated": {"response_length/clip_ratio": 1.0},
    "responses_unscored": {"reward/unscored": 0.6},
    "rewards_missing": {"reward/missing": 0.3},
    "rewards_equal": {"reward/mean": 0.0, "reward/max": 0.0},
    "groups_equal": {"frac_reward_zero_std": 1.0},
    "no_gradient": {"actor/grad_norm": 0.0},
    "entropy_explosion": {"actor/entropy": 2.5},
    "entropy_collapse": {"actor/entropy": 0.004},
    "kl_runs_away": {"actor/reference_kl": 11.0},
    "steps_too_large": {"actor/ppo_kl": 0.3},
    "engine_differs": {"rollout_corr/kl": 0.2},
    "responses_too_old": {"rollout_corr/kl": 0.2, "rollout/lag_mean": 1.0},
    "length_runs_away": {"response_length/mean": 50.0, "response_length/clip_ratio": 0.6},
    "length_collapse": {"response_length/mean": 1.9, "actor/reference_kl": 0.1},
}


@pytest.mark.parametrize("event", DEAD)
def test_a_run_that_dies_is_named_within_three_steps(event: str) -> None:
    sick = ALIVE | DEAD[event]
    found = given([ALIVE, sick, sick, evaluated(0.5), sick, sick])  # an evaluation between two steps is no step
    assert [name for _, name in found] == [event] and found[0][0] <= 4
    alarms = Alarms()
    messages = [message for step, row in enumerate([ALIVE, sick, sick, sick]) for message in alarms.check(step, row).values()]
    assert len(messages) == 1 and event.replace("_", " ") in messages[0]


@pytest.mark.parametrize("event", sorted(set(DEAD) - {"entropy_collapse", "length_collapse"}))
def test_a_run_that_recovers_raises_no_alarm(event: str) -> None:
    sick = ALIVE | DEAD[event]
    assert given([ALIVE, sick, sick, ALIVE, sick, sick, ALIVE]) == []


def test_truncated_responses_that_score_0_raise_an_alarm_with_share_and_key() -> None:
    alarms = Alarms()
    messages = [alarms.check(step, ALIVE | DEAD["responses_unscored"]).get("responses_unscored") for step in (1, 2, 3)]
    assert messages[:2] == [None, None] and messages[2] is not None
    assert messages[2].startswith(
        "step 3: responses unscored: for 3 steps 60% of the responses are cut by the length limit and score 0 unread; "
        "reward.require_finished=true causes this: raise rollout.max_response_tokens"
    )


def test_a_critic_learns_from_rewards_that_differ_between_prompts() -> None:
    assert given([ALIVE | DEAD["groups_equal"] | {"critic/vf_loss": 1.0}] * 5) == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([ALIVE | DEAD["no_gradient"]] * 2, "learned nothing: the gradient was 0 in all 2 steps of the policy"),
        (
            [ALIVE | DEAD["rewards_equal"]],
            "learned nothing from the reward: all responses scored the same in each of 1 steps of the policy",
        ),
        (
            [ALIVE | DEAD["rewards_equal"] | DEAD["responses_unscored"], ALIVE | DEAD["rewards_equal"]],
            "learned nothing from the reward: all responses scored the same in each of 2 steps of the policy; in 1 of them most responses "
            "were cut off and scored 0 unread (reward.require_finished)",
        ),
        ([ALIVE | DEAD["no_gradient"], ALIVE], None),
        ([evaluated(0.5)], None),
    ],
)
def test_a_run_that_learned_nothing_raises_its_alarm(rows: Sequence[Row], said: str | None) -> None:
    alarms = Alarms()
    for step, row in enumerate(rows):
        alarms.check(step, row)
    assert alarms.at_the_end() == ({} if said is None else {"learned_nothing": said})


def test_a_starved_side_is_named_where_engines_run_ahead() -> None:
    waiting = {"perf/idle_ranks": 0.6, "perf/idle_engines": 0.1}
    alarms, in_turn = Alarms(ahead=True), Alarms()
    found = [alarms.check(step, waiting) for step in range(1, 12)]
    assert [list(one) for one in found] == [[]] * 9 + [["ranks_starved"], []]
    assert "10 steps they have had nothing to do for more than 50% of the time, now 60%" in found[9]["ranks_starved"]
    assert not any(in_turn.check(step, waiting) for step in range(1, 12))
