"""Measure, without a cluster, how costs grow with the size of the job: `python -m tools.bench_scale [--rounds 3]`.

Three jobs: Qwen3-30B-A3B on 32 ranks, Qwen3-235B-A22B on 256, DeepSeek-V3 on 1,024. Each part runs megarl's own code in one process, with
as many objects as the job has (tensors, responses, calls, files) but only a few bytes in each, so that it measures the cost of handling an
object. It prints CPU microseconds per object, the least of the rounds, which alternate between the jobs. A cost that grows faster than the
number of objects fails: at 1,024 ranks an object may cost no more than `GROWTH` times what it costs at 32.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import ray
import torch
from pyarrow import parquet

from megarl.checkpoints.files import FileRecord, write_file
from megarl.checkpoints.steps import MANIFEST, Manifest, SavedStep, encode, step_name, verify
from megarl.cluster.actor_group import ActorGroup
from megarl.config import FileSource, Layout, SourceFormat
from megarl.data.large import LargeFile
from megarl.data.sources import load_prompts
from megarl.driver.rank_group import dealt
from megarl.host.shared_memory import mapped
from megarl.models.hf_writer import ShardWriter
from megarl.parallel.checkpoint.dcp import write_metadata
from megarl.parallel.checkpoint.index import Location, Shard, read_index
from megarl.parallel.slices import STATES
from megarl.ranks.step_plan import StepPlan, split_step
from megarl.sync.fingerprint import Fingerprinter, compare
from megarl.sync.receive import Inventory
from megarl.sync.send import Sender
from megarl.sync.wire import Header, TensorName, unpack_stacks
from tests.published_models import MODELS, description_of
from tools.make_tiny_model import fast_tokenizer, train_sentencepiece

GROWTH = 2.0
WRITERS, PROMPT_TOKENS, CAPACITY = 2, 512, 16384  # files per rank for a model; tokens of a prompt; tokens of a micro-batch
PROMPTS = 512  # per step


class Job(NamedTuple):
    model: str
    ranks: int
    data_parallel: int
    responses: int  # per step
    rows: int  # of the prompt file


JOBS = [
    Job("Qwen3-30B-A3B", 32, 8, 4096, 200_000),
    Job("Qwen3-235B-A22B", 256, 16, 8192, 600_000),
    Job("DeepSeek-V3", 1024, 64, 16384, 1_800_000),
]


class Cost(NamedTuple):
    objects: int
    seconds: float  # CPU


def stacks(model: str) -> list[TensorName]:
    """Return the names of a model's tensors as they are exported, with the experts of a layer and kind together."""
    names, experts = list[TensorName](), dict[tuple[int | None, str, int], list[str]]()
    for weight in description_of(MODELS[model]).weights("lm"):
        for index, name in enumerate(weight.hf if not weight.alias else ()):
            if weight.expert is None:
                names.append(name)
            else:
                experts.setdefault((weight.layer, type(weight.op).__name__, index), []).append(name)
    return [*names, *experts.values()]


def sync(job: Job) -> Cost:
    """Measure an update in shared memory, from the stream to the comparison of fingerprints, with the engine's side except for vLLM."""
    names = stacks(job.model)
    stream = [(name, torch.ones(4, 4) if isinstance(name, str) else torch.ones(len(name), 4, 4)) for name in names]
    flat = [one for name in names for one in ([name] if isinstance(name, str) else name)]
    sent, received, inventory = Fingerprinter(), Fingerprinter(), Inventory(dict.fromkeys(flat, ([4, 4], "float32")))

    def announce(plain: dict[str, Any]) -> Callable[[], object]:
        header = Header.parse(plain)
        assert header.path is not None
        for name, tensor in unpack_stacks(mapped(header.path, header.nbytes), header):
            for one in [name] if isinstance(name, str) else name:
                inventory.take(one, tensor.shape[-2:], "float32")
            received.add(name, tensor)
        return lambda: None

    sender = Sender("shm", workers=1, host="", bucket_mb=1, timeout_s=60.0, device=torch.device("cpu"))
    begun = time.process_time()
    sender.send(stream, announce, sent.add)
    inventory.complete()
    assert compare(sent.digest(), {name: [one] for name, one in received.digest().items()}) == []
    seconds = time.process_time() - begun
    sender.close()
    return Cost(len(flat), seconds)


def planner(job: Job) -> Cost:
    """Measure splitting a step's responses over data-parallel ranks and micro-batches."""
    length_N = (PROMPT_TOKENS + torch.randint(1, 8192, (job.responses,), generator=torch.Generator().manual_seed(1))).tolist()
    begun = time.process_time()
    split_step(length_N, 4, job.data_parallel, CAPACITY)
    return Cost(job.responses, time.process_time() - begun)


@ray.remote
class Rank:
    """Stand in for all ranks of a job."""

    def forward(self, plan: StepPlan, score: bool) -> int:
        return sum(payload is not None for payload in plan.payload_N)


def driver(job: Job) -> Cost:
    """Measure, on the driver, sending a step's plan to every rank through the object store, with references to the rank's responses, and
    collecting the answers."""
    layout = Layout(ranks=job.ranks, tp=job.ranks // job.data_parallel)
    group = ActorGroup("rank", [_actors[0]] * job.ranks)
    number_N, payload_N = np.zeros(job.responses, np.float32), [ray.put(n) for n in range(job.responses)]
    split = split_step([PROMPT_TOKENS] * job.responses, 4, job.data_parallel, CAPACITY)
    plan = StepPlan(payload_N, [None] * job.responses, (), split, number_N, number_N.astype(int), number_N == 0, number_N)
    begun = time.process_time()
    answers = group.wait(group.start_each("forward", dealt(plan, layout), False), "forward", 120.0)
    assert sum(answers) == job.responses * layout.tp
    return Cost(job.ranks, time.process_time() - begun)


_actors: list[Any] = []


def manifests(job: Job) -> Cost:
    """Measure writing and reading a checkpoint's manifest, and comparing it with names and sizes in the directory."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / step_name(1)
        (folder / "policy").mkdir(parents=True)
        files = dict[str, FileRecord]()
        for rank in range(job.ranks):
            for writer in range(WRITERS):
                name = f"policy/__{rank}_{writer}.distcp"
                (folder / name).write_bytes(b"megarl")
                files[name] = FileRecord(6, "0" * 32)
        begun = time.process_time()
        write_file(folder / MANIFEST, encode(Manifest(1, job.ranks, {}, {}, {"policy": {"optimizer": None}}, files)))
        assert verify(folder, contents=False).saved is not None
        return Cost(len(files), time.process_time() - begun)


def tensors(job: Job) -> Cost:
    """Measure the metadata of a checkpoint's tensors, weights and optimizer: written once, read by each rank."""
    names = stacks(job.model)
    states = [
        f"{state}{name if isinstance(name, str) else name[0]}"
        for state in ("", *(f"optimizer.{state}." for state in STATES))
        for name in names
    ]
    counts = [1 if isinstance(name, str) else len(name) for name in names] * (1 + len(STATES))
    sharded = [
        (
            Shard(key, (count, 4, 4), (place, 0, 0), (1, 4, 4), torch.float32),
            Location(f"__{place % job.ranks}_0.distcp", place, 1, "0" * 32),
        )
        for key, count in zip(states, counts, strict=True)
        for place in range(count)
    ]
    with tempfile.TemporaryDirectory() as root:
        (folder := Path(root) / step_name(1) / "policy").mkdir(parents=True)
        begun = time.process_time()
        files = write_metadata(folder, sharded) | {
            f"__{rank}_0.distcp": FileRecord(job.ranks * 1000, "0" * 32) for rank in range(job.ranks)
        }
        saved = SavedStep(folder.parent, Manifest(1, job.ranks, {}, {}, {}, {f"policy/{name}": record for name, record in files.items()}))
        assert sum(len(tensor.shards) for tensor in read_index(saved, "policy").values()) == len(sharded)
        return Cost(len(sharded), time.process_time() - begun)


def hugging_face(job: Job) -> Cost:
    """Measure writing all tensors of a Hugging Face directory, as if one stage wrote them."""
    flat = [one for name in stacks(job.model) for one in ([name] if isinstance(name, str) else name)]
    with tempfile.TemporaryDirectory() as folder:
        writer, tensor = ShardWriter(Path(folder)), torch.ones(4, 4)
        begun = time.process_time()
        for name in flat:
            writer.add(name, tensor)
        writer.close()
        return Cost(len(flat), time.process_time() - begun)


def prompts(job: Job) -> Cost:
    """Measure a prompt file with DAPO's columns, from reading it to drawing a step's prompts."""
    question, width = "What is the sum of 17 and 17? " * 8, 1000
    row = {"prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": "34"}, "data_source": "math_dapo"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.parquet"
        table = pyarrow.concat_tables([pyarrow.Table.from_pylist([row] * width)] * (job.rows // width))
        parquet.write_table(table.append_column("index", pyarrow.array(torch.randperm(job.rows).numpy())), path)
        del table
        tokenizer = fast_tokenizer(train_sentencepiece(seed=1))
        begun = time.process_time()
        read = load_prompts(FileSource(path=path), tokenizer, SourceFormat(chat=False), 4096, "data.train")
        assert isinstance(read, LargeFile) and len(read) == job.rows
        assert all(read[place].answer == "34" for place in range(0, job.rows, job.rows // PROMPTS))
        return Cost(job.rows, time.process_time() - begun)


PARTS: dict[str, tuple[str, Callable[[Job], Cost]]] = {
    "weight sync": ("tensor", sync),
    "planner": ("response", planner),
    "plan to ranks": ("rank", driver),
    "manifest": ("file", manifests),
    "saved tensors": ("tensor", tensors),
    "Hugging Face save": ("tensor", hugging_face),
    "prompts": ("row", prompts),
}


def main() -> int:
    options = argparse.ArgumentParser(prog="bench_scale", description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    _actors.append(Rank.remote())  # type: ignore[attr-defined]
    ray.get(_actors[0].__ray_ready__.remote())
    failed = False
    print(f"{'':18}" + "".join(f"{f'{job.ranks} ranks':>24}" for job in JOBS) + f"{'growth':>10}")
    for part, (unit, work) in PARTS.items():
        costs = [[work(job) for job in JOBS] for _ in range(rounds)]
        best = [min(column, key=lambda cost: cost.seconds) for column in zip(*costs, strict=True)]
        each_us = [cost.seconds / cost.objects * 1e6 for cost in best]
        growth = each_us[-1] / each_us[0]
        failed |= growth > GROWTH
        cells = "".join(f"{f'{cost.seconds:.3f} s, {us:.1f} us':>24}" for cost, us in zip(best, each_us, strict=True))
        print(f"{part:18}{cells}{growth:9.2f}x  a {unit}, of {best[0].objects} to {best[-1].objects}", flush=True)
    print(f"an object costs at most {GROWTH:g} times as much: {'MISSED' if failed else 'kept'}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
