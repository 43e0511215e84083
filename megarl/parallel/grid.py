"""The process grid: the only place that starts torch.distributed and Megatron's parallel state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.host.network import choose_nccl_interface, interface_towards
from megarl.parallel.backend import choose

if TYPE_CHECKING:
    from megarl.config import Layout

FAULTS = (dist.DistError, torch.AcceleratorError)  # errors of a connection or a device: a new process may succeed


@dataclass(frozen=True)
class Groups:
    """The process groups of this rank. `control` spans all ranks and carries small CPU tensors (gloo on every backend)."""

    control: dist.ProcessGroup
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup  # without context parallelism
    dp_cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    etp: dist.ProcessGroup
    edp: dist.ProcessGroup  # replicas of the same experts


@dataclass(frozen=True)
class Grid:
    """This rank's place in the process grid. Ranks are numbered with tp varying fastest, then cp, then dp, then pp."""

    layout: Layout
    rank: int
    world: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    etp_rank: int
    groups: Groups
    store: dist.Store
    timeout_s: float

    @property
    def leads_stage(self) -> bool:
        """Whether this rank is the first of its pipeline stage."""
        return self.rank == self.pp_rank * (self.world // self.layout.pp)

    @property
    def leads_experts(self) -> bool:
        """Whether this rank is the first of its pipeline stage that has its experts."""
        return self.etp_rank == 0 and self.groups.edp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the end of the model (with vpp, in its last chunk)."""
        return self.pp_rank == self.layout.pp - 1

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Guard a collective over all ranks: if it fails, the error names the ranks that entered it fewer times than this one."""
        count = self.store.add(f"together/{what}/{self.rank}", 1)
        try:
            yield
        except RuntimeError as error:
            late = [rank for rank in range(self.world) if self.store.add(f"together/{what}/{rank}", 0) < count]
            raise RuntimeError(f"{what} failed on rank {self.rank}; ranks that did not arrive: {late or 'none'}: {error}") from error


def init_grid(layout: Layout, *, rank: int, store: dist.Store, seed: int, timeout_s: float) -> Grid:
    """Join `layout.ranks` processes into one grid. Collective.

    Listening sockets are bound to the address through which this process reaches the store: loopback if the store is on loopback.

    Args:
        layout: how many processes there are, and the size of each kind of parallelism.
        rank: this process's rank, from 0.
        store: where the processes meet: `listen_store`'s on one of them, `connect_store`'s on the others (or a PrefixStore of it).
        seed: seed of Megatron's random states; the same on all ranks.
        timeout_s: time limit of every wait in here and in later collectives.

    Returns:
        This rank's place in the grid, and its process groups.

    Raises:
        ConfigError: the installed Megatron-core is not the supported release.
        RuntimeError: no network interface has the address from which the store is reached.
    """
    backend = choose()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    os.environ["GLOO_SOCKET_IFNAME"] = interface = interface_towards(_host(store))
    choose_nccl_interface(interface)
    timeout = timedelta(seconds=timeout_s)
    with backend.few_groups():
        dist.init_process_group(backend.collective, store=store, rank=rank, world_size=layout.ranks, timeout=timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=timeout_s / 60,
            create_gloo_process_groups=False,
        )
    model_parallel_cuda_manual_seed(seed)
    control = dist.group.WORLD if backend.collective == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    assert control is not None
    return _describe(layout, store, timeout_s, control)


def _describe(layout: Layout, store: dist.Store, timeout_s: float, control: dist.ProcessGroup) -> Grid:
    from megatron.core import parallel_state as state

    groups = Groups(
        control=control,
        tp=state.get_tensor_model_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        dp=state.get_data_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
        ep=state.get_expert_model_parallel_group(),
        etp=state.get_expert_tensor_parallel_group(),
        edp=state.get_expert_data_parallel_group(),
    )
    return Grid(
        layout=layout,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tp_rank=groups.tp.rank(),
        pp_rank=groups.pp.rank(),
        cp_rank=groups.cp.rank(),
        cp_size=groups.cp.size(),
        dp_rank=groups.dp.rank(),
        dp_size=groups.dp.size(),
        ep_rank=groups.ep.rank(),
        etp_rank=groups.etp.rank(),
        groups=groups,
        store=store,
        timeout_s=timeout_s,
    )


def destroy_grid() -> None:
    """Leave the grid: Megatron's parallel state and every process group.

    The groups' threads and sockets end with the last reference to them. The `Grid` and every model built on it hold some; a model that was
    dropped is freed by Python's cycle collector.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    parallel_state.destroy_model_parallel()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None  # not reset by the call above (parallel_state.py:2506)
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()  # rotary_pos_embedding.py:177 caches by `self`, which keeps modules and their groups alive
    dist.destroy_process_group()


def _host(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore), f"the grid meets at a TCPStore, not at a {type(store).__name__}"
    return store.host
