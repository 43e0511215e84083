"""The data-parallel rank of an engine at which each conversation's keys and values are cached."""

from collections.abc import Hashable, Sequence


class Homes:
    """Assigns requests to data-parallel ranks, each of which has a cache of its own.

    A conversation stays at its rank, its home, where its prefix is cached. New ones are spread evenly. A request goes to the rank with the
    fewest unfinished requests instead, which is its conversation's home from then on, if its home has over `slack` more.

    Args:
        ranks: the number of ranks.
        slack: the largest difference in unfinished requests at which a request still goes to the busier rank.
    """

    def __init__(self, ranks: int, slack: int) -> None:
        self._slack = slack
        self._homes: dict[Hashable, int] = {}
        self._conversations = [0] * ranks

    def place(self, conversation: Hashable | None, loads: Sequence[int]) -> int:
        """Return the rank for a request.

        Args:
            conversation: the conversation that it belongs to; None: to none, and the rank is the least busy one.
            loads: the number of unfinished requests of each rank.
        """
        ranks = range(len(loads))
        least = min(ranks, key=loads.__getitem__)
        if conversation is None:
            return least
        home = self._homes.get(conversation)
        chosen = min(ranks, key=lambda rank: (self._conversations[rank], loads[rank])) if home is None else home
        if loads[chosen] - loads[least] > self._slack:
            chosen = least
        if chosen != home:
            if home is not None:
                self._conversations[home] -= 1
            self._conversations[chosen] += 1
            self._homes[conversation] = chosen
        return chosen

    def forget(self) -> None:
        """Forget all homes: nothing is cached any more."""
        self._homes.clear()
        self._conversations = [0] * len(self._conversations)
