"""Reads a pickle as plain data: nothing is imported, called or set, and whatever the file asks for is bounded before it is allocated.

pickle.load runs what a file says, and a list of allowed names does not prevent that: BUILD sets attributes on any of them, classes
included, and LONG_BINPUT asks for gigabytes in five bytes. Here an object becomes a record of what the file says about it; the caller
builds the real object from the checked fields. The opcodes are those that Python writes for dataclasses (protocol 4); any other is refused.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Collection
from typing import Any, Final

LIMIT_BYTES: Final = 128 << 20  # of a file: enough for half a million stored tensors
TEXT, INTEGER_BITS = 4096, 63
STACK, DEPTH = 4096, 32  # Python writes a container in pieces of 1000 entries, and torch's metadata is eight levels deep
BLOCK = 4096  # bytes between two checks of the stack: no byte pushes more than one value

_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
_MEMOIZE, _BINGET, _LONG_BINGET, _MARK = (_CODES[name] for name in ("MEMOIZE", "BINGET", "LONG_BINGET", "MARK"))
_BININT, _BININT1, _BININT2, _LONG1 = (_CODES[name] for name in ("BININT", "BININT1", "BININT2", "LONG1"))
_SHORT_BINUNICODE, _BINUNICODE, _NONE = (_CODES[name] for name in ("SHORT_BINUNICODE", "BINUNICODE", "NONE"))
_EMPTY_TUPLE, _TUPLE, _TUPLE1 = (_CODES[name] for name in ("EMPTY_TUPLE", "TUPLE", "TUPLE1"))
_EMPTY_DICT, _SETITEM, _SETITEMS = (_CODES[name] for name in ("EMPTY_DICT", "SETITEM", "SETITEMS"))
_EMPTY_LIST, _APPEND, _APPENDS = (_CODES[name] for name in ("EMPTY_LIST", "APPEND", "APPENDS"))
_NEWOBJ, _REDUCE, _BUILD, _STACK_GLOBAL = (_CODES[name] for name in ("NEWOBJ", "REDUCE", "BUILD", "STACK_GLOBAL"))
_PROTO, _FRAME, _STOP = (_CODES[name] for name in ("PROTO", "FRAME", "STOP"))
_BOOLEANS = {_CODES["NEWTRUE"]: True, _CODES["NEWFALSE"]: False}
_TUPLES = {_CODES["TUPLE2"]: 2, _CODES["TUPLE3"]: 3}


class GlobalName(str):
    """A name that a pickle would import: `module.name`."""

    __slots__ = ()


class PickledObject:
    """What a pickle says about an object: the name that it calls, the arguments, and the state that it sets."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: GlobalName, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments, self.state = name, arguments, None


class _Unreadable(ValueError):
    """A refusal of the file, whose message is complete as it is."""


def read_plain(data: bytes, names: Collection[str]) -> Any:
    """The content of a pickle: None, booleans, integers, text, tuples, lists, dictionaries (keys: text or records), names, records.

    The same value may occur in several places, and a container inside itself: traverse the result only along the expected structure.

    Args:
        data: the file's content.
        names: the names that it may use.

    Raises:
        ValueError: the file is broken, or holds anything else.
    """
    if len(data) > LIMIT_BYTES:
        raise _Unreadable(f"has {len(data)} bytes, more than {LIMIT_BYTES}")
    try:
        return _interpret(data, names)
    except _Unreadable:
        raise
    except IndexError:
        raise _Unreadable("is damaged: takes what it has not put there") from None
    except ValueError as error:  # from pickletools, or from decoding UTF-8
        raise _Unreadable(f"is damaged: {error}") from None


def _interpret(data: bytes, names: Collection[str]) -> Any:
    """One loop over the bytes, the most frequent opcodes first: a large model's file has fifteen million, and every rank reads it."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under each mark
    memo: list[Any] = []
    at, size = 0, len(data)
    while at < size:
        if len(stack) > STACK or len(below) > DEPTH:
            raise _Unreadable("is nested deeper, or has more in one place, than any checkpoint")
        end = min(at + BLOCK, size)
        while at < end:
            code = data[at]
            at += 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BININT1:
                stack.append(data[at])
                at += 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _BINGET:
                stack.append(memo[data[at]])
                at += 1
            elif code == _MARK:
                below.append(stack)
                stack = []
            elif code == _BININT2:
                stack.append(int.from_bytes(data[at : at + 2], "little"))
                at += 2
            elif code == _TUPLE:
                items, stack = stack, below.pop()
                stack.append(tuple(items))
            elif code == _TUPLE1:
                stack.append((stack.pop(),))
            elif code == _EMPTY_TUPLE:
                stack.append(())
            elif code in (_REDUCE, _NEWOBJ):
                arguments, name = stack.pop(), stack.pop()
                stack.append(PickledObject(_of(GlobalName, name), _of(tuple, arguments)))
            elif code == _EMPTY_DICT:
                stack.append({})
            elif code == _SETITEMS:
                items, stack = stack, below.pop()
                _set(stack[-1], items)
            elif code == _BUILD:
                state, record = stack.pop(), _of(PickledObject, stack[-1])
                if record.state is not None:
                    raise _Unreadable(f"sets the state of a {record.name} twice")
                record.state = state
            elif code == _NONE:
                stack.append(None)
            elif code in (_SHORT_BINUNICODE, _BINUNICODE):
                width = 1 if code == _SHORT_BINUNICODE else 4
                length = int.from_bytes(data[at : at + width], "little")
                start, at = at, at + width + length
                if at > size:
                    raise _damaged(data, start - 1)
                stack.append(_text(data[at - length : at]))
            elif code in (_BININT, _LONG1):
                length, at = (4, at) if code == _BININT else (data[at], at + 1)
                stack.append(_integer(data[at : at + length]))
                at += length
            elif code == _EMPTY_LIST:
                stack.append([])
            elif code == _APPENDS:
                items, stack = stack, below.pop()
                _of(list, stack[-1]).extend(items)
            elif code == _APPEND:
                item = stack.pop()
                _of(list, stack[-1]).append(item)
            elif code == _SETITEM:
                pair = stack[-2:]
                del stack[-2:]
                _set(stack[-1], pair)
            elif code == _STACK_GLOBAL:
                name, module = stack.pop(), stack.pop()
                stack.append(_name(_of(str, module), _of(str, name), names))
            elif code in _TUPLES:
                if _TUPLES[code] > len(stack):
                    raise IndexError
                items, stack = stack[-_TUPLES[code] :], stack[: -_TUPLES[code]]
                stack.append(tuple(items))
            elif code in _BOOLEANS:
                stack.append(_BOOLEANS[code])
            elif code == _PROTO:
                at += 1
            elif code == _FRAME:
                at += 8
            elif code == _STOP:
                if len(stack) != 1 or below:
                    raise _Unreadable("is damaged: ends within a value")
                if at < size:
                    raise _Unreadable("is damaged: goes on after its end")
                return stack[0]
            else:
                raise _damaged(data, at - 1)
    raise _Unreadable("is damaged: it has no end")


def _damaged(data: bytes, start: int) -> ValueError:
    """The reason why the opcode at `start` is not read."""
    try:
        opcode, _, _ = next(pickletools.genops(io.BytesIO(data[start:])))
    except ValueError as error:
        return error
    return _Unreadable(f"holds {opcode.name}, which no checkpoint needs: not loaded")


def _text(data: bytes) -> str:
    text = data.decode()
    if len(text) > TEXT:
        raise _Unreadable(f"holds a text of {len(text)} characters")
    return text


def _integer(data: bytes) -> int:
    value = int.from_bytes(data, "little", signed=True)
    if value.bit_length() > INTEGER_BITS:
        raise _Unreadable(f"holds an integer of {value.bit_length()} bits")
    return value


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
