"""The signs of over-optimisation, each told once, by name and with advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from megarl.config import RoutingSettings
from megarl.observe.alarms import KL_STEPS, OUTSIDE_STEPS, REROUTED_STEPS, Alarms

Row = Mapping[str, float]


def given(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """(number of the row, event) of every alarm."""
    alarms = Alarms()
    return [(number, event) for number, row in enumerate(rows) for event in alarms.check(number, row)]


def evaluated(rate: float) -> dict[str, float]:
    return {"eval/heldout/avg@1": rate, "eval/heldout/greedy": rate, "eval/heldout/stderr": 0.03}


def stepped(reward: float) -> Row:
    return {"reward/mean": reward}


def test_reward_up_and_pass_rate_down() -> None:
    rows = [evaluated(0.25), stepped(1.0), stepped(2.0), evaluated(0.5), stepped(3.0), evaluated(0.45), stepped(4.0), evaluated(0.2)]
    assert given([*rows, evaluated(0.0)]) == [(7, "over_optimisation")]
    [message] = [text for alarms in [Alarms()] for number, row in enumerate(rows) for text in alarms.check(number, row).values()]
    assert message.startswith("step 7: over-optimisation: the held-out score is 0.2 and was 0.5, while the reward has risen from 1.5 to 3")


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
def test_no_alarm_for_what_is_not(rows: Sequence[Row]) -> None:
    assert given(rows) == []


def test_kl_beyond_twice_its_target() -> None:
    far, near = ({"actor/reference_kl": kl, "actor/kl_target": 6.0} for kl in (12.1, 11.9))
    assert given([far] * (KL_STEPS - 1) + [near] + [far] * KL_STEPS) == [(2 * KL_STEPS - 1, "kl_beyond_target")]
    assert given([{"actor/reference_kl": 100.0}] * (KL_STEPS + 1)) == []


def test_scores_that_the_reward_model_never_gave_in_training() -> None:
    far, near = ({"reward/outside/mean": share} for share in (0.3, 0.2))
    assert given([far] * (OUTSIDE_STEPS - 1) + [near] + [far] * OUTSIDE_STEPS) == [(2 * OUTSIDE_STEPS - 1, "reward_outside_range")]


@pytest.mark.parametrize(("replay", "names"), [("off", ["rollout_routing", "policy_routing"]), ("r2", ["rollout_routing"]), ("r3", [])])
def test_tokens_that_go_elsewhere_where_no_replay_keeps_them(replay: Literal["off", "r2", "r3"], names: list[str]) -> None:
    row = {"routing/rollout_changed_frac": 0.06, "routing/policy_changed_frac": 0.07}
    alarms = Alarms(RoutingSettings(replay=replay, alarm=0.05))
    found = [(number, event) for number in range(REROUTED_STEPS + 2) for event in alarms.check(number, row)]
    assert found == [(REROUTED_STEPS - 1, name) for name in names]
    assert not [event for number in range(9) for event in Alarms(RoutingSettings(alarm=0.08)).check(number, row)]
    assert given([row] * 9) == []
