"""A calculator with bounded cost: the length of an expression, the operations and the size of numbers are limited."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARS, LARGEST = 256, 1e100

_TWO: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ONE: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, `+ - * / // % **` and brackets. Raises ValueError, with a message for the model."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_CHARS}")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, SystemError):  # SystemError: Python 3.11's parser, used by several threads at once
        raise ValueError("this is not an arithmetic expression") from None
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        return _bounded(_TWO[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = _value(node.left), _value(node.right)
        if base and power * math.log10(abs(base)) > math.log10(LARGEST):
            raise ValueError("the result is too large")
        return _bounded(base**power)
    raise ValueError(f"{ast.unparse(node)!r:.80} is not a number or operation that the calculator supports")


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or not abs(value) <= LARGEST:
        raise ValueError("the result is too large, or not a real number")
    return value
