"""Generation: deterministic, complete, bounded; and the engine's processes end with whatever ends them."""

import asyncio
import multiprocessing
import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.batch import Sample, VersionSpan
from megarl.config import ConfigError, RolloutSettings
from megarl.engines.engine import EngineDead, Finished, Request, RolloutError, RolloutTimeout, Setup, WeightSyncError
from megarl.engines.generate import Generated, Sampling, TokenPrompt, request_seed
from megarl.engines.generate import generate as generate_within
from megarl.engines.registry import check_engine
from megarl.engines.responder import Responder
from megarl.engines.vllm.engine import VllmEngine
from megarl.engines.vllm.launch import held_ports, launch
from megarl.host import termination
from megarl.models.description import ModelDescription
from tests.engines.engine_host import Host
from tests.engines.gathered import HERE, GatheredEngine
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, generate
from tests.rows import rows
from tests.unit.test_network import free

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=96, timeout_s=TIMEOUT_S, kv_cache_mb=64)
END = 1


async def _start(tiny: Path, **settings: object) -> tuple[VllmEngine, list[int]]:
    engine = GatheredEngine("engine 0")
    pids = await engine.start(Setup(tiny, "float32", SETTINGS.model_copy(update=settings), 1, gpu=False, report_experts=True))
    return engine, pids


def _prompts(count: int) -> list[TokenPrompt]:
    rng = random.Random(0)
    return [TokenPrompt(i, [rng.randrange(3, 128) for _ in range(rng.randrange(4, 33))]) for i in range(count)]


def _same(left: list[Generated], right: list[Generated]) -> bool:
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x.samples, y.samples, strict=True)]
    return all(
        np.array_equal(mine, theirs)
        for a, b in pairs
        for mine, theirs in [(a.tokens, b.tokens), (a.rollout_logp, b.rollout_logp), (_routes(a), _routes(b))]
    )


def _routes(sample: Sample) -> np.ndarray:
    assert sample.routed_experts is not None
    return sample.routed_experts


async def _deterministic(tiny: Path, layout: dict[str, Any]) -> None:
    """More responses than the engine decodes together, so that requests also queue and finish at different times."""
    prompts, sampling, together = _prompts(20), Sampling(n=4, temperature=1.0, max_tokens=32, seed=7), 64
    assert len(prompts) * sampling.n > together
    runs = []
    for calls in (2, 1):
        engine, _ = await _start(tiny, max_num_seqs=together // layout.get("dp", 1), **layout)
        try:
            runs += [await generate(engine, prompts, sampling) for _ in range(calls)]
        finally:
            await engine.close()
    assert all(_same(runs[0], run) for run in runs[1:])
    drawn = {tuple(sample.tokens.tolist()) for answer in runs[0] for sample in answer.samples}
    assert len(drawn) > 77  # no two samples share their draws


@pytest.mark.parametrize("layout", rows([{}, {"dp": 2, "expert_parallel": True}], [{"dp": 2, "expert_parallel": True}]), ids=str)
def test_the_same_call_gives_the_same_bits_in_any_fresh_engine(host: Host, tiny: Path, layout: dict[str, Any]) -> None:
    host.run(_deterministic, tiny, layout)


async def _complete(tiny: Path) -> None:
    engine, _ = await _start(tiny)
    try:
        generated = await generate(engine, _prompts(16), Sampling(n=4, temperature=1.0, max_tokens=96, seed=3))
        samples = [sample for answer in generated for sample in answer.samples]
        assert [answer.prompt_id for answer in generated] == list(range(16))
        assert {sample.finish_reason for sample in samples} == {"stop", "length"}
        for sample in samples:
            response = sample.tokens[sample.prompt_length :].tolist()
            assert (response[-1] == END) == (sample.finish_reason == "stop") and END not in response[:-1]
            assert len(sample.rollout_logp) == len(response) and (sample.rollout_logp < 0).all()
            assert sample.tokens.dtype == np.int32 and sample.rollout_logp.dtype == np.float32
            assert (
                sample.routed_experts is not None
                and sample.routed_experts.shape == (len(sample.tokens) - 1, 2, 2)
                and sample.routed_experts.max() < 8
            )
            assert sample.weight_versions == (VersionSpan(0, 0),)
        with pytest.raises(ValueError, match=r"request \d+: 40 tokens and up to 96 more; the engine takes 1 \+ 1 to 128 in all"):
            await generate(engine, [TokenPrompt(5, [3] * 40)], Sampling(n=1, temperature=1.0, max_tokens=96, seed=3))
        with pytest.raises(ValueError, match="same id"):
            await generate(engine, [PROMPTS[0], PROMPTS[0]], Sampling(n=1, temperature=1.0, max_tokens=9, seed=3))
    finally:
        await engine.close()


def test_samples_are_complete_and_hold_the_end_token(host: Host, tiny: Path) -> None:
    host.run(_complete, tiny)


async def _late(tiny: Path) -> None:
    engine, pids = await _start(tiny)
    many, few = Sampling(n=4, temperature=1.0, max_tokens=96, seed=1), Sampling(n=1, temperature=1.0, max_tokens=4, seed=1)
    try:
        # On a busy machine not even the requests are taken by then.
        with pytest.raises(RolloutTimeout, match=r"^engine 0: (\d+ of 128 responses|taking 128 requests) not done after 0.4 s"):
            await generate_within(Responder(engine, TIMEOUT_S), _prompts(32), many, 0.4)
        begun = time.monotonic()  # the late responses are gone: the next call is served at once
        await generate(engine, PROMPTS, few)
        served = time.monotonic() - begun
        await generate(engine, _prompts(32), many)
        assert served < (time.monotonic() - begun) / 2
    finally:
        await engine.close()
    assert not any(_alive(pid) for pid in pids)


def test_a_late_call_says_how_many_responses_are_late_and_leaves_the_engine_usable(host: Host, tiny: Path) -> None:
    host.run(_late, tiny)


async def _one_by_one(tiny: Path) -> None:
    engine, _ = await _start(tiny, max_response_tokens=400)

    def request(name: str, max_tokens: int) -> Request:
        return Request(name, PROMPTS[0].tokens, max_tokens, 0.0, 1)  # greedily this model says the same again and again, to the end

    async def finished(*names: str) -> list[Finished]:
        come: list[Finished] = []
        while {one.id for one in come} != set(names):
            come += await engine.receive(TIMEOUT_S)
            assert {one.id for one in come} <= set(names)
        return come

    try:
        await engine.submit([request("long", 400), request("longer", 400), request("short", 1)], TIMEOUT_S)
        [short] = await finished("short")
        assert (short.sample.finish_reason, short.sample.response_length) == ("length", 1)
        with pytest.raises(ValueError, match="^request 'long': another request of this id is unfinished$"):
            await engine.submit([request("new", 1), request("long", 1)], TIMEOUT_S)
        with pytest.raises(RolloutError, match="^engine 0: 2 requests are unfinished"):
            await engine.start_update(TIMEOUT_S)
        await engine.submit([request("late", 3)], TIMEOUT_S)  # joins the others, and overtakes them
        await finished("late")
        await engine.abort(["long", "short", "never heard of"], TIMEOUT_S)
        [aborted] = await finished("long")
        partial = aborted.sample
        assert partial.finish_reason == "abort" and 3 <= partial.response_length < 400
        assert len(partial.rollout_logp) == partial.response_length and _routes(partial).shape == (len(partial.tokens) - 1, 2, 2)
        [whole] = await finished("longer")  # goes on undisturbed
        assert whole.sample.response_length == 400
        assert partial.tokens.tolist() == whole.sample.tokens[: len(partial.tokens)].tolist()
        await engine.submit([request("long", 400)], TIMEOUT_S)
        await engine.abort(["long"], TIMEOUT_S)  # before it has a token, as a rule
        [none] = await finished("long")
        assert none.sample.finish_reason == "abort" and len(none.sample.rollout_logp) == none.sample.response_length < 400
        assert await engine.receive(0.0) == []
    finally:
        await engine.close()


def test_requests_come_back_as_they_finish_and_aborted_ones_with_what_they_have(host: Host, tiny: Path) -> None:
    host.run(_one_by_one, tiny)


async def _dies(tiny: Path, layout: dict[str, Any]) -> None:
    engine, pids = await _start(tiny, **layout)
    try:
        pending = asyncio.create_task(generate(engine, _prompts(64), Sampling(n=8, temperature=1.0, max_tokens=96, seed=1)))
        await asyncio.sleep(0.5)
        os.kill(pids[-1], signal.SIGKILL)  # the engine's process, or one of several workers
        begun = time.monotonic()
        with pytest.raises(EngineDead, match="engine 0"):
            await pending
        with pytest.raises(EngineDead):
            await generate(engine, PROMPTS, Sampling(n=1, temperature=1.0, max_tokens=4, seed=1))
        with pytest.raises(EngineDead):
            await engine.fingerprints(TIMEOUT_S)
        with pytest.raises(EngineDead):
            await engine.start_update(TIMEOUT_S)
        assert time.monotonic() - begun < 60.0
    finally:
        await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        await generate(engine, PROMPTS, Sampling(n=1, temperature=1.0, max_tokens=4, seed=1))


@pytest.mark.parametrize("layout", rows([{"tp": 1}, {"tp": 2}, {"dp": 2}], [{"dp": 2}]), ids=str)
def test_a_dead_engine_is_an_error_on_the_pending_and_on_every_later_call(host: Host, tiny: Path, layout: dict[str, Any]) -> None:
    host.run(_dies, tiny, layout)


async def _footprint(tiny: Path, layout: dict[str, Any]) -> tuple[list[str], list[str]]:
    """TCP sockets that listen elsewhere than on loopback, and files that a closed engine leaves behind."""
    with tempfile.TemporaryDirectory(prefix="m-") as directory:
        tempfile.tempdir = directory
        try:
            engine, pids = await _start(tiny, **layout)
            left = os.listdir(directory)  # all that an engine needs there is open by now
            segments = {segment for pid in pids for segment in _shared_memory(pid)}
            try:
                await generate(engine, PROMPTS, Sampling(n=1, temperature=1.0, max_tokens=4, seed=1))
                exposed = [address for pid in [os.getpid(), *pids] for address in _listening(pid) if not _loopback(address)]
            finally:
                await engine.close()
        finally:
            tempfile.tempdir = None
    return exposed, left + [segment for segment in segments if os.path.exists(segment)]


def _shared_memory(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}


@pytest.mark.parametrize("layout", rows([{"tp": 1}, {"tp": 2}, {"dp": 2, "tp": 2}], [{"dp": 2, "tp": 2}]), ids=str)
def test_sockets_stay_on_loopback_and_no_file_is_left(host: Host, tiny: Path, layout: dict[str, Any]) -> None:
    exposed, left = host.run(_footprint, tiny, layout)
    assert exposed == [] and left == []


class _Unread(GatheredEngine):
    """An engine whose processes are there, and then refuse the weights."""

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.segments = {segment for one in psutil.Process().children(recursive=True) for segment in _shared_memory(one.pid)}
        assert any(os.path.exists(segment) for segment in self.segments)
        raise WeightSyncError("refused")


async def _refuses(tiny: Path) -> list[str]:
    engine = _Unread("engine 0")
    with termination.withheld(), pytest.raises(WeightSyncError, match="refused"):  # as from an actor's processes
        await engine.start(Setup(tiny, "float32", SETTINGS.model_copy(update={"tp": 2}), 1, gpu=False, report_experts=True))
    return [segment for segment in engine.segments if os.path.exists(segment)]


def test_an_engine_that_does_not_come_up_leaves_no_shared_memory(host: Host, tiny: Path) -> None:
    assert host.run(_refuses, tiny) == []


def _listening(pid: int) -> list[str]:
    """Local addresses, in the kernel's hexadecimal, of the TCP sockets on which the process listens."""
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        target = os.readlink(entry.path)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def _loopback(address: str) -> bool:
    host = address.partition(":")[0]
    return host in ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


async def _killed(tiny: Path) -> tuple[list[int], list[int]]:
    """Engines of each kind of executor, and one of two members, whose process is killed: the pids of theirs that were there, and that
    still are."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    doomed = context.Process(target=_stay, args=(tiny, theirs))
    doomed.start()
    try:
        assert pipe.poll(TIMEOUT_S)
        pids = pipe.recv()
        there = [pid for pid in pids if _alive(pid)]
    finally:
        doomed.kill()
        doomed.join()
    deadline = time.monotonic() + 60.0
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return there, [pid for pid in pids if _alive(pid)]


def _stay(tiny: Path, pipe: Connection) -> None:
    async def engines() -> None:
        opened = [await _start(tiny), await _start(tiny, tp=2), await _start(tiny, dp=2)]
        pipe.send([pid for _, pids in opened for pid in pids])
        await asyncio.sleep(TIMEOUT_S)

    asyncio.run(engines())


def test_no_process_outlives_a_killed_parent(host: Host, tiny: Path) -> None:
    there, left = host.run(_killed, tiny)
    assert len(there) == 7 and left == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _reserved() -> tuple[list[int], list[bool]]:
    from vllm.config import ParallelConfig

    with held_ports(HERE):
        config = ParallelConfig(data_parallel_size=2)
        ports = [*config._data_parallel_master_port_list, config.data_parallel_master_port]
        return ports, [free(port) for port in ports]


def test_the_ports_where_an_engines_members_will_meet_are_taken_by_nobody_else(host: Host) -> None:
    ports, are_free = host.run(_reserved)
    assert len(set(ports)) == 5 and not any(are_free)


def test_what_an_engine_cannot_run_is_refused_before_it_starts(tiny: Path) -> None:
    model = ModelDescription.read(tiny)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tp": 3}, "rollout.tp=3: does not divide the model's 4 attention heads and 2 KV heads"),
        (
            {"dp": 3},
            r"rollout.dp\*rollout.tp=3\*1=3: does not divide the model's moe_intermediate_size=\d+; rollout.expert_parallel=true ",
        ),
        ({"dp": 9, "expert_parallel": True}, r"rollout.expert_parallel=true: 8 experts for rollout.dp\*rollout.tp=9\*1=9 GPUs"),
        ({"kv_cache_mb": None}, "rollout.kv_cache_mb: a CPU engine needs it"),
        (
            {"kv_cache_mb": 1, "max_response_tokens": 1000},
            r"rollout.kv_cache_mb=1: one sequence of max_prompt_tokens\+max_response_tokens=1032 tokens needs 2$",
        ),
    ]
    for update, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_engine(model, "float32", SETTINGS.model_copy(update=update), gpu=False)
    check_engine(model, "float32", SETTINGS.model_copy(update={"tp": 4}), gpu=False)  # KV heads are copied


async def _another_build() -> str:
    try:
        launch("engine 0", {}, ModelDescription.of({"architectures": ["Qwen3MoeForCausalLM"]}), gpu=True)
    except RolloutError as error:
        return str(error)
    return ""


def test_another_build_of_vllm_than_the_hardware_asks_for_is_refused_by_name(host: Host) -> None:
    told = host.run(_another_build)
    assert told.startswith("engine 0: cluster.gpus=true: vLLM finds the platform cpu here") and told.endswith("the package vllm 0.30.0")


async def _narrow(tiny: Path) -> None:
    """The smallest cache that passes the check is enough for vLLM, which prefers VLLM_CPU_KVCACHE_SPACE (platforms/cpu.py:300)."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    settings = SETTINGS.model_copy(update={"kv_cache_mb": 1, "max_response_tokens": 300})
    check_engine(ModelDescription.read(tiny), "float32", settings, gpu=False)
    engine, _ = await _start(tiny, kv_cache_mb=1, max_response_tokens=300)
    try:
        assert engine._llm.vllm_config.cache_config.kv_cache_memory_bytes == 1 << 20
        generated = await generate(engine, _prompts(4), Sampling(n=2, temperature=1.0, max_tokens=300, seed=1))
        again = await generate(engine, _prompts(4), Sampling(n=2, temperature=1.0, max_tokens=300, seed=1))
        assert _same(generated, again)  # preempted requests are computed again, to the same end
    finally:
        await engine.close()


def test_a_cache_for_few_sequences_serves_many(host: Host, tiny: Path) -> None:
    host.run(_narrow, tiny)


def test_request_seeds_depend_on_seed_prompt_and_sample_alone() -> None:
    seeds = {request_seed(seed, prompt, sample) for seed in (1, 2) for prompt in (1, "1", 2) for sample in (0, 1)}
    assert len(seeds) == 12 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(1, 1, 0) == request_seed(1, 1, 0)
