"""The functions that vLLM's processes begin with: vLLM's own, in processes that end with their parent and listen on one address only.

vLLM hands its new processes a function by its name, so that this also holds for those that inherit nothing from their parent.
"""

import ctypes
import multiprocessing
import os
import signal
from typing import Any

import vllm.distributed.utils
from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.multiproc_executor import WorkerProc

from megarl.engines.vllm import delta_states, gpt_oss, images, latent_norms, mamba
from megarl.sync.store import bind_stores
from megarl.upstream.expect import expect

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_run_coordinator, _run_core, _run_worker = DPCoordinatorProc.run_coordinator, EngineCoreProc.run_engine_core, WorkerProc.worker_main


def install() -> None:
    """Let vLLM begin its processes with the functions of this file."""
    expect(DPCoordinator.__init__, "target=DPCoordinatorProc.run_coordinator")
    expect(CoreEngineProcManager.__init__, "target=EngineCoreProc.run_engine_core")
    expect(WorkerProc.make_worker_process, "target=WorkerProc.worker_main")
    DPCoordinatorProc.run_coordinator = staticmethod(run_coordinator)
    EngineCoreProc.run_engine_core = staticmethod(run_core)
    WorkerProc.worker_main = staticmethod(run_worker)


def run_coordinator(*arguments: Any, **named: Any) -> None:
    """Coordinate the data-parallel ranks of an engine."""
    _enter()
    _run_coordinator(*arguments, **named)


def run_core(*arguments: Any, **named: Any) -> None:
    """Schedule the requests of one data-parallel rank."""
    _enter()
    _mend_models(named["vllm_config"])
    _run_core(*arguments, **named)


def run_worker(*arguments: Any, **named: Any) -> None:
    """Compute on one device of several."""
    _enter()
    _mend_models(named["vllm_config"])
    _run_worker(*arguments, **named)


def _mend_models(config: Any) -> None:
    latent_norms.install()
    gpt_oss.install()
    images.install(config.model_config)
    mamba.install()
    delta_states.install()


def _enter() -> None:
    die_with_parent()
    bind_stores(vllm.distributed.utils)
    install()


def die_with_parent() -> None:
    """Let the kernel kill this process as soon as its parent ends.

    vLLM's workers watch a pipe to the engine's process, but one that waits for its GPU does not notice when it closes.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "an engine's core, its coordinator and its workers run in processes of their own"
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent.pid:  # the parent died before the signal was set
        os.kill(os.getpid(), signal.SIGKILL)
