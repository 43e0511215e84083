"""Reads a pickle as plain data: nothing is imported, called or set, and what the file asks for is bounded before it is made.

pickle.load runs what a file says, and a list of allowed names does not mend that: BUILD sets attributes on any of them, classes included,
LONG_BINPUT asks for gigabytes in five bytes. Here an object is a record of what the file says of it; whoever reads the result makes the
real object of the checked fields. The opcodes are those that Python writes for dataclasses (protocol 4); every other is refused.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Collection
from typing import Any, Final

LIMIT_BYTES: Final = 128 << 20  # of a file; half a million stored tensors
TEXT, INTEGER_BITS = 4096, 63
STACK, DEPTH = 4096, 32  # Python writes a container in pieces of 1000 entries, and torch's metadata is eight deep
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE"}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class GlobalName(str):
    """What a pickle would import: `module.name`."""

    __slots__ = ()


class PickledObject:
    """What a pickle says of an object: the name that it calls, with what, and the state that it sets."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: GlobalName, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments, self.state = name, arguments, None


class _Unreadable(ValueError):
    """The line says all."""


def read_plain(data: bytes, names: Collection[str]) -> Any:
    """What a pickle holds: None, booleans, integers, text, tuples, lists, dictionaries (their keys are text or records), names, records.

    The same value may stand in several places, and a container in itself: go through the result along what is expected there.

    Args:
        data: the file's content.
        names: what it may name.

    Raises:
        ValueError: the file is broken, or holds anything else.
    """
    if len(data) > LIMIT_BYTES:
        raise _Unreadable(f"has {len(data)} bytes, more than {LIMIT_BYTES}")
    try:
        return _interpret(io.BytesIO(data), names)
    except _Unreadable:
        raise
    except IndexError:
        raise _Unreadable("is damaged: takes what it has not put there") from None
    except ValueError as error:  # of pickletools
        raise _Unreadable(f"is damaged: {error}") from None


def _interpret(stream: io.BytesIO, names: Collection[str]) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: list[Any] = []
    argument: Any
    for opcode, argument, _ in pickletools.genops(stream):
        code, given = opcode.name, stack
        if code in ("TUPLE", "APPENDS", "SETITEMS"):  # take all down to the mark
            stack = below.pop()
        match code:
            case "MEMOIZE":
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                below.append(stack)
                stack = []
            case "TUPLE":
                stack.append(tuple(given))
            case "APPENDS":
                _of(list, stack[-1]).extend(given)
            case "APPEND":
                item = stack.pop()
                _of(list, stack[-1]).append(item)
            case "SETITEMS":
                _set(stack[-1], given)
            case "SETITEM":
                pair = stack[-2:]
                del stack[-2:]
                _set(stack[-1], pair)
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_name(_of(str, module), _of(str, name), names))
            case "NEWOBJ" | "REDUCE":
                arguments, name = stack.pop(), stack.pop()
                stack.append(PickledObject(_of(GlobalName, name), _of(tuple, arguments)))
            case "BUILD":
                state, record = stack.pop(), _of(PickledObject, stack[-1])
                if record.state is not None:
                    raise _Unreadable(f"sets the state of a {record.name} twice")
                record.state = state
            case "STOP":
                if len(stack) != 1 or below:
                    raise _Unreadable("is damaged: ends within a value")
                if stream.read(1):
                    raise _Unreadable("is damaged: goes on after its end")
            case "PROTO" | "FRAME":
                pass
            case _:
                stack.append(_leaf(code, argument, stack))
        if len(stack) > STACK or len(below) > DEPTH:
            raise _Unreadable("is nested deeper, or has more in one place, than any checkpoint")
    return stack[0]


def _leaf(code: str, argument: Any, stack: list[Any]) -> Any:
    """A value that an opcode holds itself, and the short tuples."""
    if code in _INTEGERS:
        if argument.bit_length() > INTEGER_BITS:
            raise _Unreadable(f"holds an integer of {argument.bit_length()} bits")
        return argument
    if code in _TEXTS:
        if len(argument) > TEXT:
            raise _Unreadable(f"holds a text of {len(argument)} characters")
        return argument
    if code in _TUPLES:
        count = _TUPLES[code]
        if count > len(stack):
            raise IndexError
        start = len(stack) - count
        items = tuple(stack[start:])
        del stack[start:]
        return items
    if code in _CONSTANTS:
        return _CONSTANTS[code]
    raise _Unreadable(f"holds {code}, which no checkpoint needs: not loaded")


def _of(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise _Unreadable(f"is damaged: a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _set(target: Any, pairs: list[Any]) -> None:
    entries = _of(dict, target)
    if len(pairs) % 2:
        raise _Unreadable("is damaged: a key without a value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        if type(key) not in (str, PickledObject):
            raise _Unreadable(f"is damaged: a {type(key).__name__} as a key")
        entries[key] = value


def _name(module: str, name: str, names: Collection[str]) -> GlobalName:
    full = f"{module}.{name}"
    if full not in names:
        raise _Unreadable(f"asks for {full if full.isprintable() else repr(full)}, which no checkpoint of megarl holds: not loaded")
    return GlobalName(full)
