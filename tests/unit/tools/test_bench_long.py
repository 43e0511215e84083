"""The simulation of long episodes: what it does not measure is the same in both modes."""

import pytest

from tools.bench_long import CACHE, LONGEST, PROMPTS, SAMPLES, Engine, Episode, Simulation, Turn, episodes


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_learns_from_whole_groups_within_the_lag(lag: int) -> None:
    result = Simulation(1, lag, engines=8).run(3)
    assert result.lag == lag and result.longest <= LONGEST
    assert 20_000 < result.tokens / (PROMPTS * SAMPLES) < LONGEST, "of the one step that is measured"
    assert 0 < result.idle_engines < 1 and 0 < result.idle_ranks < 1


def test_an_engine_computes_what_its_cache_lacks() -> None:
    engine, one = Engine(), Episode((0, 0), 1000.0, [Turn(50.0, 10.0, 1.0)], 0.0, left=50.0)
    engine.open.append(one)

    def computed() -> float:
        """Of one turn."""
        before, one.left = engine.computed, 50.0
        engine.asked.append(one)
        while not engine.advance(engine.rate()[1], 0.0):
            pass
        return engine.computed - before

    assert computed() == pytest.approx(1000) and one.context == one.cached == pytest.approx(1050) and abs(engine.held) < 1
    one.context += 10
    assert computed() == pytest.approx(10) and one.context == pytest.approx(1110)
    engine.forget()
    assert computed() == pytest.approx(1110)


def test_what_was_used_least_recently_leaves_the_cache_first() -> None:
    engine = Engine()
    for number in range(3):
        engine.open.append(Episode((0, number), CACHE / 2, [], 0.0, cached=CACHE / 2, used=float(2 - number)))
    engine.make_room()
    assert [one.cached > 0 for one in engine.open] == [True, True, False]


def test_episodes_are_those_of_their_seed() -> None:
    lengths = [[len(one.turns) for one in episodes(seed, (0, 3))] for seed in (1, 1, 2)]
    assert lengths[0] == lengths[1] != lengths[2] and len(lengths[0]) == SAMPLES
