"""`rollout.mode: free`: the bound on a token's age, over a thousand steps of a clock that is simulated."""

import heapq

import numpy as np
import pytest

from megarl.step.free import Schedule

WANTED, STEPS, UPDATE_S = 4, 1000, 1.0


def simulated(max_lag: int, seed: int) -> tuple[list[list[int]], float]:
    """The age of each group's first token in each step, and the seconds of all steps.

    Groups take a lognormal time, now and then thirty times as long; engines have room for all that may begin.
    """
    random, clock, schedule = np.random.default_rng(seed), 0.0, Schedule(WANTED, max_lag)
    running: list[tuple[float, int, tuple[int, int]]] = []
    begun: dict[tuple[int, int], int] = {}
    ages, count = [], 0
    for learned in range(STEPS):
        for number in range(schedule.room):
            name, count = (learned + 1, number), count + 1
            begun[name] = learned
            schedule.begin(name, learned)
            seconds = random.lognormal(-0.5, 1.0) * (30 if random.random() < 0.02 else 1)
            heapq.heappush(running, (clock + seconds, count, name))
        while running and running[0][0] <= clock:
            schedule.end(heapq.heappop(running)[2])
        while (chosen := schedule.take(learned)) is None:
            clock, _, name = heapq.heappop(running)
            schedule.end(name)
        assert len(chosen) == len(set(chosen)) == WANTED
        ages.append([learned - begun.pop(name) for name in chosen])
        clock += UPDATE_S
    assert count == STEPS * WANTED + len(begun), "none is dropped, none taken twice"
    assert max(STEPS - 1 - since for since in begun.values()) <= max_lag
    return ages, clock


@pytest.mark.parametrize("max_lag", [1, 2, 4, 8])
def test_no_token_is_older_than_the_bound_over_a_thousand_steps(max_lag: int) -> None:
    for seed in range(3):
        ages, _ = simulated(max_lag, seed)
        assert max(map(max, ages)) == max_lag, "and it is used"


def test_more_lag_waits_less_for_the_slow() -> None:
    seconds = [simulated(max_lag, 0)[1] for max_lag in (1, 2, 4, 8)]
    assert all(more < less for less, more in zip(seconds, seconds[1:], strict=False))
