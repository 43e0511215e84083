"""Triton without a GPU: its interpreter runs the programs of a kernel in numpy, one after the other; its compiler compiles for any GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DIRECTORY = Path(sys.prefix) / "triton"  # where tests/run.sh installs it: apart, since vLLM and Megatron use it wherever they find it


def present() -> bool:
    """Whether this environment has Triton, in the usual place or apart."""
    return importlib.util.find_spec("triton") is not None or (DIRECTORY / "hashes").exists()


def fused_kernels(*, interpret: bool = True) -> Any:
    """`megarl.parallel.logprobs_fused`, in a process that has not imported Triton yet.

    Args:
        interpret: its kernels run in the interpreter, on tensors of the CPU or of a simulated GPU; False: they are compiled.
    """
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    if importlib.util.find_spec("triton") is None:
        sys.path.append(str(DIRECTORY))
    if interpret:
        _mend_interpreter()
    from megarl.parallel import logprobs_fused

    return logprobs_fused


def _mend_interpreter() -> None:
    """It cuts off what it casts to bfloat16, where GPUs round to the nearest; and Triton 3.6's takes int([3]), which numpy 2.5 does not."""
    from triton.runtime import interpreter

    interpreter._convert_float = _convert
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_lang_tensor


def _convert(x: Any, source: Any, target: Any, rounding: Any) -> Any:
    """The bits of x in bfloat16, to which it is rounded, or in float32."""
    import torch

    assert {source.name, target.name} == {"fp32", "bf16"}
    if target.name == "fp32":
        return torch.from_numpy(x.view("int16")).view(torch.bfloat16).float().numpy().view("uint32")
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view("uint16")


class AbsentGpu:
    """Triton's driver of a GPU that is not there: what is launched is compiled, and goes nowhere.

    Args:
        architecture: of the GPU: 90 for sm_90.
    """

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture
        properties = {"max_shared_mem": 1 << 16}
        self.utils = SimpleNamespace(load_binary=lambda *_: (None, None, 0, 0, 1024), get_device_properties=lambda _: properties)

    def get_current_device(self) -> int:
        return self._architecture  # Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> None:
        """There is none."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *_: None


def use_compiler(cache: Path) -> None:
    """This process compiles, and keeps what it has compiled in a directory."""
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    fused_kernels(interpret=False)


def compiled(architecture: int, dtype_name: str, entropy: bool) -> dict[str, tuple[str, str]]:
    """What the kernels become if they are called as in training, after `use_compiler`: of each the PTX and what ptxas says.

    Args:
        architecture: as of `AbsentGpu`.
        dtype_name: of the logits.
        entropy: with a gradient of the entropy.
    """
    import torch
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.runtime import driver

    from megarl.parallel import logprobs_fused as kernels

    driver.set_active(AbsentGpu(architecture))
    logits_RV, row_T = torch.zeros(3, 32_000, dtype=getattr(torch, dtype_name)), torch.tensor([2, 0])
    found = {}
    for kernel in (kernels._sums, kernels._gradient):
        kernel.device_caches.clear()
    for columns, values_T in ((31_999, torch.zeros(5)[1:3]), (32_000, torch.zeros(2))):  # each kernel is compiled once, even so
        kernels.local_sums(logits_RV, row_T, columns, 0.7)
        kernels.write_gradient(logits_RV, logits_RV, row_T, columns, 0.7, values_T, values_T, values_T if entropy else None)
    for kernel in (kernels._sums, kernels._gradient):
        [binary] = kernel.device_caches[architecture][0].values()
        command = [
            get_ptxas(architecture).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(architecture)}",
            "-o",
            os.devnull,
            "/dev/stdin",
        ]
        said = subprocess.run(command, input=binary.asm["ptx"], capture_output=True, text=True, check=True).stderr
        found[kernel.fn.__name__] = binary.asm["ptx"], said
    return found
