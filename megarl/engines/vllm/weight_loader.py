"""Load new weights into the model of a vLLM worker, bucket by bucket, by vLLM's layerwise reload; each tensor must arrive exactly once.

`start` -> `load_buckets`, once or several times -> `finish`. After any failure the worker refuses to continue until the next `start`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, _get_weight_loader

from megarl.engines.vllm.draft import DraftLayers
from megarl.engines.vllm.expert_loader import ExpertLoader, Stored, expert_names
from megarl.models.hf import Checkpoint
from megarl.models.weight_map import FP8
from megarl.sync.quantize import as_expected
from megarl.sync.receive import BucketReceiver, Inventory, WeightError
from megarl.sync.wire import Header, Rendezvous, TensorName, each
from megarl.upstream.expect import expect


class WeightLoader:
    """Reloads the model of one worker, and the model with which it drafts, if it does."""

    def __init__(self, model: Any, vllm_config: Any, device: torch.device, draft: Any = None) -> None:
        self._model, self._draft, self._config, self._device = model, draft, vllm_config, device
        self._own = None if draft is None else DraftLayers(draft, model)
        self._parts: list[nn.Module] = [model] if self._own is None else [model, self._own]
        self._experts = [ExpertLoader(model)] if draft is None else [ExpertLoader(model), ExpertLoader(draft)]
        self._buckets = BucketReceiver(device, self._experts[0].own)  # an engine that drafts has one worker, which holds all experts
        self._received = _Received()
        self._inventory: Inventory | None = None  # of the update under way; None after a failure
        self._begun = False  # vLLM may have buffered tensors
        self._kernels: list[tuple[UnquantizedFusedMoEMethod, Any]] = []  # those that vLLM makes anew in an update

    def connect(self, meetings: Sequence[Rendezvous], rank: int) -> None:
        """Join each sender's broadcast group as `rank`."""
        self._received = _Received()
        self._buckets.connect(meetings, rank)

    def start(self, expected: Mapping[str, tuple[Sequence[int], str]]) -> None:
        """Begin an update that must bring exactly the expected tensors: (shape, dtype) by name.

        Raises WeightError if one of them is not expected in the fp8 in which vLLM holds it: vLLM would convert it without a scale.
        """
        for name in (name for part in self._parts for name in fp8_names(part)):
            if name in expected and expected[name][1] != FP8:
                raise WeightError(f"{name}: the engine holds it in {FP8}, and the trainer would send {expected[name][1]}")
        self.abandon()
        self._begun = True
        with set_current_vllm_config(self._config):
            self._kernels = []
            for part in self._parts:
                if self._device.type == "cpu":
                    self._kernels += reset_moe_kernels(part)
                _name_partial_loaders(part)
                initialize_layerwise_reload(part)
        self._inventory = Inventory(expected)

    def abandon(self) -> None:
        """If an update has stopped midway, drop what vLLM has buffered. The model can run, with weights of which some are arbitrary."""
        if self._begun:
            with set_current_vllm_config(self._config):
                for part in self._parts:
                    finalize_layerwise_reload(part, self._config.model_config)
            for method, kernel in self._kernels:
                method.moe_kernel = method.moe_kernel or kernel
            self._inventory, self._begun = None, False

    def load_buckets(self, headers: Sequence[Header]) -> None:
        """Receive buckets, one of each sender, and load them. Raises WeightError naming a tensor that does not fit."""
        # Received before any check: the trainer is already sending.
        tensors = self._buckets.receive_stacks(headers, read_at_once=self._is_of_experts)
        self._load(headers, tensors)

    def _is_of_experts(self, name: TensorName) -> bool:
        return any(experts.holds(name) for experts in self._experts)

    def receive(self, headers: Sequence[Header]) -> None:
        """Begin to receive buckets into host memory, in a thread, while the model runs; `received` comes before the next call."""
        self._received.add(headers, lambda: list(self._buckets.receive_stacks(headers, torch.device("cpu"))))

    def received(self) -> bool:
        """Whether the buckets of the last `receive` are there. Raises what receiving them raised."""
        return self._received.there()

    def load_received(self) -> None:
        """Load all that has been received since the last update, as `load_buckets` does."""
        headers, tensors = self._received.take()
        self._load(headers, ((name, tensor.to(self._device)) for name, tensor in tensors))

    def _load(self, headers: Sequence[Header], tensors: Iterable[tuple[TensorName, Tensor]]) -> None:
        inventory, self._inventory = self._inventory, None  # which stays so if this fails
        if inventory is None:
            raise WeightError(f"{headers[0].first}: came outside of an update, or after it failed")
        for header in headers:
            for name, shape, dtype in zip(header.names, header.shapes, header.dtypes, strict=True):
                inventory.take_all(name, shape, dtype)
        self._put(tensors)
        self._inventory = inventory

    def read(self, directory: Path, expected: Mapping[str, tuple[Sequence[int], str]], drop_images: bool) -> None:
        """Load a Hugging Face directory as an update would bring it: quantised where that is expected.

        Args:
            directory: the directory.
            expected: as of `start`.
            drop_images: as of `inventory`.
        """
        self.start(expected)
        inventory, self._inventory = self._inventory, None
        assert inventory is not None
        with Checkpoint(directory, predictors=self._draft is not None, drop_images=drop_images) as checkpoint:
            stored = ((name, checkpoint.read(name).to(self._device)) for name in expected if name in checkpoint.tensors)
            for name, tensor in as_expected(stored, expected):
                inventory.take_all(name, tensor.shape, str(tensor.dtype).removeprefix("torch."))
                self._put([(name, tensor)])
        self._inventory = inventory
        self.finish()

    def _put(self, tensors: Iterable[tuple[TensorName, Tensor]]) -> None:
        """Put tensors into the model's layers."""
        with set_current_vllm_config(self._config):
            rest = (
                one
                for name, tensor in tensors
                if not any(experts.load(name, tensor) for experts in self._experts)
                for one in each(name, tensor)
            )
            if self._own is not None:
                others = list(rest)
                if drafts := [one for one in others if one[0].startswith(self._own.prefix)]:
                    self._draft.load_weights(iter(drafts))
                names = {name for name, _ in drafts}
                rest = (one for one in others if one[0] not in names)
            # vLLM keeps views of the tensors until their layer is complete: their memory must not be reused.
            if (first := next(rest, None)) is not None:
                self._model.load_weights(chain([first], rest))

    def finish(self) -> None:
        """Finish the update. Raises WeightError naming a tensor that has not arrived."""
        if self._inventory is None:
            raise WeightError("finish: no update has been started, or it failed")
        self._inventory.complete()
        with set_current_vllm_config(self._config):
            for part in self._parts:
                finalize_layerwise_reload(part, self._config.model_config)
            if self._device.type == "cpu":
                repack_tied_output(self._model)
        self._inventory, self._begun = None, False


class _Received:
    """Buckets that have come beside the model's work, and wait in host memory."""

    def __init__(self) -> None:
        self._headers: list[Header] = []
        self._coming: list[Future[list[tuple[TensorName, Tensor]]]] = []

    def add(self, headers: Sequence[Header], receive: Callable[[], list[tuple[TensorName, Tensor]]]) -> None:
        coming: Future[list[tuple[TensorName, Tensor]]] = Future()
        self._headers += headers
        self._coming.append(coming)

        def work() -> None:
            try:
                coming.set_result(receive())
            except Exception as error:
                coming.set_exception(error)

        Thread(target=work, daemon=True).start()

    def there(self) -> bool:
        last = self._coming[-1]
        return last.done() and last.result() is not None

    def take(self) -> tuple[list[Header], list[tuple[TensorName, Tensor]]]:
        headers, tensors = self._headers, [one for coming in self._coming for one in coming.result()]
        self._headers, self._coming = [], []
        return headers, tensors


def fp8_names(model: nn.Module) -> Iterator[str]:
    """Yield the Hugging Face names of the matrices that a model holds in block-wise fp8."""
    packed = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, Fp8LinearMethod):
            parent, _, leaf = path.rpartition(".")
            yield from (f"{parent}.{name}.weight" for name in packed.get(leaf, [leaf]))
        elif isinstance(method, Fp8MoEMethod):
            yield from (name for names in expert_names(path, layer, Stored()) for name in names)


def reset_moe_kernels(model: nn.Module) -> list[tuple[UnquantizedFusedMoEMethod, Any]]:
    """Make vLLM pack reloaded experts again; return the kernels of before.

    vLLM 0.30.0 skips `fused_experts.process_weights_after_loading`, the CPU packing, once `moe_kernel` exists
    (vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py:156, `if not is_weight_update`), so that a reload silently
    copies unpacked weights into the packed buffer. Without a kernel it takes the path of the first load.
    Raises WeightError if vLLM's code there has changed: this workaround must then be reviewed.
    """
    source = inspect.getsource(UnquantizedFusedMoEMethod._setup_kernel)
    guard = source.find("if not is_weight_update:")
    if "is_weight_update = self.moe_kernel is not None" not in source or not 0 < guard < source.find(
        "fused_experts.process_weights_after_loading"
    ):
        raise WeightError("vLLM's UnquantizedFusedMoEMethod._setup_kernel is not that of 0.30.0: look at the mend of its CPU reload again")
    methods = [
        method for module in model.modules() if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)
    ]
    kernels = [(method, method.moe_kernel) for method in methods]
    for method in methods:
        method.moe_kernel = None
    return kernels


def _name_partial_loaders(model: nn.Module) -> None:
    """Give loaders of parameters that are `functools.partial`s (MiniMax-M2's norms) a name.

    vLLM 0.30.0's reload recognises the loaders that it has wrapped by their names
    (vllm/model_executor/model_loader/reload/layerwise.py:145), and a partial has none.
    """
    expect(_get_weight_loader, 'return getattr(tensor, "weight_loader", default_weight_loader)')
    expect(_get_original_loader, 'while loader.__name__ == "online_process_loader":')
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def repack_tied_output(model: nn.Module) -> None:
    """Pack the output layer again if it shares the embedding table.

    On CPU the layer multiplies with a packed copy of the table (vllm/model_executor/layers/utils.py:452), and vLLM 0.30.0's reload packs
    only layers that were themselves loaded (vllm/model_executor/model_loader/reload/layerwise.py:257, "No weights were loaded").
    """
    tables = {
        id(layer.weight) for layer in model.modules() if isinstance(layer, VocabParallelEmbedding) and type(layer) is not ParallelLMHead
    }
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in tables:
            layer.quant_method.process_weights_after_loading(layer)
