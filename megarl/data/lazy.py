"""A sequence whose items are made on demand."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """A sequence whose subclasses make items from their indices."""

    @abstractmethod
    def _at(self, places: Sequence[int]) -> list[Item]:
        """Return the items at these indices, each from 0 to the length minus one."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        position = range(len(self))[index]  # IndexError beyond the end
        return self._at(position) if isinstance(position, range) else self._at([position])[0]
