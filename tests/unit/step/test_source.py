"""Which batch a step gets in each mode, of which weights, and what a checkpoint must hold. Engines and ranks are tables."""

from __future__ import annotations

import io
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from megarl.batch import Sample, VersionSpan
from megarl.checkpoints.files import LargeContent, read_record, write_file
from megarl.cluster.actor_group import WorkerDied
from megarl.config import TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.driver.dispatch import NoEngine, Wanted
from megarl.engines.episodes import Start
from megarl.engines.parts import added, whole
from megarl.host.shared_memory import MemoryFile
from megarl.observe.metrics import scalars
from megarl.observe.phases import Phases
from megarl.observe.report import LAG_SHARES
from megarl.ranks import response_file
from megarl.response import Response
from megarl.rewards.score import RewardUnavailable, Score
from megarl.step import in_flight
from megarl.step.groups import StepGroups
from megarl.step.metrics import lag_metrics
from megarl.step.source import RolloutSource
from megarl.step.state import TrainState
from tests.e2e.job import RL

PROMPTS = [Prompt(number, "", [1, 2, 3], "", {}) for number in range(64)]
STEPS, N, LONGEST = 6, 2, 12
STAGES = [[0, 2], [1]]


class Store:
    """Ray's object store, whose references are what they refer to."""

    def get(self, reference: Any) -> Any:
        return reference

    def put(self, value: Any) -> Any:
        return value


class Engines:
    """Responses whose length depends on the prompt and the sample; each token is from the weights that are there when it comes."""

    def __init__(self) -> None:
        self.version, self.asked, self.busy_s = 0, list[tuple[int, int]](), 0.0
        self.waiting: dict[Any, list[Response]] = {}
        self.steps = dict[int, int]()  # the step that a place was asked for, under which its environment's images are kept
        self.dead, self.lost = False, {0: WorkerDied("engine 0 died")}
        self.refills = list[bool]()  # whether engines that were replaced got the weights of the last sync

    def work(self) -> Engines:
        return self

    def take_turn(self) -> None:
        pass

    @contextmanager
    def finishing(self, work: Engines, *, refill: bool = True) -> Iterator[None]:
        yield
        self.replace(work, refill=refill)

    def replace(self, work: Engines, *, refill: bool = True) -> None:
        self.refills.append(refill)

    def cancel(self) -> None:
        self.waiting.clear()

    @property
    def open(self) -> int:
        return len(self.waiting)

    def wanted(self, key: Any, prompt: Prompt, number: int, sampling: Any, experts: None = None, step: int = 0) -> Wanted:
        return Wanted(key, Start(number, [prompt.id], prompt.id, step=step), sampling)

    def ask(self, wanted: Wanted) -> None:
        place, tokens = wanted.start.tokens[0], LONGEST if wanted.segment is None else wanted.segment.tokens
        begun = dict.fromkeys(range(N), ()) if wanted.segment is None else wanted.segment.open
        self.asked.append((place, self.version))
        self.steps[place] = wanted.start.step
        self.waiting[wanted.key] = [self.respond(place, index, before, tokens) for index, before in begun.items()]

    def respond(self, place: int, index: int, before: Sequence[Sample], tokens: int) -> Response:
        longest, there = 1 + (5 * place + 3 * index) % LONGEST, sum(part.response_length for part in before)
        length = min(longest, there + tokens)
        said = Sample(np.arange(3 + length), 3 + there, np.arange(there, length, dtype=np.float32), "stop", (VersionSpan(0, self.version),))
        part = added(said) if before else said
        sample, done = whole([*before, part]), length == longest
        versions, payload = sample.weight_versions, sample if done else part
        row_T = np.arange(2 + there if before else 0, 2 + length, dtype=np.uint8)
        experts = [(3 * row_T[:, None, None] + np.array(stage)[:, None]).repeat(2, axis=2) for stage in STAGES]
        return Response(place, f"{place}/{index}", 3, length, length, done, payload, index, [experts], weight_versions=versions)

    def finished(self, work: object = None) -> dict[Any, list[Response]]:
        if self.dead:
            raise NoEngine
        key = max(self.waiting)
        return {key: self.waiting.pop(key)}


class Reward:
    settings = SimpleNamespace(overlong=None)

    def __init__(self) -> None:
        self.on_ranks = False
        self.gone, self.threads = False, set[str]()

    def on(self, _: None) -> Reward:
        return self

    def scores(self, prompts: Any, responses: list[Response]) -> list[Score]:
        self.threads.add(threading.current_thread().name)
        if self.gone:
            raise RewardUnavailable("gone")
        return [Score(float(response.length)) for response in responses]


def files_of(state: TrainState) -> dict[str, bytes]:
    return {name: content_of(file) for name, file in state.files().items()}


def content_of(file: LargeContent) -> bytes:
    held = io.BytesIO()
    file.write(held)
    return held.getvalue()


def written(files: dict[str, bytes], folder: Path) -> dict[str, Path]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in files}


def copied(files: dict[str, bytes]) -> dict[str, MemoryFile]:
    return {name: MemoryFile(partial(_write, data)) for name, data in files.items()}


def _write(data: bytes, file: BinaryIO) -> None:
    file.write(data)


class Loop:
    """The RL loop without models: what each step learns from."""

    def __init__(self, config: TrainConfig) -> None:
        self.engines, self.reward = Engines(), Reward()
        run = SimpleNamespace(phase=Phases(), failures=list)
        self.ctx = cast(
            Any,
            SimpleNamespace(config=config, run=run, engines=self.engines, train_reward=self.reward, models=SimpleNamespace(experts=None)),
        )
        self.state = TrainState(config, PROMPTS, STAGES)
        self.learned: list[StepGroups] = []
        self.lags: list[dict[str, float]] = []
        self.saved: list[tuple[dict[str, Any], dict[str, bytes]]] = []

    def run(self, until: int = STEPS, *, sync_follows: bool = True) -> Loop:
        with RolloutSource(self.ctx, self.state) as source:
            while self.state.step < until:
                self.saved.append((self.state.state(), files_of(self.state)))
                groups = source.next_groups()
                assert files_of(self.state) == self.saved[-1][1], "a step that is broken off is done again"
                self.learned.append(groups)
                self.lags.append(scalars(lag_metrics(groups.responses, self.state.learned, 0, self.ctx.config.rollout.largest_lag)))
                self.state.step += 1
                source.after_update(sync_follows=sync_follows)
                self.state.learned += 1
                self.engines.version += 1
                source.metrics()
        return self

    def names(self) -> list[list[tuple[str, Any]]]:
        return [[(one.text, one.weight_versions) for one in groups.responses] for groups in self.learned]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(in_flight, "ray", Store())
    monkeypatch.setattr(response_file, "ray", Store())
    path = tmp_path / "job.yaml"
    path.write_text(RL.format(runs=tmp_path, model=tmp_path))

    def made(*overrides: str) -> Loop:
        sizes = ("train.prompts_per_step=4", f"rollout.samples_per_prompt={N}", f"train.steps={STEPS}")
        return Loop(load(path, [*sizes, "algorithm.correction={type: tis}", *overrides], TrainConfig))

    return made


MODES = {
    "sync": ("rollout.mode=sync",),
    "ahead": ("rollout.mode=ahead",),
    "ahead-dynamic": ("rollout.mode=ahead", "train.dynamic_sampling_rounds=2"),
    "budget": ("rollout.mode=budget", "rollout.budget_tokens=4"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_the_same_from_any_of_its_checkpoints(make: Any, mode: str, tmp_path: Path) -> None:
    """And from copies of them in memory."""
    straight = make(*MODES[mode]).run()
    for step, (progress, files) in enumerate(straight.saved):
        loop = make(*MODES[mode])
        loop.state.restore(progress)
        loop.state.restore_files(written(files, tmp_path) if step % 2 else copied(files))
        loop.engines.version = step
        loop.run()
        assert loop.names() == straight.names()[step:]
        ours, theirs = ([one for done in each for one in done.responses] for each in (loop.learned, straight.learned[step:]))
        for one, other in zip(ours, theirs, strict=True):
            assert all(np.array_equal(getattr(one.payload, name), getattr(other.payload, name)) for name in ("tokens", "rollout_logp"))
            for stage in (0, 1):
                rows = [np.concatenate([part[stage] for part in response.experts]) for response in (one, other)]
                assert np.array_equal(*rows) and rows[0][:, 0, 0].tolist() == [3 * row + STAGES[stage][0] for row in range(len(rows[0]))]
                assert len(rows[0]) == len(one.payload.tokens) - 1
    assert bool(straight.saved[1][1]) == (mode != "sync")


@pytest.mark.parametrize("mode", [*MODES, "free"])
def test_a_state_names_the_oldest_step_whose_episodes_are_still_learned_from(make: Any, mode: str) -> None:
    loop = make(*MODES.get(mode, ("rollout.mode=free", "rollout.max_lag=2"))).run()
    asked = [[group.asked[0] for group in done.groups] for done in loop.learned]
    for step, (progress, _) in enumerate(loop.saved):
        assert step - 2 <= progress["oldest"] <= min([step + 1, *(one for later in asked[step:] for one in later)])
    assert mode != "sync" or [progress["oldest"] for progress, _ in loop.saved] == list(range(1, STEPS + 1))
    if mode != "budget":  # whose rounds are of no episodes
        assert all(loop.engines.steps[group.place] == group.asked[0] for done in loop.learned for group in done.groups)


def test_experts_of_a_checkpoint_go_to_the_stages_of_another_layout(make: Any) -> None:
    loop = make(*MODES["ahead"]).run(2)
    other = TrainState(loop.ctx.config, PROMPTS, [[0], [1, 2]])
    other.restore_files(copied(files_of(loop.state)))
    assert other.ahead is not None
    for response in other.ahead.responses:
        assert response.experts is not None
        [(first, rest)] = response.experts
        assert set((first % 3).flat) == {0} and first.shape[1] == 1 and [set((rest % 3)[:, n].flat) for n in (0, 1)] == [{1}, {2}]


def test_a_checkpoint_s_responses_are_fetched_prompt_by_prompt_as_they_are_written(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a file that is hashed on the way and cannot be sought in, and is the same."""
    [(_, file)] = make(*MODES["ahead"]).run(2).state.files().items()
    fetched = list[int]()

    def get(references: list[Any]) -> list[Any]:
        fetched.append(len(references))
        return references

    monkeypatch.setattr(response_file, "ray", SimpleNamespace(get=get))
    record = write_file(tmp_path / "file.npz", file)
    assert sum(fetched) == 4 * N * 3 and max(fetched) == 2 * N, "a payload and the experts of two stages"
    assert record == read_record(tmp_path / "file.npz")
    with np.load(tmp_path / "file.npz") as written, np.load(io.BytesIO(content_of(file))) as whole_file:
        assert set(written) == set(whole_file) and all(np.array_equal(written[name], whole_file[name]) for name in written)


def test_a_checkpoint_s_responses_are_read_back_one_by_one(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the object store has taken a response, the driver holds nothing of it."""
    loop = make(*MODES["ahead"]).run(2)
    large = [np.zeros((1 << 20, len(stage), 1), np.uint8) for stage in STAGES]
    groups = [replace(group, responses=[replace(one, experts=[large]) for one in group.responses]) for group in loop.state.ahead.groups]
    path = tmp_path / "file.npz"
    size = write_file(path, in_flight.dump(StepGroups(groups), STAGES)).size
    monkeypatch.setattr(in_flight, "ray", SimpleNamespace(put=lambda _: None))
    tracemalloc.start()
    try:
        loaded = in_flight.load(path, PROMPTS, STAGES)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(loaded.groups) == 4 and size > 8 * 3 << 20 and most < size / 2


def test_engines_that_never_wait_keep_the_bound_and_lose_nothing(make: Any) -> None:
    """Of a run that is cut off what was done is kept, and what was not begins again."""
    free = ("rollout.mode=free", "rollout.max_lag=2")
    loop = make(*free).run(3)
    progress, files = loop.saved[-1]
    again = make(*free)
    again.state.restore(progress)
    again.state.restore_files(copied(files))
    again.engines.version = 2
    again.run()
    for one in (loop, again):
        assert all(lag["rollout/lag_max"] <= 2 for lag in one.lags)
    learned = [group.place for done in (*loop.learned[:2], *again.learned) for group in done.groups]
    left = [group.place for group in again.state.pool]
    assert len(learned) == STEPS * 4 and len(left) == 8
    assert sorted(learned + left) == sorted(make(*free).state.sampler.take(STEPS * 4 + 8))


@pytest.mark.parametrize("mode", [MODES["ahead"], ("rollout.mode=free", "rollout.max_lag=2")], ids=["ahead", "free"])
def test_a_reward_model_reads_responses_when_its_ranks_are_free(make: Any, mode: Any) -> None:
    """In the thread of the ranks alone; verifiers score in the engines' thread, too."""
    model, verifier = make(*mode), make(*mode)
    model.reward.on_ranks = True
    for loop in (model, verifier):
        loop.run()
        groups = [group for done in loop.learned for group in done.groups]
        assert len(groups) == STEPS * 4 and all(len(group.scores) == N for group in groups)
        assert len({group.place for group in groups}) == STEPS * 4 and all(lag["rollout/lag_max"] <= 2 for lag in loop.lags)
    assert model.reward.threads == {threading.current_thread().name} and "rollout" in verifier.reward.threads


def test_each_mode_has_its_lag(make: Any) -> None:
    sync, ahead, budget = (make(*MODES[mode]).run() for mode in ("sync", "ahead", "budget"))
    assert {lag["rollout/lag_max"] for lag in sync.lags} == {0.0}
    assert [lag["rollout/lag_max"] for lag in ahead.lags] == [lag["rollout/lag_mean"] for lag in ahead.lags] == [0, 1, 1, 1, 1, 1]
    assert max(lag["rollout/lag_max"] for lag in budget.lags) <= LONGEST / 4 + 1
    assert any(lag["rollout/lag_mixed"] > 0 for lag in budget.lags)
    places = [[group.place for group in done.groups] for done in ahead.learned]
    assert places == [[group.place for group in done.groups] for done in sync.learned], "the same prompts in the same steps"


def shares(lag: dict[str, float]) -> dict[int, float]:
    return {int(name.rpartition("_")[2]): value for name, value in lag.items() if "_share_from_" in name}


def test_the_share_of_tokens_of_each_lag_is_told(make: Any) -> None:
    sync, ahead, budget = (make(*MODES[mode]).run() for mode in ("sync", "ahead", "budget"))
    assert [shares(lag) for lag in sync.lags] == [{}] * STEPS
    assert [shares(lag) for lag in ahead.lags] == [{1: 0.0}, *[{1: 1.0}] * (STEPS - 1)]
    assert all(set(shares(lag)) == {1, 2, 4} and sum(shares(lag).values()) <= 1 for lag in budget.lags)
    assert max(share for lag in budget.lags for share in shares(lag).values()) > 0

    def response(length: int, *spans: tuple[int, int]) -> Response:
        return Response(0, "", 3, length, length, True, None, 0, weight_versions=[VersionSpan(*span) for span in spans])

    several, one = response(10, (0, 3), (4, 7), (9, 8)), response(6, (0, 5))  # with two frozen steps lags of 5, 1 and 0, and of 3
    told = scalars(lag_metrics([several, one], learned=6, frozen=2, most=8))
    assert shares(told) == {1: 5 / 16, 2: 6 / 16, 4: 4 / 16, 8: 0.0}
    assert (told["rollout/lag_mean"], told["rollout/lag_max"]) == ((4 * 5 + 5 * 1 + 6 * 3) / 16, 5)
    episode = replace(one, length=40, loss_tokens=6, sampled=[2, 4], weight_versions=[VersionSpan(0, 5), VersionSpan(30, 7)])
    told = scalars(lag_metrics([episode], learned=6, frozen=2, most=8))
    assert shares(told) == {1: 4 / 6, 2: 2 / 6, 4: 0.0, 8: 0.0} and told["rollout/lag_mean"] == (2 * 3 + 4 * 1) / 6, "the policy's tokens"
    largest = make("rollout.mode=free", "rollout.max_lag=1024").ctx.config.rollout.largest_lag
    assert [name for name in scalars(lag_metrics([one], 6, 0, largest)) if "_share_" in name] == list(LAG_SHARES), "the report shows all"


def test_no_prompt_is_lost_or_learned_from_twice_where_responses_are_cut(make: Any) -> None:
    budget = make(*MODES["budget"]).run()
    learned = [group.place for done in budget.learned for group in done.groups]
    left = [group.place for group in budget.state.pool]
    drawn = make(*MODES["sync"]).state.sampler.take(len(learned) + len(left))
    assert sorted(learned + left) == sorted(drawn) and len(left) == 4
    assert all(response.finished for done in budget.learned for response in done.responses)
    rounds = [done.counts["rollout/budget_rounds"] for done in budget.learned]
    assert rounds[0] == LONGEST / 4 and all(1 <= number <= LONGEST / 4 for number in rounds)
    assert not any("rollout/sampling_rounds" in done.counts for done in budget.learned), "which dynamic sampling has"


def test_a_reward_that_fails_behind_the_ranks_is_told_before_the_next_step_and_costs_no_prompt(make: Any) -> None:
    loop, straight = make(*MODES["ahead"]), make(*MODES["ahead"]).run()
    loop.run(2)
    loop.reward.gone = True
    with pytest.raises(RewardUnavailable):
        loop.run(4)
    assert loop.state.step == 3, "the step whose update was done counts"
    loop.reward.gone = False
    loop.run(4)
    places = [[group.place for group in done.groups] for done in loop.learned]
    assert places == [[group.place for group in done.groups] for done in straight.learned][:4]


@pytest.mark.parametrize("mode", [MODES["ahead"], ("rollout.mode=free", "rollout.max_lag=1")], ids=["ahead", "free"])
def test_engines_that_are_replaced_behind_the_ranks_get_the_weights_that_follow_or_those_of_the_last_sync(make: Any, mode: Any) -> None:
    """While a critic is pretrained no sync follows a step."""
    for sync_follows in (True, False):
        loop = make(*mode).run(3, sync_follows=sync_follows)
        assert loop.engines.refills[-2:] == [not sync_follows] * 2


def test_without_an_engine_that_has_the_weights_the_run_goes_back(make: Any) -> None:
    loop = make(*MODES["ahead"]).run(2)
    loop.engines.dead = True
    with pytest.raises(WorkerDied, match="^engine 0 died: no remaining engine has the weights of the batch ahead$"):
        loop.run(3)
