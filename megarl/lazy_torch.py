"""torch for modules that a configuration and its checks need too: imported when something of it is first used, which takes seconds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
else:

    class _Lazy:
        """Stands for a module."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module(self._name), name)

    torch, F = _Lazy("torch"), _Lazy("torch.nn.functional")
    Tensor = Any  # in annotations alone

__all__ = ["F", "Tensor", "torch"]
