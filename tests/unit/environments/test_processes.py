"""Environments in processes: whatever one does ends its episode and no other, and episodes repeat themselves."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megarl.config import ConfigError, EnvironmentSettings, SandboxSettings
from megarl.environments.hosts import guarantee, open_host
from megarl.environments.processes import ProcessHost
from megarl.environments.protocol import EnvironmentFailed, ProtocolFault, Turn, read_reset, read_step
from megarl.image_source import held
from megarl.sandbox import process
from megarl.sandbox.level import Level, level, meaning

WORLDS = "tests.unit.environments.worlds"


def settings(name: str, kind: str = "function", step_s: float = 1.0, **source: Any) -> EnvironmentSettings:
    tree = {"source": {"type": kind, "path": f"{WORLDS}:{name}", **source}, "step_s": step_s, "workers": 2}
    return EnvironmentSettings.model_validate({**tree, "sandbox": SandboxSettings(memory_gb=1)})


def played(setting: EnvironmentSettings, body: Callable[[Any], Awaitable[Any]]) -> Any:
    host = open_host(setting)
    try:
        return asyncio.run(body(host))  # type: ignore[arg-type]
    finally:
        host.close()


async def episode(host: Any, seed: int, texts: list[str], task: dict[str, Any] | None = None) -> list[Turn]:
    one = host.open()
    try:
        return [await one.reset(seed, task), *[await one.step(text, [1, 2], True) for text in texts]]
    finally:
        await one.close()


def test_each_machine_reports_the_sandbox_level_of_its_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    game = settings("Counting")
    http = EnvironmentSettings.model_validate({"source": {"type": "http", "url": "http://127.0.0.1:1"}})
    assert guarantee(http) is None
    for granted in (level(), Level.LIMITS):
        monkeypatch.setattr(process, "level", lambda granted=granted: granted)
        assert str(guarantee(game)).startswith(meaning(granted, network=False))
    strict = game.model_copy(update={"sandbox": SandboxSettings(require="landlock")})
    with pytest.raises(ConfigError, match=r"^environment\.sandbox\.require: landlock, and this machine allows only limits"):
        guarantee(strict)


ATTACKS = {
    "end_at_once": "worker died: exit status 3",
    "crash": "worker died: SIGSEGV",
    "deaf_loop": "timeout",
    "a_large_number": "timeout",
    "sleep": "timeout",
    "stop_itself": "timeout",
    "ten_gigabytes": "MemoryError: ",
    "recurse": "RecursionError: ",
    "leave": "SystemExit: ",
    "many_files": "OSError: ",
    "an_endless_message": "worker died: it wrote an invalid answer",
    "ready_again": "worker died: it wrote an invalid answer",
    "exit_from_a_thread": "worker died: exit status 5",
}


def test_a_misbehaving_environment_ends_only_its_own_episode(capfd: pytest.CaptureFixture[str]) -> None:
    """Sound episodes share the processes with one attack after the other; they are played again, and say the same."""

    async def body(host: ProcessHost) -> tuple[list[list[Turn]], list[str], list[list[Turn]]]:
        async def slow(seed: int) -> list[Turn]:
            one = host.open()
            turns = [await one.reset(seed, None)]
            for attacked in [*range(len(ATTACKS)), None]:
                await turn_of[attacked].wait() if attacked is not None else None
                turns.append(await one.step(f"say {len(turns)}", [3], True))
            await one.close()
            return turns

        async def attack() -> list[str]:
            said = []
            for number, name in enumerate(ATTACKS):
                with pytest.raises(EnvironmentFailed) as failed:
                    await episode(host, number, ["say", name])
                said.append(str(failed.value))
                turn_of[number].set()
            return said

        turn_of: dict[int | None, asyncio.Event] = {number: asyncio.Event() for number in range(len(ATTACKS))}
        *sound, said = await asyncio.gather(*[slow(seed) for seed in range(4)], attack())
        for event in turn_of.values():
            event.set()
        again = [await slow(seed) for seed in range(4)]
        return sound, said, again  # type: ignore[return-value]

    sound, said, again = played(settings("Counting"), body)
    for name, error, expected in zip(ATTACKS, said, ATTACKS.values(), strict=True):
        assert error.startswith(expected) or error == "timeout", (name, error)  # which any may be on a busy machine
    assert sound == again and len({turns[0].messages[0]["content"] for turns in sound}) == 4
    assert all(len(turns) == len(ATTACKS) + 2 for turns in sound)
    capfd.readouterr()


def test_an_episode_whose_replay_differs_is_given_up() -> None:
    async def body(host: ProcessHost) -> None:
        one = host.open()
        await one.reset(1, None)
        await host.open().reset(1, None)
        third = host.open()  # in the process of the first
        await third.reset(2, None)
        with pytest.raises(EnvironmentFailed, match=r"^worker died: exit status 3$"):
            await third.step("end_at_once", [], True)
        with pytest.raises(EnvironmentFailed, match=r"^not repeatable: "):
            await one.step("on", [], True)
        await one.close()
        with pytest.raises(EnvironmentFailed, match=r"^KeyError: "):  # the new process keeps nothing of it
            await one.step("on", [], True)

    played(settings("Forgetful", step_s=20), body)


def test_closing_an_episode_of_a_dead_process_starts_no_process() -> None:
    async def body(host: ProcessHost) -> None:
        one = host.open()
        await one.reset(1, None)
        with pytest.raises(EnvironmentFailed, match=r"^worker died: exit status 3$"):
            await one.step("end_at_once", [], True)
        await one.close()
        assert host._processes == [None, None]

    played(settings("Counting", step_s=20), body)


def test_an_overlong_answer_ends_only_its_episode() -> None:
    async def body(host: ProcessHost) -> None:
        sound, long = host.open(), host.open()
        host.open()
        same = host.open()  # in the process of the long one
        await sound.reset(1, None)
        await long.reset(2, None)
        await same.reset(3, None)
        with pytest.raises(EnvironmentFailed, match=r"^bad return: 7\d{4} bytes, more than 65536$"):
            await long.step("x" * 70_000, [], True)
        home = same.home
        await same.step("on", [], True)
        assert same.home is home

    played(settings("Counting", step_s=20), body)


def test_episodes_of_one_process_do_not_draw_from_each_others_random_numbers() -> None:
    async def body(host: ProcessHost) -> tuple[list[list[Turn]], list[list[Turn]]]:
        seeds, texts = range(6), ["a", "b", "c"]
        return [await episode(host, seed, texts) for seed in seeds], await asyncio.gather(*[episode(host, seed, texts) for seed in seeds])

    alone, together = played(settings("Careless", step_s=20), body)
    assert alone == together and len({str(turns) for turns in alone}) == 6


def test_sources_that_run_in_the_sandbox_play() -> None:
    async def counting(host: ProcessHost) -> list[Turn]:
        return await episode(host, 7, ["a", "stop"])

    opening, said, end = played(settings("Counting", params={"word": "w"}, step_s=20), counting)
    assert opening.messages[0]["role"] == "user" and opening.messages[0]["content"].startswith("begin ")
    assert said.messages[0]["content"].startswith("w 1 ") and (said.reward, said.done, said.info) == (0.25, False, {"turn": 1.0})
    assert (end.messages, end.reward, end.done) == (None, 0.25, True)

    async def gym(host: ProcessHost) -> list[Turn]:
        return await episode(host, 7, ["x", "y"])

    opening, said, end = played(settings("Gym", "gymnasium", step_s=20), gym)
    assert [turn.messages[0]["content"] for turn in (opening, said, end)] == ["seed 7", "left 1", "left 0"]
    assert (said.reward, said.done, end.reward, end.done, end.info) == (1.0, False, 0.0, True, {"left": 0.0})

    async def told(host: ProcessHost) -> list[Turn]:
        return await episode(host, 7, ["right"], {"prompt": "p", "answer": "right", "meta": {}})

    opening, end = played(settings("TaskTold", step_s=20), told)
    assert opening.messages is None and (end.reward, end.done) == (1.0, True)

    async def question(host: ProcessHost) -> list[list[Turn]]:
        [asked, _] = await episode(host, 5, ["?"])
        word = asked.messages[0]["content"].split()[-1]  # type: ignore[index]
        return [await episode(host, 5, [word[::-1]]), await episode(host, 5, [word])]

    source = {"type": "reasoning_gym", "dataset": "spell_backward", "params": {"min_word_len": 5, "max_word_len": 5}}
    right, wrong = played(EnvironmentSettings.model_validate({"source": source, "workers": 1}), question)
    assert [(turns[1].reward, turns[1].done) for turns in (right, wrong)] == [(1.0, True), (0.0, True)]


@pytest.mark.parametrize(
    ("name", "source", "line"),
    [
        ("Nothing", {}, r"^environment\.source\.path: module 'tests\.unit\.environments\.worlds' has no attribute 'Nothing'$"),
        ("NoStep", {}, r"^environment\.source\.path: tests\.unit\.environments\.worlds:NoStep has no method step$"),
        ("Says", {"params": {"other": 1}}, r"^environment\.source\.params: .*:Says refuses \{'other': 1\}: TypeError: "),
        ("x", {"path": "no.such:Thing"}, r"^environment\.source\.path: cannot import module 'no\.such': ModuleNotFoundError: "),
    ],
)
def test_an_environment_that_cannot_be_created_is_refused(name: str, source: dict[str, Any], line: str) -> None:
    async def body(host: ProcessHost) -> None:
        await host.open().reset(1, None)

    with pytest.raises(ConfigError, match=line):
        played(settings(name, **source), body)


def test_malformed_steps_of_an_environment_are_named() -> None:
    bad_steps = {
        "text": "a str, not",
        ("go", 0.0): "a tuple of 2, not",
        ("go", "much", False): "reward='much'",
        ("go", float("nan"), False): "reward=nan",
        ("go", 1e10, False): "reward=10000000000.0",
        ("go", 10**400, False): "reward=1000",
        ("go", 0.0, 1): "done=1",
        ("go", 0.0, False, 3): "info=3",
        (None, 0.0, False): "None (NoneType), not a text or a list",
        ("  ", 0.0, False): "no text",
        (5, 0.0, True): "5 (int), not a text",
    }
    for returned, part in bad_steps.items():
        with pytest.raises(ProtocolFault) as fault:
            read_step(returned)
        assert part in str(fault.value)
    for said, part in (
        ([], "not a text or a list"),
        ([{"role": "user"}], "a text 'role'"),
        ([{"role": "assistant", "content": "x"}], "policy"),
    ):
        with pytest.raises(ProtocolFault, match=part):
            read_reset(said)
    assert read_reset(None) == Turn(None)
    assert read_step(("go", 0, False, {"a": 1, "b": 10**400, "c": float("inf"), "d": "x"})).info == {"a": 1.0}


def test_an_environment_shows_images_as_bytes_urls_or_pillow_s() -> None:
    """And no paths or addresses, with which code in the sandbox would have this process read for it; nor any number of bytes."""

    async def body(host: Any) -> tuple[list[Turn], dict[str, str]]:
        turns, faults = await episode(host, 3, ["bytes", "url", "pillow"]), dict[str, str]()
        for form in ("path", "address", "large"):
            with pytest.raises(EnvironmentFailed) as failure:
                await episode(host, 3, [form])
            faults[form] = str(failure.value)
        return turns, faults

    turns, faults = played(settings("Painter", step_s=20.0), body)
    for turn in turns:
        assert turn.messages is not None
        part = turn.messages[0]["content"][-1]
        picture = held(part["image"])
        assert part["type"] == "image" and picture is not None and picture[:4] == b"\x89PNG"
    assert faults["path"].startswith("bad return: step returned the part ") and "neither a text nor an image" in faults["address"]
    assert re.fullmatch(r"bad return: \d+ bytes, more than 1048576", faults["large"])
