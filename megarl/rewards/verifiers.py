"""The reward sources as functions (prompt, response, answer, meta) -> (value, parts). They run only in the scoring processes.

A part is a number; one that is named feedback may be a text about the response, which a teacher can read (`distillation.prompt`).

This module imports neither torch nor the config, so that a scoring process takes no longer to start than its verifier's own imports.
"""

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from numbers import Rational, Real
from typing import Any

from megarl.data.answers import Answer
from megarl.imports import gc_paused
from megarl.rewards.golds import texts_of
from megarl.rewards.mathematics import MathVerify
from megarl.text.reasoning import after_reasoning

Parts = dict[str, float | str]
Verifier = Callable[[str, str, Answer, dict[str, Any]], tuple[float, Mapping[str, float | str]]]


OURS = ("prompt", "response", "answer", "meta")
# Data sets of reasoning-gym 0.1.25 whose scorer evaluates the response as Python (eval, sympy's parse_expr): what a model writes would run.
EVALUATING = frozenset(
    {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
        *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    }
)
FEEDBACK, MAX_FEEDBACK = "feedback", 4000  # characters, of all its texts together: a message from a scoring process has 64 KiB
VERIFIERS = ("reasoning_gym", "math_verify", "function")  # the source types that run in scoring processes
LARGEST = 1e9  # a score whose square, summed over a step, is still a float32
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")  # the keywords of verl's compute_score


class BadReturn(ValueError):
    """A reward function returned something that is not a score."""


class Abstained(ValueError):
    """A reward function returned None, or a dictionary with None under `score`: it has no opinion of this response."""


def load(source: dict[str, Any]) -> Verifier:
    """Return the verifier of a `reward.source` section. Raises ValueError, starting with the key within that section."""
    if source["type"] == "reasoning_gym":
        return _reasoning_gym(source["threshold"], source["extract"])
    if source["type"] == "math_verify":
        return MathVerify()
    if source["type"] == "sum":
        return _sum(source["parts"])
    return _function(source["path"])


def load_gold_check(source: dict[str, Any]) -> Verifier:
    """Return a verifier that raises BadGold for an answer that a `reward.source` section could not score by, whatever the response is."""
    parts = [part["source"] for part in source["parts"]] if source["type"] == "sum" else [source]
    checks = [MathVerify().check_gold for part in parts if part["type"] == "math_verify"]  # functions take any answer

    def verify(prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, Parts]:
        for check in checks:
            check(answer)
        return 1.0, {}

    return verify


def _sum(parts: list[dict[str, Any]]) -> Verifier:
    parts_loaded = list[tuple[str, float, Verifier]]()
    for number, part in enumerate(parts):
        if part["source"]["type"] not in VERIFIERS:
            continue  # megarl.rewards.weighted adds it
        try:
            parts_loaded.append((part["name"], part["weight"], load(part["source"])))
        except ValueError as error:
            raise ValueError(f"parts.{number}.source.{error}") from None

    def verify(prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, Parts]:
        total, values = 0.0, Parts()
        for name, weight, verifier in parts_loaded:
            value, inner = verifier(prompt, response, answer, meta)
            total += weight * value
            values |= {name: value} | {f"{name}/{key}": number for key, number in inner.items()}
        if abs(total) > LARGEST:
            raise BadReturn(f"the weighted sum is {total:g}, beyond the limit of {LARGEST:g}")
        return total, values

    return verify


def _reasoning_gym(threshold: float, extract: str | None) -> Verifier:
    with gc_paused():  # the whole package, since the data sets are not known yet, and an import must not count towards a sample's time
        import reasoning_gym
    pattern = None if extract is None else re.compile(extract)

    @cache
    def dataset(name: str, params: str) -> Any:
        if name in EVALUATING:  # named by a prompt file; `megarl.checks.data` refuses it in a data source
            raise ValueError(f"the scorer of {name} evaluates the response as Python, which is refused")
        return reasoning_gym.create_dataset(name, **json.loads(params))

    def verify(prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, Parts]:
        response = after_reasoning(response)
        final_answer = response.strip()
        if pattern is not None:
            matches = [match.group(pattern.groups and 1) for match in pattern.finditer(response)]
            if not matches or matches[-1] is None:  # None: the last match was made without the group
                return 0.0, {"raw": 0.0}
            final_answer = matches[-1].strip()
        scorer = dataset(meta["source_dataset"], json.dumps(meta["source_params"], sort_keys=True))
        entries = [{"question": prompt, "answer": text, "metadata": meta} for text in texts_of(answer)]
        raw = max(_finite(float(scorer.score_answer(final_answer, entry)), "reasoning-gym's scorer returned") for entry in entries)
        return float(raw >= threshold), {"raw": raw}

    return verify


def _function(path: str) -> Verifier:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        if module_name.endswith(".py"):
            raise ValueError(f"path: {path!r} names a file, and a module is imported by its name: {module_name[:-3]}:{name}") from None
        where = (
            "looked for in the current folder and on PYTHONPATH; it runs in a sandbox, to which reward.sandbox gives files and variables"
        )
        raise ValueError(f"path: cannot import module {module_name!r}: {type(error).__name__}: {error} ({where})") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"path: module {module_name!r} has no {'function' if function is not None else 'attribute'} {name!r}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"path: {path} is a coroutine function; an ordinary one is needed")
    style, passed = _keywords(function, path)

    def verify(prompt: str, response: str, answer: Answer, meta: dict[str, Any]) -> tuple[float, Parts]:
        arguments = (prompt, response, answer, meta)
        values: tuple[Any, ...] = arguments if style is OURS else (meta.get("data_source"), response, answer, meta.get("extra_info"))
        return read_return(function(**{name: value for name, value in zip(style, values, strict=True) if name in passed}))

    return verify


def _keywords(function: Callable[..., Any], path: str) -> tuple[tuple[str, ...], list[str]]:
    """Return our keywords or verl's, and those of them that the function takes. Raises ValueError if it requires any other."""
    parameters = inspect.signature(function).parameters.values()
    style = VERL if any(parameter.name == "solution_str" for parameter in parameters) else OURS
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    passed = [name for name in style if anything or any(parameter.name == name for parameter in parameters)]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY or (parameter.name not in passed and parameter.default is parameter.empty):
            keywords = f"{', '.join(OURS)} (or verl's {', '.join(VERL)})"
            raise ValueError(f"path: {path} asks for {parameter.name!r}, and is given the keywords {keywords}")
    return style, passed


def read_return(returned: Any, what: str = "the reward function returned") -> tuple[float, Parts]:
    """Read a reward function's return value as (value, parts): a number, or a dict with a number under `score` and parts in other keys.

    A number may come as a boolean, and as a scalar of numpy, torch and the like: whatever has `item()` and holds one element. Entries of
    the dict that are not finite numbers (such as verl's `pred`) are left out, except a text under `feedback`. Raises Abstained for None,
    and BadReturn, with a message that begins with `what`, for anything else.
    """
    if not isinstance(returned, dict):
        return _finite(returned, what), {}
    if "score" not in returned:
        raise BadReturn(f"{what} a dict without 'score' (keys: {', '.join(map(str, returned)) or 'none'})")
    value = _finite(returned["score"], f"{what} score")
    numbers = {str(name): _number(part) for name, part in returned.items() if name != "score"}
    parts: Parts = {name: part for name, part in numbers.items() if math.isfinite(part)}
    text = returned.get(FEEDBACK)
    return value, parts | ({FEEDBACK: text[:MAX_FEEDBACK]} if isinstance(text, str) else {})


def _finite(value: Any, what: str) -> float:
    if value is None:
        raise Abstained(f"{what} None")
    number = _number(value)
    if not math.isfinite(number) and isinstance(value, Rational):  # of so many digits that Python may refuse to show them
        raise BadReturn(f"{what} a number beyond the limit of {LARGEST:g}")
    if not math.isfinite(number):
        raise BadReturn(f"{what} {value!r:.80} ({type(value).__name__}), not a finite number")
    if abs(number) > LARGEST:
        raise BadReturn(f"{what} {number:g}, beyond the limit of {LARGEST:g}")
    return number


def _number(value: Any) -> float:
    """Return `value` as a float; NaN if it is not a number."""
    if not isinstance(value, Real) and callable(item := getattr(value, "item", None)):
        try:
            value = math.nan if getattr(value, "mask", False) else item()  # numpy.ma.masked.item() is 0.0
        except Exception:  # several elements, or none
            return math.nan
    try:
        return float(value) if isinstance(value, Real | Decimal) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.inf
