"""The engine's side of a weight update, run inside a vLLM worker: buckets in, vLLM's layerwise reload, nothing missing, nothing twice.

`start` -> `receive` for each bucket -> `finish`. Any failure leaves the worker refusing to go on until the next `start`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megarl.sync.wire import Header, Rendezvous, broadcast, join, map_shared, open_cuda, unpack


class WeightError(ValueError):
    """A weight stream does not fit the model; the message names the tensor."""


class Inventory:
    """What must come in one update: every tensor once, in its shape and dtype. Knows nothing of vLLM."""

    def __init__(self, expected: Mapping[str, tuple[Sequence[int], str]]) -> None:
        self._expected = {name: (list(shape), dtype) for name, (shape, dtype) in expected.items()}
        self._seen: set[str] = set()

    def take(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Ticks one tensor off. Raises WeightError where it is unknown, came before, or has another shape or dtype."""
        if name not in self._expected:
            raise WeightError(f"{name}: the engine's model has no such tensor")
        if name in self._seen:
            raise WeightError(f"{name}: came twice in one update")
        known_shape, known_dtype = self._expected[name]
        if list(shape) != known_shape:
            raise WeightError(f"{name}: came with shape {list(shape)}, and the engine's model has {known_shape}")
        if dtype != known_dtype:
            raise WeightError(f"{name}: came as {dtype}, and the engine's model has {known_dtype}")
        self._seen.add(name)

    def complete(self) -> None:
        """Raises WeightError naming what has not come."""
        missing = [name for name in self._expected if name not in self._seen]
        if missing:
            raise WeightError(f"{missing[0]}: did not come ({len(missing)} of {len(self._expected)} tensors missing)")


class Receiver:
    """Takes the buckets of one worker and reloads its model."""

    def __init__(self, model: Any, vllm_config: Any, device: torch.device) -> None:
        self._model, self._config, self._device = model, vllm_config, device
        self._inventory: Inventory | None = None
        self._group: Any = None  # ProcessGroupGloo or ProcessGroupNCCL
        self._store: Any = None

    def connect(self, rendezvous: Rendezvous, rank: int) -> None:
        """Joins the trainer's broadcast group as `rank` (the trainer is 0). Blocks until all have joined or the time is over."""
        timeout = timedelta(seconds=rendezvous.timeout_s)
        self._store = dist.TCPStore(rendezvous.host, rendezvous.port, None, False, timeout, wait_for_workers=False)
        self._group = join(rendezvous, self._store, rank)

    def start(self, expected: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """Begins an update that must bring exactly these tensors: (shape, dtype) by name."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with self._context():
            if self._inventory is not None:  # the last update failed midway: drop what vLLM has buffered of it
                finalize_layerwise_reload(self._model, self._config.model_config)
            if self._device.type == "cpu":
                reset_moe_kernels(self._model)
            initialize_layerwise_reload(self._model)
        self._inventory = Inventory(expected)

    def receive(self, header: Header) -> None:
        """Takes one bucket. Raises WeightError naming a tensor that does not fit."""
        bytes_B = self._bytes(header)  # even where a tensor is refused: the other end is sending
        self.load(unpack(bytes_B, header))

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Loads (name, tensor) pairs. vLLM keeps views of them until their layer is complete, so their memory must not be reused."""
        if self._inventory is None:
            raise WeightError(f"{tensors[0][0] if tensors else 'an empty bucket'}: came outside of an update")
        for name, tensor in tensors:
            self._inventory.take(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
        with self._context():
            self._model.load_weights(iter(tensors))

    def finish(self) -> None:
        """Ends the update. Raises WeightError naming a tensor that has not come."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._inventory is None:
            raise WeightError("finish: no update has been started")
        self._inventory.complete()
        with self._context():
            finalize_layerwise_reload(self._model, self._config.model_config)
            if self._device.type == "cpu":
                repack_tied_output(self._model)
        self._inventory = None

    def close(self) -> None:
        """Leaves the broadcast group."""
        self._group = self._store = None

    def _bytes(self, header: Header) -> Tensor:
        """The bucket in memory of this worker's own: vLLM keeps views of it, and the sender uses a shared buffer again."""
        if header.path is not None:
            return map_shared(header.path, header.nbytes).clone()
        if header.handle is not None:
            bytes_B = open_cuda(header.handle, self._device.index).clone()
            torch.accelerator.synchronize(self._device)
            return bytes_B
        if self._group is None:
            raise WeightError(f"{header.names[0]}: came before this worker joined the trainer's group")
        bytes_B = torch.empty(header.nbytes, dtype=torch.uint8, device=self._device)
        broadcast(self._group, bytes_B).wait()
        return bytes_B

    def _context(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)


def reset_moe_kernels(model: nn.Module) -> None:
    """Makes vLLM pack reloaded experts again.

    vLLM 0.30.0 skips `fused_experts.process_weights_after_loading`, the CPU packing, once `moe_kernel` exists
    (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:156, `if not is_weight_update`), so that a reload copies
    unpacked weights into the packed buffer and says nothing. Without a kernel it takes the path of the first load.
    Raises WeightError where vLLM has changed there: then this mend needs a new look.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    source = inspect.getsource(UnquantizedFusedMoEMethod._setup_kernel)
    guard = source.find("if not is_weight_update:")
    if "is_weight_update = self.moe_kernel is not None" not in source or not 0 < guard < source.find(
        "fused_experts.process_weights_after_loading"
    ):
        raise WeightError("vLLM's UnquantizedFusedMoEMethod._setup_kernel is not that of 0.30.0: look at the mend of its CPU reload again")
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_tied_output(model: nn.Module) -> None:
    """Packs the output layer again where it shares the embedding table.

    On CPU it multiplies with a packed copy of the table (vllm/model_executor/layers/utils.py:452), and vLLM 0.30.0's reload packs only
    layers that were themselves loaded (vllm/model_executor/model_loader/reload/layerwise.py:257, "No weights were loaded").
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    tables = {
        id(layer.weight) for layer in model.modules() if isinstance(layer, VocabParallelEmbedding) and type(layer) is not ParallelLMHead
    }
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in tables:
            layer.quant_method.process_weights_after_loading(layer)
