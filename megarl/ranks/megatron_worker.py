"""One model rank as a Ray actor: rendezvous, grid, and checkpoints of the models that it trains."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray

from megarl.checkpoints.files import Content
from megarl.checkpoints.steps import SavedStep
from megarl.cluster.machine import capability_here
from megarl.cluster.on_node import live_nodes
from megarl.config import (
    CheckpointSettings,
    ClusterSettings,
    Layout,
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    RunSettings,
    TrainConfig,
)
from megarl.host.shared_memory import mapped
from megarl.imports import gc_paused
from megarl.lazy_torch import Tensor, torch
from megarl.observe.output import keep_output

if TYPE_CHECKING:
    from megarl.parallel.checkpoint.rolling import RollingCopy
    from megarl.parallel.checkpoint.save import Saver
    from megarl.parallel.checkpoint.state import ModelState
    from megarl.ranks.model import Model

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class RankSettings:
    """What the ranks of a group need of the run's configuration, whatever they optimise."""

    directory: Path  # the run's
    seed: int
    model: ModelSettings
    cluster: ClusterSettings
    layout: Layout  # the group's
    hands_over_memory: bool  # engines open the memory of this process (`cuda_ipc`)
    offloads: bool  # an optimizer of the run is in host memory

    @classmethod
    def of(cls, config: RunSettings, layout: Layout) -> RankSettings:
        """The settings of the ranks of a group with this layout."""
        hands_over_memory = isinstance(config, TrainConfig) and config.sync.transport == "cuda_ipc"
        offloads = any(settings.offloaded for settings in config.optimizers.values())
        return cls(config.directory, config.seed, config.model, config.cluster, layout, hands_over_memory, offloads)


class MegatronWorker:
    """One process of a group of ranks that together hold models. Each method is called on all ranks of the group at once.

    Args:
        rank: its rank in the group.
        settings: the group's settings.
    """

    _saver: Saver | None = None
    _rolling: RollingCopy | None = None
    _blank = False

    def __init__(self, rank: int, settings: RankSettings, group: str = "") -> None:
        """`group` distinguishes the logs of a group other than the policy's; it is empty for the policy's own."""
        os.environ.update(rank_environment(settings))  # before torch is imported
        keep_output(settings.directory, f"{group} rank {rank}".strip())
        self._rank, self._settings = rank, settings
        torch.set_num_threads(threads(settings))

    def devices(self) -> list[str]:
        """The GPUs that Ray has assigned to this process."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def listen(self) -> tuple[str, int]:
        """Open the rendezvous of the ranks, on rank 0, and return its address."""
        from megarl.sync.store import listen_store

        self._store, port = listen_store(self._host, self._settings.layout.ranks, self._settings.cluster.start_timeout_s)
        return self._host, port

    @property
    def _host(self) -> str:
        """The address at which other processes of the session reach this one."""
        return "127.0.0.1" if self._settings.cluster.interface is None else str(ray.util.get_node_ip_address())

    def build(self, address: tuple[str, int], blank: bool = False) -> str | None:
        """Join the grid, then build the models of this kind of rank.

        Args:
            address: the address that `listen` returned.
            blank: the trained models get no weights yet; `load` or `restore` is called before anything else.

        Returns:
            What the user should know about the choice of hardware backend; None: nothing.
        """
        self._blank = blank
        # Megatron warns of deliberate choices of the backend (no Transformer Engine or apex on CPU) and calls deprecated torch functions.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        with gc_paused():
            from megarl.parallel import backend

            cluster, exact = self._settings.cluster, self._settings.model.dtype == "float32"
            self._backend = backend.choose(cluster.gpus, cluster.deterministic, exact)  # before anything imports megatron
            from megarl.parallel import grid
            from megarl.ranks import model  # noqa: F401  # what `_model` will need
            from megarl.sync.store import connect_store

        layout, seed = self._settings.layout, self._settings.seed
        store = self._store if self._rank == 0 else connect_store(*address, layout.ranks, cluster.start_timeout_s)
        self._grid = grid.init_grid(layout, rank=self._rank, store=store, seed=seed, timeout_s=cluster.phase_timeout_s)
        self.build_models()
        return self._backend.note

    def build_models(self) -> None:
        """Build the models on the grid; `build` calls this."""
        raise NotImplementedError

    def trained(self) -> Mapping[str, ModelState]:
        """The trained models with their optimizers, by name."""
        raise NotImplementedError

    def checkpoint(self, root: Path, step: int, settings: CheckpointSettings, extra: dict[str, Content]) -> None:
        """Save the trained models and their optimizers; return as soon as they may change again.

        Args:
            root: the directory of the steps; it and `settings` are read in the first call only.
            step: the step's number.
            settings: the section `save`.
            extra: further files of the step, by name, given on rank 0.

        Raises:
            SaveError: the previous save failed, or this one has already failed.
        """
        from megarl.parallel.checkpoint.save import Saver

        if self._saver is None:
            self._saver = Saver(root, self._grid, settings)
        self._saver.save(step, self.trained(), extra)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is written. Raise SaveError if it failed."""
        if self._saver is not None:
            self._saver.wait()

    def load(self, steps: Mapping[str, SavedStep]) -> None:
        """Load the trained models, their optimizers and this process's random states from the step directories."""
        from megarl.parallel.checkpoint.load import load, load_random

        models = self.trained()
        for path in dict.fromkeys(steps[name].path for name in models):
            inside = {name: model for name, model in models.items() if steps[name].path == path}
            load(steps[next(iter(inside))], inside, self._grid)
        load_random(steps[next(iter(models))], self._grid)

    def node(self) -> str:
        """Ray's id of the node that this process is on."""
        return str(ray.get_runtime_context().get_node_id())

    def copy(self, copy_store: Any, group: str, step: int, last: int) -> None:
        """Copy the trained models, their optimizers and the random states into memory that this machine's `CopyStore` then holds.

        Args:
            copy_store: the `CopyStore` of this machine.
            group: the name of this rank's group.
            step: the step's number.
            last: the previously copied step; older copies are overwritten.

        Raises:
            OSError: there is no room.
        """
        from megarl.parallel.checkpoint.rolling import RollingCopy

        if self._rolling is None:
            self._rolling = RollingCopy(self._grid)
        ray.get(copy_store.forget.remote((group, self._rank), last))
        path, size = self._rolling.write(step, last, self.trained())
        ray.get(copy_store.keep.remote((group, self._rank), step, path, size))

    def restore(self, copy_store: Any, group: str, step: int) -> None:
        """Go back to a step that an earlier process of this rank has copied.

        Args:
            copy_store: the `CopyStore` of this machine.
            group: the name of this rank's group.
            step: the step to go back to.
        """
        from megarl.parallel.checkpoint.rolling import restore

        path, size = ray.get(copy_store.place.remote((group, self._rank), step))
        restore(mapped(path, size), self.trained(), self._grid)

    def _model(
        self,
        path: Path,
        head: Literal["lm", "value"] = "lm",
        optimizer: OptimizerSettings | None = None,
        updates: int = 0,
        lora: LoraSettings | None = None,
    ) -> Model:
        """Build this rank's part of a model: trained for `updates` steps if there is an `optimizer`, else frozen; `lora`: has adapters."""
        from megarl.ranks.model import Model

        place = (self._settings.model, self._settings.layout, self._backend, self._grid)
        blank = self._blank and optimizer is not None
        return Model(path, *place, head=head, optimizer=optimizer, updates=updates, blank=blank, lora=lora)

    @property
    def _reports_tokens(self) -> bool:
        """Whether this is the one rank of its tensor-parallel group that reports its tokens: tensor-parallel rank 0 of the last stage."""
        return self._grid.is_last_stage and self._grid.tp_rank == 0

    def _sum_over(self, value: Tensor) -> Tensor:
        """Sum over the context-parallel ranks, which share the sequences of a micro-batch."""
        from megarl.parallel.collectives import summed

        return summed(value, self._grid.groups.cp)

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        """Sum over the data-parallel ranks, which share the step's sequences."""
        from megarl.parallel.collectives import summed

        return summed(value, self._grid.groups.dp)


def rank_environment(settings: RankSettings) -> dict[str, str]:
    """The environment variables that a rank's process must set before it imports torch, on GPUs. Variables that the user has set are kept.

    torch's allocator uses expandable segments, which fragment less, except with `cuda_ipc`, where another process opens the memory.

    With tensor or context parallelism, CUDA starts kernels in the order in which they are launched: Megatron launches a collective before
    the product that is to hide it (layers.py:621-653). Its own command line insists on it below compute capability 10, unless expert
    communication is to be overlapped as well, which wants the opposite (megatron-core 0.19.2, training/arguments.py:1413-1439).
    """
    if not settings.cluster.gpus:
        return {}
    variables, layout = {}, settings.layout
    if not settings.hands_over_memory and not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", ALLOCATOR)):
        variables[ALLOCATOR] = "expandable_segments:True"
    overlaps = (layout.tp > 1 or layout.cp > 1) and not settings.model.megatron.get("overlap_moe_expert_parallel_comm")
    if overlaps and CONNECTIONS not in os.environ and (capability_here() or (9, 0)) < (10, 0):
        variables[CONNECTIONS] = "1"
    return variables


def threads(settings: RankSettings) -> int:
    """The number of torch's threads in a rank: OMP_NUM_THREADS, at most the number of cores; 1 (as Ray sets it) if it is not a number.

    With optimizers in host memory, it is at least the rank's GPU's share of the node's cores.
    """
    text, cores = os.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    wished = max(1, min(int(text), cores)) if text.isdecimal() and len(text) < 9 else 1
    if not settings.offloads:
        return wished
    here = ray.get_runtime_context().get_node_id()
    return max(wished, int(cores // live_nodes()[here]["Resources"]["GPU"]))
