"""Lets several ranks send one update together, each its part of the weights (`SyncSettings.senders`).

In a round, each of these senders that has tensors left sends one bucket. The first sender learns of all of them, tells the engines, and
tells the others when the engines have them. This goes through the ranks' store. The buckets go from each sender straight to the engines, or
to the engine worker that shares its device, so that an update takes as long as its largest part, as far as the engines' network keeps up.
"""

import json
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

POLL_S = 0.002
_FAULT, _OVER = "fault", "over"


class SenderStopped(Exception):
    """Another sender has failed, and says why."""


class SenderRounds:
    """One sender's part in the rounds of an exchange.

    Args:
        store: the ranks' store.
        sender: this sender's number; 0 is the first.
        senders: how many there are.
        timeout_s: longest wait for another sender.
    """

    def __init__(self, store: Any, sender: int, senders: int, timeout_s: float) -> None:
        self.sender, self.senders = sender, senders
        self._store, self._others, self._timeout_s = store, list(range(1, senders)), timeout_s
        self._exchange = self._number = 0
        self._left: list[int] = []  # of the others, those that have not said their last
        self._keys: Any = None  # of this exchange, and of the one before
        self._before: Any = None
        self.last: list[Any] = []
        """The last messages of the other senders, on the first."""

    def begin(self) -> None:
        """Begin an exchange; every sender must do so."""
        self._exchange, self._before = self._exchange + 1, self._keys
        self._keys, self._number, self._left, self.last = dist.PrefixStore(f"weights/{self._exchange}", self._store), 0, [*self._others], []

    # --- what the first sender does

    def gathered(self) -> list[Any]:
        """Wait for the other senders' messages of the next round, and return them in the senders' order, without any last ones."""
        messages, number, waiting = list[Any](), self._number, [*self._left]
        for sender in waiting:
            key = f"{number}/{sender}"
            self._wait(key, f"sender {sender} of {self.senders}")
            message, last = json.loads(zlib.decompress(self._keys.get(key)))
            self._keys.delete_key(key)
            if last:
                self._left.remove(sender)
                self.last.append(message)
            else:
                messages.append(message)
        if waiting:  # they have seen what they waited for before
            if number:
                self._keys.delete_key(f"told/{number - 1}")
                self._keys.delete_key(f"{number - 1}")
            elif self._before is not None:
                self._before.delete_key(_OVER)
        self._number += 1
        return messages

    def told(self) -> None:
        """Let the other senders go on: the engines have been told of the messages of the last round."""
        if self._left:
            self._keys.set(f"told/{self._number - 1}", "")

    def settle(self) -> None:
        """Tell the other senders that the messages of the last round have been dealt with."""
        if self._left:
            self._keys.set(f"{self._number - 1}", "")

    def end(self) -> None:
        """End the exchange: the other senders return."""
        if self._others:
            self._keys.set(_OVER, "")

    # --- what the others do

    def offer(self, message: Any) -> Callable[[], object]:
        """Give the first sender this round's message, and wait until it has told the engines: they must expect what is broadcast next.

        The returned function waits until the message has been dealt with.
        """
        number, self._number = self._number, self._number + 1
        self._say(message, number, last=False)
        self._wait(f"told/{number}", "rank 0")
        return lambda: self._wait(f"{number}", "rank 0")

    def leave(self, message: Any) -> None:
        """Give the first sender the last message, and wait for the end of the exchange."""
        self._say(message, self._number, last=True)
        self._wait(_OVER, "rank 0")

    def _say(self, message: Any, number: int, *, last: bool) -> None:
        """Compressed, since the store takes no value of more than 8 MiB."""
        self._keys.set(f"{number}/{self.sender}", zlib.compress(json.dumps([message, last]).encode()))

    # --- what any does

    def fail(self, fault: str) -> None:
        """Stop all senders: each one's wait raises SenderStopped."""
        if self._others:
            self._keys.set(_FAULT, fault)

    def _wait(self, key: str, whom: str) -> None:
        """Wait for a key. Raises SenderStopped, or RuntimeError if `whom` is late."""
        deadline = time.monotonic() + self._timeout_s
        while not self._keys.check([key]):
            if self._keys.check([_FAULT]):
                raise SenderStopped(self._keys.get(_FAULT).decode())
            if time.monotonic() > deadline:
                raise RuntimeError(f"sync: {whom} did not send or answer within {self._timeout_s:g} s")
            time.sleep(POLL_S)
