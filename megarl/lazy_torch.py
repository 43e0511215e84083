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
            self._name, self._module = name, None

        def __getattr__(self, name: str) -> Any:
            if self._module is None:
                self._module = importlib.import_module(self._name)
            return getattr(self._module, name)

    torch, F = _Lazy("torch"), _Lazy("torch.nn.functional")
    Tensor = Any  # in annotations alone

__all__ = ["F", "Tensor", "torch"]
