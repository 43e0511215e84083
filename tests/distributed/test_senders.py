"""Several ranks send one update, each its part: every receiver gets all of it, and where one fails all end at once."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import Layout
from megarl.parallel.grid import Grid
from megarl.sync.receive import BucketReceiver
from megarl.sync.send import Sender
from megarl.sync.senders import SenderRounds, SenderStopped
from megarl.sync.wire import Header, Rendezvous
from tests.rank_pool import Pool

SENDERS, RECEIVERS = 3, 2
LIMIT_S = 120.0


def tensors(sender: int, sizes: list[int]) -> list[tuple[str, Tensor]]:
    return [(f"{sender}/{n}", torch.full((size,), 100.0 * sender + n)) for n, size in enumerate(sizes)]


def telling(grid: Grid, keys: Iterator[str], rounds: SenderRounds) -> Callable[[list[dict[str, Any]]], Callable[[], object]]:
    """As rank 0 tells the engines of a round's messages."""

    def tell(messages: list[dict[str, Any]]) -> Callable[[], object]:
        key = next(keys)
        grid.store.set(key, json.dumps(messages))
        rounds.told()

        def taken() -> None:
            grid.store.wait([f"{key}/{rank}" for rank in range(SENDERS, SENDERS + RECEIVERS)])
            rounds.settle()

        return taken

    return tell


def several(grid: Grid, sizes: list[list[int]], updates: int, relayed: bool) -> dict[str, float]:
    """The first ranks send `updates` times, in buckets of 1 MB; the others return the last value of each tensor that they have got.

    If relayed, the senders' buckets are in shared memory, of which each is opened by one receiver only.
    """
    keys = (f"senders/{number}" for number in count())
    if grid.rank >= SENDERS:
        receiver, got = BucketReceiver(torch.device("cpu")), dict[str, float]()
        while messages := json.loads(grid.store.get(key := next(keys))):
            if "world" in messages[0]:
                receiver.connect([Rendezvous(**message) for message in messages], grid.rank - SENDERS + (not relayed))
            else:
                assert [message["relay"] for message in messages] == [
                    message["sender"] % RECEIVERS if relayed else None for message in messages
                ]
                for name, tensor in receiver.receive([Header.parse(message) for message in messages]):
                    assert name not in got and bool((tensor == tensor[0]).all())
                    got[name] = float(tensor[0])
            grid.store.set(f"{key}/{grid.rank}", "")
            if "world" not in messages[0] and len(got) == sum(map(len, sizes)) and (updates := updates - 1):
                got.clear()
        grid.store.set(f"{key}/{grid.rank}", "")
        return got
    rounds = SenderRounds(grid.store, grid.rank, SENDERS, LIMIT_S)
    options: dict[str, Any] = {"workers": RECEIVERS, "host": "127.0.0.1", "bucket_mb": 1, "timeout_s": LIMIT_S}
    sender = Sender(
        "shm" if relayed else "gloo",
        device=torch.device("cpu"),
        relay=grid.rank % RECEIVERS if relayed else None,
        number=grid.rank,
        senders=SENDERS,
        **options,
    )
    mine = tensors(grid.rank, sizes[grid.rank])
    rounds.begin()
    if grid.rank:
        sender.connect(rounds.offer)
        rounds.leave(None)
        for _ in range(updates):
            rounds.begin()
            rounds.leave(sender.send(iter(mine), rounds.offer).tensors)
        return {}
    tell = telling(grid, keys, rounds)

    def announce(message: dict[str, Any]) -> Callable[[], object]:
        return tell([message, *rounds.gathered()])

    sender.connect(announce)
    assert rounds.gathered() == []
    rounds.end()
    for _ in range(updates):
        rounds.begin()
        sender.send(iter(mine), announce)
        while messages := rounds.gathered():
            tell(messages)()
        assert sorted(rounds.last) == sorted(map(len, sizes[1:]))
        rounds.end()
    tell([])()
    return {}


@pytest.mark.parametrize("relayed", [False, True], ids=["sent", "relayed"])
@pytest.mark.parametrize(
    "sizes",
    [
        [[1000], [200_000] * 9, [5] * 3],
        [[200_000] * 9, [7], [300_000, 1, 300_000]],
        [[5], [5], [5]],
    ],
    ids=["most-from-the-second", "most-from-the-first", "a-bucket-each"],
)
def test_receivers_get_what_several_senders_send(pool: Pool, sizes: list[list[int]], relayed: bool) -> None:
    *_, first, second = pool.run(several, Layout(ranks=SENDERS + RECEIVERS), sizes, 2, relayed)
    expected = {name: float(tensor[0]) for sender, own in enumerate(sizes) for name, tensor in tensors(sender, own)}
    assert first == second == expected


def failing(grid: Grid, which: int) -> tuple[str, float]:
    """A sender fails after its first message; what each of them raises, and after how long."""
    rounds, begun = SenderRounds(grid.store, grid.rank, SENDERS, LIMIT_S), time.monotonic()
    rounds.begin()
    try:
        for number in range(3):
            if number == 1 and grid.rank == which:
                rounds.fail("its weights are not finite")
                raise FloatingPointError("its weights are not finite")
            if grid.rank:
                rounds.offer({})()
            else:
                rounds.gathered()
                rounds.told()
                rounds.settle()
    except (SenderStopped, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "all sent", 0.0


@pytest.mark.parametrize("which", range(SENDERS))
def test_where_a_sender_fails_the_others_stop(pool: Pool, which: int) -> None:
    for rank, (said, seconds) in enumerate(pool.run(failing, Layout(ranks=SENDERS), which)):
        assert said == f"{'FloatingPointError' if rank == which else 'SenderStopped'}: its weights are not finite" and seconds < LIMIT_S / 2
