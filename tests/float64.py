"""A model in float64, though its code asks for float32 here and there: what is left of a difference is none of rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Wide(TorchFunctionMode):
    """Takes float64 for float32 in every call of torch."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, given: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is Tensor.view:  # of a file's bytes
            return function(*given, **(named or {}))
        if function is Tensor.float:
            function = Tensor.double
        return function(*map(_wider, given), **{name: _wider(value) for name, value in (named or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Let models that are built in the block, and run there, have parameters and activations of float64 alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)
