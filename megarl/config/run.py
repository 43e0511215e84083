"""The settings that all runs have: a name, a directory, a model on ranks, checkpoints, a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from megarl.config.model import Layout, ModelSettings, OptimizerSettings
from megarl.config.section import Megabytes, Place, Seconds, Section, Seed
from megarl.text.paths import nameable

MINUTES = 30.0  # between two saves, by default: what a killed run loses at most, beside the step in progress


class CheckpointSettings(Section):
    """Distributed checkpoints (`megarl.checkpoints`), from which a run resumes exactly."""

    every: NonNegativeInt = 0
    """Steps between two saves; 0: none by steps. A run that is stopped early (a signal, an alarm, a lost reward server) always saves."""
    every_minutes: Annotated[float, Field(ge=0, le=525_600)] | None = None
    """Minutes between two saves, each at the end of a step; 0: none by time. null: 30 where `every` is 0, else 0."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Also keep the checkpoint of every step divisible by this; 0: no others."""
    asynchronous: bool = True
    """Write in the background, while the next steps run."""
    staging_mb: Megabytes = 8192
    """Host memory per rank for tensors waiting to be written; beyond that, the save waits."""
    timeout_s: Seconds | None = None
    """Time limit of a save, from its beginning until it is on disk; null: half of cluster.phase_timeout_s. It may not be more, since
    a phase must outlast the save that it waits for."""
    on_failure: Literal["stop", "continue"] = "stop"
    """If a save fails: end the run, or raise an alarm and continue."""
    rolling: Literal["off", "local", "peer"] = "off"
    """After every step, copy each rank's state into the memory of its machine (peer: and of the next one), so that a restart inside the run
    loses only the current step. Keeps the last two steps, so it takes memory for two copies (peer: four)."""
    resume: bool = True
    """Resume from the run's newest intact checkpoint; false: move any earlier run of this name aside, and start over."""

    @property
    def minutes(self) -> float:
        """Minutes between two saves; 0: none by time."""
        return (0.0 if self.every else MINUTES) if self.every_minutes is None else self.every_minutes

    def limit_s(self, phase_timeout_s: float) -> float:
        """Return the time limit of a save. `phase_timeout_s`: that of the phase that waits for it."""
        return phase_timeout_s / 2 if self.timeout_s is None else self.timeout_s


class ClusterSettings(Section):
    """Ray, GPUs, memory, network and time limits."""

    address: str | None = None
    """Address of an existing Ray cluster; null: start one on this machine."""
    allocation: Place | None = None
    """The directory of a Slurm job (set by `megarl slurm`), whose nodes then make up the cluster, with this machine as its head."""
    interface: str | None = None
    """Network interface of the sockets between machines; null: keep every listening socket on loopback (one machine)."""
    gpus: bool = True
    """One GPU for every model rank and every engine rank; false: run everything on the CPU."""
    gpu_memory_gb: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Memory of each GPU, such as 80 for an H100; a check then refuses a run that does not fit according to `megarl plan`. null: not
    checked."""
    gpus_per_node: Annotated[int, Field(gt=0, le=1024)] | None = None
    """GPUs of each node, from which a plan counts a node's host memory and which GPUs are linked. null: 8, or 4 of a GB200."""
    host_memory_gb: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Host memory of each node; with gpu_memory_gb, a check then also refuses a run that exceeds it. null: not checked."""
    deterministic: bool = False
    """GPUs: use only deterministic algorithms, as far as torch, Transformer Engine and vLLM have them; slower. CPUs always do so."""
    object_store_mb: Annotated[int, Field(ge=80, le=1 << 30)] = 200
    """Size of Ray's object store on each node, reserved at the start; Ray itself needs 75 MB. It holds a step's responses, and with
    routing.replay=r3 their experts."""
    start_timeout_s: Seconds = 900.0
    """Time limit for Ray, ranks and engines to start; on GPUs, an engine compiles for minutes at its first start."""
    phase_timeout_s: Seconds = 3600.0
    """Time limit of any one phase."""
    stall_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    """How long a process of the run may be stopped (SIGSTOP, a debugger), or a machine may not answer, before it counts as lost."""
    restarts: NonNegativeInt = 3
    """How many times a day engines or ranks that died, hang or lost their node are restarted inside the run; after that, or with 0, the
    run ends."""

    @model_validator(mode="after")
    def _reachable(self) -> ClusterSettings:
        if self.address is not None and self.allocation is not None:
            raise ValueError(f"cluster.allocation={self.allocation}: has its own session; leave out cluster.address={self.address}")
        if self.host_memory_gb is not None and self.gpu_memory_gb is None:
            raise ValueError(f"cluster.host_memory_gb={self.host_memory_gb:g}: needs cluster.gpu_memory_gb, which is not set")
        if self.address is not None and self.interface is None:
            raise ValueError(f"cluster.interface: required with cluster.address={self.address}, whose machines must reach each other")
        return self


Label = Annotated[str, Field(min_length=1, max_length=128)]
"""A name or tag in a tracker; W&B refuses longer ones."""


class LogSettings(Section):
    """What a run records besides metrics.jsonl, and where it is reported."""

    tensorboard: bool = True
    """Write TensorBoard files into the run's directory."""
    trackers: list[Literal["wandb", "mlflow"]] = []
    """Also report to these: Weights & Biases, MLflow. Each shows one run, however often it is started."""
    project: Label = "megarl"
    """The trackers' project (MLflow: experiment)."""
    entity: Label | None = None
    """Weights & Biases: the user or team that owns the project; null: the default entity of the API key."""
    group: Label | None = None
    """Weights & Biases: the group of runs to which this one belongs; MLflow: a tag of that name."""
    tags: list[Label] = []
    """Tags of the run in the trackers."""
    notes: str | None = None
    """A description of the run in the trackers."""
    samples: NonNegativeInt = 8
    """Responses of each step to keep for reading (`megarl samples`), besides all of each evaluation, and whether the start
    shows a row of the data; 0: none of these."""

    @model_validator(mode="after")
    def _shown_somewhere(self) -> LogSettings:
        for key in ("project", "entity", "group", "tags", "notes"):
            value = getattr(self, key)
            if not self.trackers and value != type(self).model_fields[key].default:
                raise ValueError(f"log.{key}={value}: log.trackers names no tracker that would show it")
        if self.entity is not None and "wandb" not in self.trackers:
            raise ValueError(f"log.entity={self.entity}: only Weights & Biases has entities, and log.trackers does not name wandb")
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"log.trackers={self.trackers}: names a tracker twice")
        return self


class RunSettings(Section):
    """The settings that all stages have."""

    leaves: ClassVar[tuple[str, ...]] = ()  # files that the stage itself writes into the run's directory

    name: Annotated[str, Field(pattern=r"^\w[\w.\-]*(/\w[\w.\-]*)*$"), AfterValidator(lambda name: str(nameable(Path(name))))]
    """The run's directory, as a path below run_dir."""
    run_dir: Place = Path("runs")
    """The directory that contains all runs."""
    seed: Seed = 1
    """Seed of everything random, except in data sources with their own seeds."""
    model: ModelSettings
    """The model to train, evaluate or serve."""
    layout: Layout = Layout()
    """How the model is divided among its ranks (`megarl eval` and `megarl pairs` have none)."""
    cluster: ClusterSettings = ClusterSettings()
    """Ray, GPUs, memory, network and time limits."""
    log: LogSettings = LogSettings()
    """What is recorded, and where the metrics go."""

    @property
    def verb(self) -> str:
        """The verb of the run, after which its settings are named."""
        return type(self).__name__.removesuffix("Config").lower()

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self.run_dir / self.name

    @property
    def total_steps(self) -> int:
        """The total number of steps of the run; 0: it takes none."""
        return 0

    @property
    def optimizers(self) -> dict[str, OptimizerSettings]:
        """The run's optimizers, by their keys."""
        return {}


class TrainingSettings(RunSettings):
    """The settings that all stages that train have in addition."""

    save: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""

    @property
    def steps_key(self) -> str | None:
        """The key of the number of steps, which may grow when the run resumes; None if no such key may."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _a_phase_outlasts_a_save(self) -> TrainingSettings:
        phase_s = self.cluster.phase_timeout_s
        if (limit_s := self.save.limit_s(phase_s)) > phase_s / 2:
            raise ValueError(f"save.timeout_s={limit_s:g}: more than half of cluster.phase_timeout_s={phase_s:g}")
        return self
