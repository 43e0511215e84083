"""Simulate long episodes of agents in `rollout.mode` sync and free: `python -m tools.bench_long [--steps 12] [--seeds 3] [--write]`.

A simulated clock, and no model: 32 prompts x 8 episodes a step on the engines and ranks of examples/qwen3_30b_a3b/long.yaml (eight
engines of four GPUs, 16 GPUs of ranks), and with half the engines; the same in both modes. Turns, lengths and the latencies of tools are
log-normal draws from a seed, as of agents that mend software: some dozens of turns, contexts up to 131,072 tokens, tests that take a minute
now and then, a container that starts before an episode, and tests that score it. The product's own `Schedule` decides what begins and what
a step learns from. An engine computes the new tokens of one turn after the other, with all before them where its cache has lost them: to
other sequences, least recently used first, or to an update. Meanwhile it decodes nothing, and else all sequences together, at the speed of
its memory. Exit status: 1 unless on eight engines `free` with lag 1 has 1.56 times the tokens a second of `sync`.
"""

import argparse
import heapq
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from typing import NamedTuple

from megarl.step.free import Schedule
from tools.bench_routing import ROOT, commit, put

PAGE = ROOT / "examples" / "async" / "figures.md"
BEGIN = "<!-- written by tools/bench_long.py -->"
BOUND = 1.56  # least ratio of tokens a second
FILLING = 2  # steps that are not measured
PROMPTS, SAMPLES, ENGINES, FEW = 32, 8, 8, 4
CLOSE = 0.5  # tokens at which something counts as done
AGENTS = 64  # that an engine runs at a time: the default of environment.source.processes
LONGEST = 131_072  # tokens of a context
OPENING = (2_500.0, 0.5)  # tokens; median and sigma of a log-normal draw, here and below
TURNS = (26.0, 0.55)  # of an episode, correlated among those of a prompt
SPOKEN = (220.0, 0.8)  # tokens that the policy writes in a turn
OBSERVED = (600.0, 1.1)  # tokens that its tool answers
LATENCY = (1.2, 1.3)  # seconds until then; 1 in 40 is a run of the tests
TESTS, TESTS_SHARE = (40.0, 0.6), 1 / 40
STARTED, JUDGED = (15.0, 0.8), (60.0, 0.7)  # seconds of a container's start, and of the tests that score the episode
# An engine of four H100 (80 GB; 3.35 TB/s and 989 TFLOP/s, of which 0.6 and 0.35 are assumed, as in `megarl plan`), bf16.
KEYS = 48 * 2 * 4 * 128 * 2  # bytes of a token's keys and values
CACHE = 4 * 48.6e9 / KEYS  # tokens; what the plan finds
MEMORY, COMPUTE = 4 * 3.35e12 * 0.6, 4 * 989e12 * 0.35  # bytes and operations a second
WEIGHTS, ACTIVE = 61e9, 3.3e9  # bytes; parameters of a token
ATTENTION = 48 * 4 * 32 * 128  # operations of a token for each token before it
# 16 H100 of ranks: forward, recomputation and backward pass are 4 forward passes, one more of old log-probs, at 0.25.
LEARN = 5 / (16 * 989e12 * 0.25)
SYNC_S = 2.0  # of an update of the engines


TITLES = (
    *("engines", "seed", "mode", "tokens a second", "times `sync`", "s a step", "mean and longest context", "ranks idle"),
    *("engines idle", "prompt tokens computed, of all tokens"),
)
GroupName = tuple[int, int]  # the step it was asked for, and its number there


class Turn(NamedTuple):
    """One turn of an episode."""

    spoken: float  # tokens
    observed: float  # tokens that follow
    latency: float  # s before they do


@dataclass(eq=False)
class Episode:
    """One episode, and how far it is."""

    group: GroupName
    context: float  # tokens so far
    turns: list[Turn]  # those that are left, the next one last
    start_s: float  # before it begins
    left: float = 0.0  # tokens of the turn
    cached: float = 0.0  # tokens of its context whose keys and values its engine holds
    used: float = 0.0  # when it was last asked


@dataclass
class Engine:
    """An engine that computes prompts one after the other, and decodes all its sequences together while there are none."""

    waiting: deque[Episode] = field(default_factory=deque)  # to begin
    open: list[Episode] = field(default_factory=list)
    asked: deque[Episode] = field(default_factory=deque)  # whose prompt is to be computed
    speaking: list[tuple[float, int, Episode]] = field(default_factory=list)  # a heap: what `said` will be at the end of its turn
    said: float = 0.0  # tokens that a sequence which is always decoded would have
    held: float = 0.0  # tokens of all sequences that are decoded
    busy_s: float = 0.0
    computed: float = 0.0  # tokens of prompts
    order: Iterator[int] = field(default_factory=count)

    def rate(self) -> tuple[float, float]:
        """Return the tokens a second of each sequence that advances now, and the seconds until one is done. It must not be idle."""
        if self.asked:
            head = self.asked[0]
            rate = COMPUTE / (2 * ACTIVE + ATTENTION * (head.context + head.cached) / 2)
            return rate, (head.context - head.cached) / rate
        step_s = (WEIGHTS + KEYS * self.held) / MEMORY
        return 1 / step_s, (self.speaking[0][0] - self.said) * step_s

    def advance(self, seconds: float, now: float) -> list[Episode]:
        """Work for so long, at most until one is done; return the episodes whose turn has ended."""
        tokens, ended = self.rate()[0] * seconds, list[Episode]()
        self.busy_s += seconds
        if self.asked:
            head = self.asked[0]
            self.computed += tokens
            head.cached += tokens
            if head.context - head.cached < CLOSE:
                head.cached = head.context
                heapq.heappush(self.speaking, (self.said + head.left, next(self.order), self.asked.popleft()))
                self.held += head.context
                self.make_room()
            return ended
        self.said, self.held = self.said + tokens, self.held + tokens * len(self.speaking)
        while self.speaking and self.speaking[0][0] - self.said < CLOSE:
            one = heapq.heappop(self.speaking)[2]
            one.context += one.left
            one.cached, one.used = one.context, now
            self.held -= one.context
            ended.append(one)
        return ended

    def make_room(self) -> None:
        """Drop what is cached of episodes that wait for their tools, least recently used first, as far as there is too much."""
        over = self.held - CACHE
        speaking = {id(one) for _, _, one in self.speaking}
        idle = [one for one in self.open if one.cached and id(one) not in speaking]
        over += sum(one.cached for one in idle)
        for one in sorted(idle, key=lambda one: one.used):
            if over <= 0:
                break
            over, one.cached = over - one.cached, 0.0

    def forget(self) -> None:
        """Take new weights: what is cached is of no use, and sequences that were being decoded are computed again."""
        for end, _, one in sorted(self.speaking, reverse=True):
            done = one.left - (end - self.said)
            one.context, one.left = one.context + done, one.left - done
            self.asked.appendleft(one)
        self.speaking, self.held = [], 0.0
        for one in self.open:
            one.cached = 0.0


def drawn(draw: random.Random, of: tuple[float, float]) -> float:
    """Return a log-normal draw."""
    return of[0] * draw.lognormvariate(0, of[1])


def episodes(seed: int, group: GroupName) -> list[Episode]:
    """Return the episodes of a prompt, the same for the same seed and group."""
    draw = random.Random(f"{seed}:{group}")
    opening, typical, made = drawn(draw, OPENING), drawn(draw, (TURNS[0], 0.8 * TURNS[1])), list[Episode]()
    for _ in range(SAMPLES):
        turns, context = list[Turn](), opening
        for _ in range(max(1, round(drawn(draw, (typical, 0.6 * TURNS[1]))))):
            latency = drawn(draw, TESTS if draw.random() < TESTS_SHARE else LATENCY)
            turn = Turn(1 + drawn(draw, SPOKEN), drawn(draw, OBSERVED), latency)
            if turns and context + turn.spoken + turn.observed > LONGEST:
                break
            context += turn.spoken + turn.observed
            turns.append(turn)
        turns[-1] = turns[-1]._replace(latency=drawn(draw, JUDGED))
        made.append(Episode(group, opening, turns[::-1], drawn(draw, STARTED)))
    return made


class Result(NamedTuple):
    """What a run of the simulation has done after its first steps."""

    tokens: float  # of the episodes that were learned from
    seconds: float
    idle_ranks: float  # share of the time
    idle_engines: float
    computed: float  # tokens of prompts that the engines computed
    longest: float  # context
    lag: int  # the largest

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Simulation:
    """A run.

    Args:
        seed: of the episodes.
        lag: the largest lag: 0 is `sync`, else `free`.
        engines: their number.
    """

    def __init__(self, seed: int, lag: int, engines: int) -> None:
        self._seed, self._now, self._longest = seed, 0.0, 0.0
        self._schedule = Schedule(PROMPTS, lag)
        self._engines = [Engine() for _ in range(engines)]
        self._tools: list[tuple[float, int, Episode, Engine, float]] = []  # when they answer, and with how many tokens
        self._order = count()
        self._playing, self._contexts = dict[GroupName, int](), dict[GroupName, list[float]]()  # of groups: unfinished; finished ones
        self._begun = dict[GroupName, int]()  # the updates before it

    def run(self, steps: int) -> Result:
        """Run so many steps, of which the first ones are not measured."""
        tokens, learning_s, worst, since = 0.0, 0.0, 0, self._state()
        for step in range(steps):
            if step == FILLING:
                tokens, learning_s, since = 0.0, 0.0, self._state()
            for number in range(self._schedule.room):
                self._begin((step, number), step)
            while (chosen := self._schedule.take(step)) is None:
                self._advance(float("inf"))
            contexts = [length for name in chosen for length in self._contexts[name]]
            seconds = sum(LEARN * length * (2 * ACTIVE + ATTENTION * length / 2) for length in contexts)
            tokens, learning_s = tokens + sum(contexts), learning_s + seconds
            worst = max(worst, *(step - self._begun[name] for name in chosen))
            end = self._now + seconds
            while self._now < end:
                self._advance(end)
            self._now += SYNC_S
            for engine in self._engines:
                engine.forget()
        now, busy_s, computed = self._state()
        seconds = now - since[0]
        idle_engines = 1 - (busy_s - since[1]) / (seconds * len(self._engines))
        return Result(tokens, seconds, 1 - learning_s / seconds, idle_engines, computed - since[2], self._longest, worst)

    def _state(self) -> tuple[float, float, float]:
        return self._now, sum(engine.busy_s for engine in self._engines), sum(engine.computed for engine in self._engines)

    def _begin(self, name: GroupName, learned: int) -> None:
        """Begin a group, on the engine that has the fewest episodes."""
        self._schedule.begin(name, learned)
        engine = min(self._engines, key=lambda one: len(one.open) + len(one.waiting))
        engine.waiting += episodes(self._seed, name)
        self._admit(engine)
        self._playing[name], self._contexts[name], self._begun[name] = SAMPLES, [], learned

    def _admit(self, engine: Engine) -> None:
        while engine.waiting and len(engine.open) < AGENTS:
            episode = engine.waiting.popleft()
            engine.open.append(episode)
            self._answer(self._now + episode.start_s, engine, episode, 0.0)

    def _ask(self, engine: Engine, episode: Episode) -> None:
        episode.left, episode.used = episode.turns[-1].spoken, self._now
        engine.asked.append(episode)

    def _advance(self, limit: float) -> None:
        """Go on to whatever happens next, at most until `limit`."""
        working = [engine for engine in self._engines if engine.asked or engine.speaking]
        until = min([limit, *(self._now + engine.rate()[1] for engine in working), *(tool[0] for tool in self._tools[:1])])
        until = max(self._now, until)  # a tool may have answered during a sync
        seconds, self._now = until - self._now, until
        for engine in working:
            for episode in engine.advance(seconds, until):
                turn = episode.turns.pop()
                self._answer(until + turn.latency, engine, episode, turn.observed)
        while self._tools and self._tools[0][0] <= until:
            _, _, episode, engine, observed = heapq.heappop(self._tools)
            episode.context += observed
            if episode.turns:
                self._ask(engine, episode)
            else:
                self._end(engine, episode)

    def _answer(self, when: float, engine: Engine, episode: Episode, tokens: float) -> None:
        """Have something answer an episode at that time."""
        heapq.heappush(self._tools, (when, next(self._order), episode, engine, tokens))

    def _end(self, engine: Engine, episode: Episode) -> None:
        engine.open.remove(episode)
        self._admit(engine)
        self._longest = max(self._longest, episode.context)
        self._contexts[episode.group].append(episode.context)
        self._playing[episode.group] -= 1
        if not self._playing[episode.group]:
            self._schedule.end(episode.group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into examples/async/figures.md")
    given = parser.parse_args()
    lines, ratios = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"], list[float]()
    for engines in (ENGINES, FEW):
        for seed in range(1, given.seeds + 1):
            sync, free = (Simulation(seed, lag, engines).run(given.steps) for lag in (0, 1))
            for name, result in (("`sync`", sync), ("`free`, `max_lag: 1`", free)):
                measured = given.steps - FILLING
                lengths = f"{result.tokens / (measured * PROMPTS * SAMPLES):,.0f} and {result.longest:,.0f}"
                cells = (engines, seed, name, f"{result.speed:,.0f}", f"{result.speed / sync.speed:.2f}")
                shares = (f"{result.idle_ranks:.0%}", f"{result.idle_engines:.0%}", f"{result.computed / result.tokens:.2f}")
                lines.append(f"| {' | '.join(map(str, (*cells, f'{result.seconds / measured:,.0f}', lengths, *shares)))} |")
                print(lines[-1], flush=True)
            if engines == ENGINES:
                ratios.append(free.speed / sync.speed)
    print("", *lines, sep="\n")
    if given.write:
        put(BEGIN, [f"{date.today()}, commit {commit()}, a simulated clock:", "", *lines], PAGE)
    missed = min(ratios) < BOUND
    print(f"bound: {BOUND:g} times `sync`: {'MISSED' if missed else 'kept'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
