"""torch for modules that the driver and its checks need too: imported on first use, since the import takes seconds."""

import importlib
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megarl.imports import gc_paused

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import functional as F
else:

    class _Lazy:
        """Stand in for a module, which is imported when an attribute is first read."""

        def __init__(self, name: str) -> None:
            self._name, self._module = name, None

        def __getattr__(self, name: str) -> Any:
            if self._module is None:
                self._module = _import(self._name)
            return getattr(self._module, name)

    torch, F = _Lazy("torch"), _Lazy("torch.nn.functional")
    Tensor = Any  # used in annotations only


def _import(name: str) -> ModuleType:
    with gc_paused():
        return importlib.import_module(name)


def import_meanwhile() -> None:
    """Start importing torch in a thread, for a process that will use it once others have started."""
    Thread(target=_import, args=("torch",)).start()


__all__ = ["F", "Tensor", "import_meanwhile", "torch"]
