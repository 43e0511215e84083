"""The random states of one rank, as tensors and JSON."""

import json
import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load, save
from torch import Tensor

from megarl.parallel.backend import choose

_TRACKER = "tracker."


def random_states() -> bytes:
    """The states of torch (CPU and device), Megatron's tracker, numpy and Python in this process, as a safetensors file."""
    version, words, gauss = random.getstate()
    _, keys, *numpy_rest = np.random.get_state()
    tensors: dict[str, Tensor] = {
        "torch": torch.get_rng_state(),
        "device": choose().random_state(),
        "python": torch.tensor(words),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        **{_TRACKER + name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    rest = json.dumps({"python": [version, gauss], "numpy": numpy_rest, "device": choose().device.type})
    return save(tensors, metadata={"rest": rest})


def restore_random_states(file: bytes) -> bool:
    """Set every state to the one in a file of `random_states`; the device's and the tracker's only if the device is of the same kind.

    Returns:
        Whether all states were restored.
    """
    tensors, rest = load(file), _metadata(file)
    same = rest["device"] == choose().device.type
    torch.set_rng_state(tensors["torch"])
    version, gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    np.random.set_state(("MT19937", tensors["numpy"].numpy().astype(np.uint32), *rest["numpy"]))
    if same:
        tracked = {name.removeprefix(_TRACKER): state for name, state in tensors.items() if name.startswith(_TRACKER)}
        choose().set_random_state(tensors["device"])
        get_cuda_rng_tracker().set_states(tracked)
    return same


def _metadata(file: bytes) -> Any:
    header = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    return json.loads(header["__metadata__"]["rest"])
