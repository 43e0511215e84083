"""What the ranks of the pool do in the tests of distributed checkpoints."""

import io
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from megarl.checkpoints.steps import SavedStep, verify
from megarl.config import CheckpointSettings, ModelSettings, OptimizerSettings
from megarl.errors import SaveError
from megarl.host.shared_memory import mapped
from megarl.models.description import ModelDescription
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.checkpoint.barrier import SaveBarrier
from megarl.parallel.checkpoint.load import load, load_random
from megarl.parallel.checkpoint.rolling import RollingCopy, restore
from megarl.parallel.checkpoint.save import Saver
from megarl.parallel.checkpoint.sharded import model_state, tensors
from megarl.parallel.checkpoint.state import ModelState
from megarl.parallel.export import print_of_base
from megarl.parallel.grid import Grid
from megarl.parallel.optimizer import Trainable, make_trainable
from tests.distributed.tiny_training import Job, Report, build, learn


@dataclass(frozen=True)
class Resumed:
    """What one rank did after it loaded."""

    exact: bool
    report: Report
    random: list[float]  # drawn from torch and numpy after the load


def settings(**changes: object) -> CheckpointSettings:
    return CheckpointSettings.model_validate({"keep_last": 100, "asynchronous": False, **changes})


def verified(path: Path) -> SavedStep:
    entry = verify(path, contents=False)
    assert entry.saved is not None, entry.faults
    return entry.saved


def state_of(grid: Grid, policy: Trainable, job: Job) -> ModelState:
    """What a checkpoint is of."""
    model, lora = job.description, None
    if job.lora is not None:
        lora = {**job.lora.model_dump(include={"rank", "alpha", "targets"}), "base": print_of_base(policy.chunks, model, grid)}
    return ModelState(policy.chunks, model, policy, lora=lora)


def train_and_save(grid: Grid, job: Job, root: Path) -> Resumed:
    """Trains, saves as step `job.steps`, and goes on for as many steps while that is written."""
    policy = build(grid, job)
    learn(grid, policy, job)
    saver = Saver(root, grid, settings(asynchronous=True))
    saver.save(job.steps, {"policy": state_of(grid, policy, job)}, {"note.json": b"{}"})
    drawn = draw()
    report = learn(grid, policy, job)
    saver.wait()
    return Resumed(True, report, drawn)


def resume(grid: Grid, job: Job, step: Path, root: Path | None = None) -> Resumed:
    """Loads a step into a fresh model, saves it again as it is, then trains."""
    policy = build(grid, job)
    part = {"policy": state_of(grid, policy, job)}
    torch.manual_seed(99)
    np.random.seed(99)
    load(verified(step), part, grid)
    exact = load_random(verified(step), grid)
    if root is not None:
        Saver(root, grid, settings()).save(policy.steps, part, {})
    drawn = draw()
    return Resumed(exact, learn(grid, policy, job), drawn)


def resume_from_memory(grid: Grid, job: Job, step: Path) -> Resumed:
    """Loads a step, copies it into memory, and goes on from there in a fresh model."""
    states = [state_of(grid, policy, job) for policy in (build(grid, job), build(grid, job))]
    load(verified(step), {"policy": states[0]}, grid)
    load_random(verified(step), grid)
    copy = RollingCopy(grid)
    copy.write(1, 0, {"policy": states[1]})  # of a model that knows nothing, and stays where it is
    place = copy.write(2, 1, {"policy": states[0]})
    torch.manual_seed(99)
    np.random.seed(99)
    restore(mapped(*place), {"policy": states[1]}, grid)
    drawn = draw()
    assert states[1].trainable is not None
    return Resumed(True, learn(grid, states[1].trainable, job), drawn)


def draw() -> list[float]:
    """A number from each of the random states that a rank has."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = float(torch.rand(()))
    return [float(torch.rand(())), float(np.random.normal()), random.random(), forked]


def beside_extra_states(grid: Grid, job: Job) -> tuple[int, int]:
    """How many tensors a checkpoint has of a model, without and with states that are named as Transformer Engine's grouped layers name
    theirs: one for each expert, a number behind all names but the first (megatron/core/extensions/transformer_engine.py:2563)."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    policy = build(grid, job)
    plain = len(tensors(model_state(policy.chunks, grid)))
    bare = policy.chunks[0].module
    described = bare.sharded_state_dict

    def with_extra_states(**options: Any) -> dict[str, Any]:
        states = {f"x._extra_state{n or ''}": ShardedObject("x._extra_state", io.BytesIO(), (3,), (n,)) for n in range(3)}
        return {**described(**options), **states}

    bare.sharded_state_dict = with_extra_states
    return plain, len(tensors(model_state(policy.chunks, grid)))


def plain_tensors(grid: Grid, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved model, whole, as Megatron's own loader reads it."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    found = load_plain_tensors(str(folder))
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def all_equal(grid: Grid, one: Path, other: Path) -> bool:
    """Whether two step directories hold the same policy and critic, bit for bit."""
    for model in ("policy", "critic"):
        mine, theirs = plain_tensors(grid, one / model), plain_tensors(grid, other / model)
        if mine.keys() != theirs.keys() or not all(torch.equal(tensor, theirs[key]) for key, tensor in mine.items()):
            return False
    return True


def build_part(grid: Grid, path: Path, head: Literal["lm", "value"] = "lm", trained: bool = True) -> ModelState:
    """A model with the weights that it is built with, scrambled by a seed of its own so that a load shows."""
    model = ModelDescription.read(path)
    config = transformer_config(model, ModelSettings(path=path, dtype="float32"), grid.layout, choose())
    chunks = build_chunks(config, model, choose(), grad=trained, head=head)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(0.5)
    trainable = make_trainable(chunks, OptimizerSettings(lr=1e-3), total_steps=10) if trained else None
    return ModelState(trainable.chunks if trainable is not None else chunks, model, trainable)


def save_several(grid: Grid, path: Path, root: Path) -> None:
    """A policy and a critic with optimizers and a frozen reference in one step, behind the caller's back and in small pieces."""
    policy = build(grid, Job(path))
    critic = build_part(grid, path, "value")
    reference = build_part(grid, path, trained=False)
    parts = {"policy": ModelState(policy.chunks, critic.description, policy), "critic": critic, "reference": reference}
    saver = Saver(root, grid, settings(asynchronous=True, staging_mb=1))
    saver.save(1, parts, {"trainer.json": b'{"cursor": 7}'})
    saver.save(2, parts, {})
    saver.wait()


def load_alone(grid: Grid, path: Path, step: Path, name: str, head: Literal["lm", "value"], root: Path | None = None) -> None:
    """Loads one model of a step without an optimizer; with `root` saves it there."""
    part = build_part(grid, path, head, trained=False)
    load(verified(step), {name: part}, grid)
    if root is not None:
        Saver(root, grid, settings()).save(1, {name: part}, {})


def load_trained(grid: Grid, path: Path, step: Path, name: str) -> None:
    """Asks for a model with its optimizer."""
    load(verified(step), {name: build_part(grid, path)}, grid)


def stale(grid: Grid, path: Path, step: Path, file: str) -> None:
    """Loads a step of which a file changes after it was verified."""
    good = verified(step)
    data = bytearray((step / file).read_bytes())
    data[len(data) // 2] ^= 1
    dist.barrier()
    (step / file).write_bytes(data)
    load(good, {"policy": build_part(grid, path, trained=False)}, grid)


def save_into(grid: Grid, path: Path, root: Path) -> str:
    """What a save into a directory that cannot be written to says."""
    saver = Saver(root, grid, settings())
    try:
        saver.save(1, {"policy": build_part(grid, path, trained=False)}, {})
    except SaveError as error:
        return str(error)
    return "saved"


def wait_for_a_rank_that_never_writes(grid: Grid) -> str:
    """What rank 0 says when rank 1 of two does not tell what it wrote."""
    meeting = SaveBarrier(replace(grid, world=2), Path("nowhere"), 0, "save.timeout_s=0.2")
    meeting.report("{}")
    try:
        meeting.reports(0.2)
    except SaveError as error:
        return str(error)
    return "saved"


def die_in_a_save(grid: Grid, path: Path, root: Path) -> None:
    """Saves step 1, and is killed when the first file of step 2 is there."""
    part = {"policy": build_part(grid, path)}
    saver = Saver(root, grid, settings(asynchronous=True))
    saver.save(1, part, {})
    saver.wait()

    def kill() -> None:
        while not list(root.glob("step_000002*/policy/*")):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    saver.save(2, part, {})
    saver.wait()
    time.sleep(60)
