"""Reads a pickle as data: nothing that it names is imported, and nothing is called.

Python's unpickler builds objects by calling what a pickle names. This one represents such an object by its class's name, the arguments and
the state, for classes of an allow-list, and knows only the opcodes that pickled dataclasses consist of (protocols 2 to 5). Time and memory
are proportional to the size of the file, whatever is in it.
"""

from collections.abc import Callable, Collection
from typing import Any

from megarl.imports import gc_paused
from megarl.text.display import one_line

_MAX_BYTES = 8  # of an integer
_MARK = object()


class Built:
    """An object as a pickle describes it. Compared by identity, so that it can be a key in a dictionary."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args, self.state = name, args, None


class Named:
    """A class, function or constant that a pickle names."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@gc_paused()
def read_pickle(data: bytes, allowed: Collection[str]) -> Any:
    """Return what a pickle describes, made of None, bool, int, str, tuple, list, dict, `Built` and `Named` alone.

    Args:
        data: the whole pickle.
        allowed: "module.name" of everything that it may name.

    Raises:
        ValueError: it names something else, has an opcode that plain data does not need, or is broken.
    """
    try:
        return _PickleReader(data, allowed).read()
    except (IndexError, KeyError, UnicodeDecodeError, AttributeError, TypeError) as error:  # of a stack or memo without what is asked for
        raise ValueError(f"is broken: {type(error).__name__}: {one_line(str(error), 100)}") from None


class _PickleReader:
    def __init__(self, data: bytes, allowed: Collection[str]) -> None:
        self._data, self._at, self._allowed = data, 0, allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._operations: dict[int, Callable[[], object]] = {
            0x80: lambda: self._take(1),  # PROTO
            0x95: lambda: self._take(8),  # FRAME
            ord("N"): lambda: self._push(None),
            0x88: lambda: self._push(True),
            0x89: lambda: self._push(False),
            ord("J"): lambda: self._push(self._number(4, signed=True)),
            ord("K"): lambda: self._push(self._number(1)),
            ord("M"): lambda: self._push(self._number(2)),
            0x8A: self._long,
            0x8C: lambda: self._push(self._text(1)),
            ord("X"): lambda: self._push(self._text(4)),
            ord(")"): lambda: self._push(()),
            0x85: lambda: self._tuple(1),
            0x86: lambda: self._tuple(2),
            0x87: lambda: self._tuple(3),
            ord("t"): lambda: self._push(tuple(self._marked())),
            ord("]"): lambda: self._push([]),
            ord("a"): lambda: self._extend([self._pop()]),
            ord("e"): lambda: self._extend(self._marked()),
            ord("}"): lambda: self._push({}),
            ord("s"): lambda: self._set([*reversed([self._pop(), self._pop()])]),
            ord("u"): lambda: self._set(self._marked()),
            ord("("): lambda: self._push(_MARK),
            0x94: lambda: self._remember(len(self._memo)),
            ord("q"): lambda: self._remember(self._number(1)),
            ord("r"): lambda: self._remember(self._number(4)),
            ord("h"): lambda: self._push(self._memo[self._number(1)]),
            ord("j"): lambda: self._push(self._memo[self._number(4)]),
            ord("c"): lambda: self._name(self._line(), self._line()),
            0x93: lambda: self._name(*reversed([self._pop(), self._pop()])),
            0x81: self._build,  # NEWOBJ
            ord("R"): self._build,  # REDUCE
            ord("b"): self._state,
        }

    def read(self) -> Any:
        operations, data = self._operations, self._data
        while True:
            code = data[self._at]
            self._at += 1
            if code == ord("."):
                break
            if code not in operations:
                raise ValueError(f"has opcode {bytes([code])!r} at byte {self._at - 1}, which plain data does not need")
            operations[code]()
        [found] = self._stack
        return found

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError(f"ends within an item, at byte {len(self._data)}")
        return self._data[start : self._at]

    def _number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _long(self) -> None:
        size = self._number(1)
        if size > _MAX_BYTES:
            raise ValueError(f"has an integer of {size} bytes")
        self._push(self._number(size, signed=True))

    def _text(self, count: int) -> str:
        return self._take(self._number(count)).decode()

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("is broken: a mark where a value is expected")
        return value

    def _marked(self) -> list[Any]:
        """Pop everything above the last mark."""
        start = len(self._stack) - 1
        while self._stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise ValueError("is broken: no mark")
        found = self._stack[start + 1 :]
        del self._stack[start:]
        return found

    def _tuple(self, count: int) -> None:
        self._push(tuple([self._pop() for _ in range(count)][::-1]))

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("is broken: appends to what is no list")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        found = self._stack[-1]
        if type(found) is not dict or len(values) % 2:
            raise ValueError("is broken: sets items of what is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, int, Built):  # the hash of a deep tuple would overflow the interpreter's stack
                raise ValueError(f"has a {type(key).__name__} as a key")
            if key in found:
                raise ValueError(f"has the key {one_line(str(key), 100)!r} twice")
            found[key] = value

    def _remember(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _name(self, module: Any, name: Any) -> None:
        found = f"{module}.{name}" if type(module) is type(name) is str else "what is no text"
        if found not in self._allowed:
            raise ValueError(f"names {one_line(found, 100)}, which is no part of it: nothing was executed")
        self._push(Named(found))

    def _build(self) -> None:
        args, made = self._pop(), self._pop()
        if type(made) is not Named or type(args) is not tuple:
            raise ValueError("is broken: builds an object of no class")
        self._push(Built(made.name, args))

    def _state(self) -> None:
        state, found = self._pop(), self._stack[-1]
        if type(found) is not Built or found.state is not None:
            raise ValueError("is broken: sets the state of what is no new object")
        found.state = state
