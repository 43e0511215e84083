"""A GPU that is not there: tensors that say they are on cuda:0, computed by the CPU, and refused where CUDA would refuse them.

CUDA takes no operation between a GPU's tensor and the CPU's, but for copies, CPU scalars and CPU indices. So code that runs here mixes no
devices, and it is what runs on GPUs: Megatron's sources as they are, without the CPU's hook. What no such pretence shows: CUDA's own
kernels, streams, memory and NCCL.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megarl.parallel.cpu.hook import _CpuStandIn, without_kernels

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
OWN = "pretend"  # a kind of device that autograd serves
COPIES = {"_to_copy", "copy_"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}  # these take the CPU's indices
_tensor = torch.tensor


class Pretender(torch.Tensor):
    """A tensor of the CPU's that says it is on cuda:0."""

    _held: Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretender:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(OWN, 0),
        )

    def __init__(self, held: Tensor) -> None:
        self._held = held

    @property  # type: ignore[override]
    def data(self) -> Pretender:
        return Pretender(self._held.detach())

    @data.setter
    def data(self, value: Pretender) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # its size
        self._held = value._held

    def tolist(self) -> Any:
        return self._held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def type(self, kind: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return super().type().replace(OWN, "cuda") if kind is None else self.to(kind)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._held.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """There is one stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class Pretence(TorchDispatchMode):
    """While it is entered, what is made for "cuda" is a `Pretender`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def install() -> None:
    """Gives this process a GPU. Before megatron is imported."""
    without_kernels()
    import torch._dynamo  # which looks at torch's own functions of CUDA when it is first imported

    _setup_privateuseone_for_python_backend(OWN)
    torch.autograd.set_multithreading_enabled(False).__enter__()
    stand_in = _CpuStandIn("cuda")
    own = ("Stream", "Event", "stream", "synchronize", "empty_cache", "set_device", "nvtx", "get_rng_state", "set_rng_state", "manual_seed")
    given = {name: getattr(stand_in, name) for name in (*own, "random", "current_stream", "default_stream", "device_count")}
    given |= {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": lambda: CUDA,  # a number would be the index of an accelerator that torch knows
        **{name: lambda *_: 0 for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")},
        "get_device_name": lambda *_: "a pretended GPU",
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "default_generators": {CUDA: torch.default_generator},
    }
    for name, value in given.items():
        setattr(torch.cuda, name, value)
    torch.tensor = _made  # type: ignore[assignment]  # it and `cuda` reach for the device past what a mode sees
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self.to(CUDA)  # type: ignore[method-assign]
    Pretence().__enter__()
    try:
        torch.ones(2, device=CUDA) + torch.ones(2)
    except RuntimeError:
        return
    raise AssertionError("devices can be mixed: the pretence shows nothing")


def _made(data: Any, *, device: Any = None, **given: Any) -> Tensor:
    made = _tensor(tree_map(lambda value: value.item() if isinstance(value, Pretender) else value, data), **given)
    return made if device is None else made.to(CUDA if torch.device(device).type == "cuda" else device)


def _attention(q: Any, k: Any, v: Any, attn_mask: Any, is_causal: bool, scale: float, enable_gqa: bool) -> Tensor:
    """The CPU's kernel, where CUDA has a fast one: for grouped heads that is flash attention, of 16 bits and without masks."""
    assert not enable_gqa or (attn_mask is None and q.dtype == torch.bfloat16), "CUDA would keep all scores in memory"
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    return out


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on what is held; raises as CUDA does where devices are mixed."""
    name = func._opname
    kwargs.pop("pin_memory", None)
    leaves, form = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    here = [tensor for tensor in given if isinstance(tensor, Pretender)]
    if here and name not in COPIES:
        free = tree_leaves(args[1]) if name in INDEXED and isinstance(args[0], Pretender) else []
        mixed = [tensor for tensor in given if not isinstance(tensor, Pretender) and tensor.ndim and not any(tensor is one for one in free)]
        if mixed:
            raise RuntimeError(f"{func}: expected all tensors on one device: {[(tuple(tensor.shape), tensor.device) for tensor in given]}")
    plain, named = tree_unflatten(map(_bare, leaves), form)
    out = func(*plain, **named)
    device = kwargs.get("device")
    if device is not None:
        gpu = torch.device(device).type in ("cuda", OWN)
    else:
        gpu = isinstance(given[0], Pretender) if name in COPIES else bool(here)
    known = {id(tensor._held): tensor for tensor in here}  # what was changed in place

    def wrapped(leaf: Any) -> Any:
        return known[id(leaf)] if id(leaf) in known else Pretender(leaf) if gpu and isinstance(leaf, Tensor) else leaf

    return wrapped(out) if isinstance(out, Tensor) else tree_map(wrapped, out)


def _bare(value: Any) -> Any:
    if isinstance(value, Pretender):
        return value._held
    return CPU if isinstance(value, torch.device) and value.type in ("cuda", OWN) else value
