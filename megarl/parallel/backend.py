"""The hardware, chosen once: CUDA with NCCL and Transformer Engine (or without it), or the CPU with gloo and Megatron's local modules.

New hardware takes one more class here and a line in `choose`. Code elsewhere calls the backend and never asks which one it is.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import resource
import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megarl.errors import ConfigError, Unfit
from megarl.host.parking import file_buffer
from megarl.host.shell import FULL_PRECISION, differing
from megarl.parallel import upstream
from megarl.parallel.cpu import hook
from megarl.text.display import one_line

if TYPE_CHECKING:
    from megarl.parallel.logprobs import LogprobKernels

MEGATRON = "0.19.2"  # the only release whose bugs and semantics this package knows
# From the first version, below the second. Megatron-core bounds none; 0.19.2 is developed with 2.18 (pyproject.toml:235 of its sources).
TRANSFORMER_ENGINE = ((2, 18), (2, 19))
# cuBLAS and Transformer Engine read these when they are first used. NCCL's own choice of algorithm would depend on measurements. The other
# NCCL settings are those of vLLM's deterministic engines (vllm/model_executor/determinism/batch_invariant.py:1147): the engines and the
# sending ranks form one communicator, whose ranks must agree.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_LAUNCH_MODE": "GROUP",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MIN_NCHANNELS": "1",
    "NCCL_NTHREADS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_NET_DISABLE": "1",
    "NCCL_PROTO": "Simple",
    "NCCL_SOCKET_NTHREADS": "1",
}
UNUSED = "flashinfer"  # Megatron's inference would import it, and it writes into the home directory
GPU_PACKAGES = ("transformer_engine", "apex")  # Megatron uses them wherever it finds them
ROOM = 256 << 20  # bytes: the most that cuBLAS needs for a small product
TAKEN = ("out of memory", "busy or unavailable")  # CUDA's errors for a GPU that other processes are using
LOCAL = "Megatron's local ones with torch's attention"


class Backend(ABC):
    """One kind of hardware; an instance is ready to run Megatron."""

    collective: Literal["nccl", "gloo"]  # backend of the process groups that carry tensors
    device: torch.device
    fused: bool  # layers use Transformer Engine's fused kernels; otherwise they are Megatron's local ones with torch's attention
    unequal_heads = False  # the attention prefers values as narrow as they are (`upstream._unpadded_values`)
    linear_attention_kernels = False  # gated delta nets have the kernels of flash-linear-attention
    mamba_kernels = False  # Mamba layers have those of mamba_ssm and causal_conv1d
    torch_attention = False  # fused layers use torch's attention (`attention.PackedAttention`) instead of Transformer Engine's
    note: str | None = None  # what the user should know about the choice
    name: str | None = None  # CUDA's name of the GPU

    @property
    def transformer_overrides(self) -> dict[str, Any]:
        """The TransformerConfig fields that follow from the hardware."""
        return {
            "moe_grouped_gemm": self.fused,
            "moe_permute_fusion": self.fused,
            "apply_rope_fusion": self.fused,
            "bias_dropout_fusion": self.fused,
            "bias_activation_fusion": self.fused,
            "masked_softmax_fusion": False,  # belongs to the unfused attention, which neither spec uses
            # Transformer Engine's layers add weight gradients up in the buffers, in float32 (`build.sum_in_buffers`). Otherwise those of
            # each micro-batch are first rounded to the model's dtype. Megatron's own layers would need apex's CUDA extension.
            "gradient_accumulation_fusion": self.fused,
        }

    def layer_spec(self, config: Any, vp_stage: int | None = None, *, adapted: bool = False) -> Any:
        """Megatron's block spec (TransformerBlockSubmodules) for the layers that this rank builds for the given virtual stage.

        Args:
            config: the model's configuration.
            vp_stage: the virtual stage.
            adapted: linear layers are to have adapters.
        """
        from megarl.parallel import spec

        if self.fused:
            return spec.transformer_engine(config, vp_stage, self.torch_attention, self.delta_net, adapted=adapted)
        return spec.local(config, vp_stage, self.delta_net)

    @property
    def delta_net(self) -> type:
        """The module of gated delta nets: with the kernels of flash-linear-attention, or with torch's operations in their place."""
        from megarl.parallel import delta_net

        return delta_net.DeltaNet if self.linear_attention_kernels else delta_net.TorchDeltaNet

    def keep_blocks(self, spec: Any, kinds: str) -> None:
        """Let each layer of a block spec have the one part that its kind says, with a Mamba mixer in the place of some layers' attention.

        Args:
            spec: the block's spec, which is edited.
            kinds: the kinds of its layers (`Sizes.blocks`).
        """
        from megarl.parallel import mamba
        from megarl.parallel.spec import one_block

        mixer = mamba.Mamba if self.mamba_kernels else mamba.TorchMamba
        spec.layer_specs = [one_block(layer, kind, mixer, fused=self.fused) for layer, kind in zip(spec.layer_specs, kinds, strict=True)]

    def put_sparse_attention(self, layer: Any, indexer: Any, rope: Any) -> None:
        """Let a layer's latent attention, in its ModuleSpec, attend to the keys that an indexer chooses.

        Args:
            layer: the layer's ModuleSpec, which is edited.
            indexer: the indexer's sizes.
            rope: the model's rotary embedding.
        """
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megarl.parallel.sparse_attention import SparseAttention

        parts = layer.submodules.self_attention.submodules
        parts.core_attention = ModuleSpec(SparseAttention, params={"indexer": indexer, "rope": rope})
        if self.fused:  # the indexer reads the normalised queries, which a norm inside the projection would keep to itself
            from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

            parts.q_layernorm, parts.linear_q_up_proj = TENorm, TEColumnParallelLinear

    @property
    def norm(self) -> type:
        """The module of a norm that stands by itself."""
        if not self.fused:
            from megarl.parallel.spec import RMSNorm

            return RMSNorm
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm

    @property
    def column_parallel_linear(self) -> type:
        """The module of a linear layer whose rows tensor parallelism splits, without a norm."""
        if not self.fused:
            from megatron.core.tensor_parallel.layers import ColumnParallelLinear

            return ColumnParallelLinear
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        return TEColumnParallelLinear

    @property
    def replicated_linear(self) -> type:
        """The linear module that keeps its whole weight on every tensor-parallel rank, for model families that need one."""
        if not self.fused:
            from megarl.parallel.spec import ReplicatedLinear

            return ReplicatedLinear
        from megatron.core.extensions.transformer_engine import TELinear

        return TELinear

    @property
    def all_heads_norms(self) -> tuple[type, type]:
        """The norms of queries and of keys over all heads together, for model families that have them."""
        from megarl.parallel.heads_norm import AllKeysNorm, AllQueriesNorm

        return AllQueriesNorm, AllKeysNorm

    @property
    @abstractmethod
    def logprob_kernels(self) -> LogprobKernels:
        """The module that computes log-probs, entropies and their gradients from this rank's logits."""

    def fuse_optimizer(self, optimizer: Any) -> None:
        """Make Megatron's optimizer update each parameter in one kernel. Transformer Engine's and apex's Adam do so anyway.

        Without them Megatron creates a plain torch AdamW, which launches a dozen kernels (optimizer/__init__.py:554).
        """
        if self.fused:
            return
        for part in optimizer.chained_optimizers:
            for group in part.optimizer.param_groups if part.optimizer is not None else []:
                group["fused"] = True

    def few_groups(self) -> AbstractContextManager[None]:
        """A context manager for creating the grid's process groups, which keeps their number low where each one is costly."""
        return nullcontext()

    @abstractmethod
    def staging_buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate uninitialised host memory that the device can copy into quickly."""

    @abstractmethod
    def parking_buffer(self, size: int) -> Tensor:
        """Allocate `size` bytes outside the device's memory, as uint8."""

    @abstractmethod
    def peak_memory_gb(self) -> dict[str, float]:
        """This process's peak memory on the device so far, in GB of 10^9 bytes: "allocated", and on a GPU also "reserved"."""

    @abstractmethod
    def random_state(self) -> Tensor:
        """The device's random state."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Set the device's random state."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the work queued on the device."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Return cached device memory to the driver."""


class Cuda(Backend):
    """One NVIDIA GPU, which becomes this process's current device.

    Args:
        deterministic: use only algorithms whose results are reproducible bit for bit.
        exact: compute float32 in full precision, without Transformer Engine, which would multiply in TF32.
    """

    collective = "nccl"

    def __init__(self, deterministic: bool = False, exact: bool = False) -> None:
        _hide(UNUSED)
        self.fused = not exact and has_transformer_engine()
        if not self.fused:  # the layers of Transformer Engine ask for TF32 themselves, where it is enough (`upstream._router_gemm_of_te`)
            os.environ.update(FULL_PRECISION)
        for name in differing(FULL_PRECISION):
            del os.environ[name]
        torch.set_float32_matmul_precision("highest")  # where the shell has had torch begin with another
        if not self.fused:
            slower = f"Transformer Engine is not installed, the layers are {LOCAL}, which are slower"
            self.note = f"GPU: the layers of float32 are {LOCAL}" if exact else f"GPU: {slower}"
            _hide(*GPU_PACKAGES)
            # Megatron compiles some functions (megatron/core/jit.py). Run eagerly, as on the CPU, they compute what they do there.
            torch.compiler.set_stance("force_eager")
        self._deterministic = deterministic
        if deterministic:
            os.environ.update(DETERMINISTIC)
            torch.use_deterministic_algorithms(True, warn_only=True)  # operations without such an algorithm warn by name
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)
        # cuDNN's attention, which torch prefers on Hopper and Blackwell, builds a plan for every new length and number of sequences
        # (torch 2.13, ATen/native/cudnn/MHA.cpp:198), and has no deterministic backward pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.linear_attention_kernels = self.fused and not deterministic and importlib.util.find_spec("fla") is not None
        packages = ("mamba_ssm", "causal_conv1d")
        self.mamba_kernels = self.fused and not deterministic and all(importlib.util.find_spec(name) is not None for name in packages)
        if self.fused:
            capability = torch.cuda.get_device_capability(self.device)
            self.torch_attention = deterministic or not attends_packed(capability)
            self.unequal_heads = not self.torch_attention and capability >= (9, 0)
            if self.torch_attention and not deterministic:
                self.note = f"GPU: attention is torch's; Transformer Engine's needs flash-attn for packed sequences on a {self.name}"

    @property
    def transformer_overrides(self) -> dict[str, Any]:
        own = {"deterministic_mode": True, "moe_permute_fusion": False} if self._deterministic else {}
        return super().transformer_overrides | own

    @property
    def logprob_kernels(self) -> LogprobKernels:
        from megarl.parallel import logprobs_fused  # which imports Triton: PyTorch's CUDA builds come with it

        return logprobs_fused

    def staging_buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def parking_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def peak_memory_gb(self) -> dict[str, float]:
        return {"allocated": torch.cuda.max_memory_allocated() / 1e9, "reserved": torch.cuda.max_memory_reserved() / 1e9}

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class Cpu(Backend):
    """The CPU: Megatron's sources are rewritten as they are imported, and patched where gloo or the CPU requires it."""

    collective, fused = "gloo", False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        # For GPU environments: nothing may find a GPU, and Megatron's optimizer would use Transformer Engine's or apex's kernels.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        _hide(UNUSED, *GPU_PACKAGES)
        hook.install()
        from megarl.parallel.cpu import patches

        patches.apply()

    def few_groups(self) -> AbstractContextManager[None]:
        from megarl.parallel.cpu import groups

        return groups.few_groups()

    @property
    def logprob_kernels(self) -> LogprobKernels:
        from megarl.parallel import logprobs_chunked

        return logprobs_chunked

    def staging_buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def parking_buffer(self, size: int) -> Tensor:
        return file_buffer(size)  # the CPU's memory is the device's memory here

    def peak_memory_gb(self) -> dict[str, float]:
        return {"allocated": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Do nothing: the CPU queues no work."""

    def empty_cache(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # the C library keeps freed memory between blocks in use


_chosen: Backend | None = None


def choose(gpus: bool | None = None, deterministic: bool = False, exact: bool = False) -> Backend:
    """The backend of this process. Call it before anything imports megatron: it patches megatron, and on a CPU installs the import hook.

    Args:
        gpus: whether to run on a GPU; None: as the first call decided, or, in the first call, if there is a GPU.
        deterministic: only read by the first call: a GPU uses only algorithms whose results are reproducible bit for bit.
        exact: only read by the first call: a GPU computes float32 in full precision.

    Raises:
        ConfigError: Megatron-core is not the supported release, or a GPU is requested and torch or Transformer Engine is the wrong build.
        Unfit: a GPU is requested, and CUDA shows none or Transformer Engine does not load.
    """
    global _chosen
    if _chosen is None:
        release = importlib.metadata.version("megatron-core")
        if release != MEGATRON:
            raise ConfigError(f"megatron-core: megarl runs on {MEGATRON}, and {release} is installed")
        if gpus and not torch.cuda.is_available():
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise (ConfigError if torch.version.cuda is None else Unfit)(
                f"cluster.gpus=true: this process sees no CUDA device (torch {torch.__version__}, CUDA_VISIBLE_DEVICES: {shown}); "
                "bash tools/setup.sh --gpu installs the CUDA builds"
            )
        upstream.quiet()
        chosen = Cuda(deterministic, exact) if (torch.cuda.is_available() if gpus is None else gpus) else Cpu()
        upstream.apply(
            chosen.device,
            chosen.synchronize,
            transformer_engine=chosen.fused,
            unequal_heads=chosen.unequal_heads,
            linear_attention=chosen.linear_attention_kernels,
            mamba=chosen.mamba_kernels,
        )
        _chosen = chosen
    assert gpus is None or gpus == (_chosen.device.type == "cuda"), "a process has one backend"
    return _chosen


def touch_gpus(count: int) -> str | None:
    """Run small computations on each GPU, as ranks do before anything else. Call it in a process of its own: a faulty GPU may hang it.

    Args:
        count: how many GPUs there must be.

    Returns:
        What failed, or None; it begins with "GPU" if a GPU is to blame, and not what compiles its kernels. A GPU that other processes
        occupy at the moment, or whose memory they occupy, is not faulty.
    """
    if torch.version.cuda is None:
        return None  # `choose` refuses this build: no GPU is to blame
    try:
        has_transformer_engine()
    except Unfit as error:
        return str(error)
    except ConfigError:
        pass  # a wrong version is the same on all nodes, and no GPU is to blame
    for n in range(count):
        try:
            ones = torch.ones(64, 64, device=f"cuda:{n}")
            if torch.cuda.mem_get_info(n)[0] < ROOM:
                continue
            if (ones @ ones).sum().item() != 64**3:
                return f"GPU {n}: computes wrong"
            with torch.cuda.device(n):
                if (lack := _touch_with_triton(n)) is not None:
                    return lack
        except Exception as error:  # its type differs between torch releases
            if not any(text in str(error) for text in TAKEN):
                return f"GPU {n}: {one_line(str(error))}"
    return None


def _touch_with_triton(n: int) -> str | None:
    """Compile a kernel with Triton, as ranks and engines do, and run it on GPU `n`, the current device. Return what is wrong, or None."""
    try:
        kernel = importlib.import_module("megarl.parallel.touch")
    except (ImportError, OSError) as error:
        return f"Triton does not load ({one_line(str(error))}); bash tools/setup.sh --gpu installs it with torch's CUDA build"
    why: str | None = kernel.touch(f"cuda:{n}")
    return why


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed. Raises Unfit if it does not load, ConfigError if Megatron-core needs another version."""
    remedy = f"Megatron-core {MEGATRON} builds its GPU layers from it (bash tools/setup.sh --gpu; cluster.gpus=false does without)"
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # a missing CUDA library is an OSError
        raise Unfit(f"transformer-engine: does not load ({error}); {remedy}") from None
    if not TRANSFORMER_ENGINE[0] <= tuple(map(int, version.split(".")[:2])) < TRANSFORMER_ENGINE[1]:
        low, end = (".".join(map(str, bound)) for bound in TRANSFORMER_ENGINE)
        raise ConfigError(f"transformer-engine: {version} is installed, and it must be at least {low} and below {end}; {remedy}")
    return True


def attends_packed(capability: tuple[int, int]) -> bool:
    """Whether Transformer Engine has an attention over packed sequences ("thd") that keeps no scores, for a GPU of this compute capability.

    Its cuDNN backend takes them from 9.0 on (2.18, common/fused_attn/fused_attn.cpp:420), but on 12.0 not with the heads of multi-latent
    attention (dot_product_attention/utils.py:830). What remains without the package flash-attn keeps all scores, and refuses context
    parallelism. It remains, too, for two sizes of heads in training: above 128 on 10.0, except 192 with values of 128 (fused_attn.cpp:331;
    256 needs cuDNN 9.25), and on 9.0 unequal ones from 128 on, with the same exception (:351).

    No deterministic one is asked for. Below 9.0 and on 12.0 cuDNN's is switched off (utils.py:1467, fused_attn.cpp:528). On 9.0 its
    backward pass keeps dP for at least 32 sequences as long as the whole micro-batch (cudnn-frontend 1.31,
    scaled_dot_product_flash_attention.h:1804; common/fused_attn/utils.cu:519): 34 GB for 4,096 tokens and 32 heads. On 10.0 it is allowed
    since cuDNN 9.18.1 (fused_attn.cpp:487) along the same lines of cudnn-frontend; what it keeps there is not to be read.
    """
    try:
        return bool(importlib.metadata.version("flash-attn"))
    except importlib.metadata.PackageNotFoundError:
        return capability >= (9, 0) and capability != (12, 0)


def _hide(*packages: str) -> None:
    """Make imports of these packages fail from here on: Megatron uses whatever it finds."""
    for package in packages:
        sys.modules[package] = None  # type: ignore[assignment]  # Python's own marker for a module that cannot be imported
