"""Compare a weight update of a CPU engine with vLLM's own reload of the same tensors: `python -m tools.bench_sync [--rounds 5]`.

One vLLM engine and one sender over shared memory; a mixture of experts with random weights in float32. Each figure is the median of rounds
that alternate, in CPU seconds of the processes that do the work, so that a busy machine changes it little. The peer is vLLM's layerwise
reload as `load_weights` drives it, one call per tensor, with the patch of its packing on CPUs; it gets its tensors in memory, and transfers
nothing.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.config import RolloutSettings
from megarl.engines.engine import Setup
from megarl.engines.vllm.engine import VllmEngine
from megarl.engines.vllm.launch import environment
from megarl.models.description import ModelDescription
from megarl.sync.fingerprint import Fingerprinter, check
from megarl.sync.receive import BucketReceiver
from megarl.sync.send import Sender
from megarl.sync.wire import Header, TensorName
from tools.make_tiny_model import build
from tools.peak_memory import PeakMemory

TIMEOUT_S = 600.0
CHANGED = (0.01, 0.03, 0.1)  # fractions of the elements that change
RELOAD = 5.0  # how many times cheaper than vLLM's own reload each expert's tensor must be, if tensors are small
VERIFY = 0.10  # largest share of an update's CPU seconds
SHAPES: dict[str, dict[str, Any]] = {
    "small": {"layers": 4, "hidden": 128, "experts": 64, "expert_hidden": 64},
    "large": {"layers": 4, "hidden": 512, "experts": 16, "expert_hidden": 512},
}


class BenchEngine(VllmEngine):
    extension = "tools.bench_sync_extension.BenchExtension"

    async def cpu(self) -> float:
        return sum(await self._call("bench_cpu", timeout_s=TIMEOUT_S))

    async def start_peak(self) -> None:
        await self._call("bench_start_peak", timeout_s=TIMEOUT_S)

    async def peak(self) -> float:
        return max(await self._call("bench_peak", timeout_s=TIMEOUT_S))

    async def experts(self, own: bool) -> float:
        stacks = [(names, [len(names), *self._expected[names[0]][0]]) for names in expert_stacks(self._expected)]
        return sum(await self._call("bench_experts", own, stacks, timeout_s=TIMEOUT_S))


class Round(NamedTuple):
    """CPU seconds, and memory in MiB."""

    own: float  # vLLM's reload of the experts
    stacks: float  # our reload of the experts
    move: float  # an update's transfer of all tensors into the engine, on both sides
    verify: float  # an update's fingerprints, on both sides
    sender_peak: float  # the most memory that an update takes on top of what the process had before
    engine_peak: float


def expert_stacks(expected: dict[str, Any]) -> list[list[str]]:
    """Return the names of the experts' tensors, grouped by layer and kind."""
    stacks: dict[str, list[str]] = {}
    for name in expected:
        before, _, after = name.partition(".experts.")
        if after:
            stacks.setdefault(before + after.partition(".")[2], []).append(name)
    return list(stacks.values())


def stream(path: Path, seed: int) -> Iterator[tuple[TensorName, Tensor]]:
    """Yield random weights as a trainer exports them."""
    model = ModelDescription.read(path)
    shapes = {name: [list(shape)] for weight in model.weights("lm") for name, shape in zip(weight.hf, weight.op.shapes, strict=True)}
    stacks, generator = expert_stacks(shapes), torch.Generator().manual_seed(seed)
    experts = {name for names in stacks for name in names}
    for name, [shape] in shapes.items():
        if name not in experts:
            yield name, torch.randn(shape, generator=generator)
    for names in stacks:
        yield names, torch.randn(len(names), *shapes[names[0]][0], generator=generator)


async def measure(shape: dict[str, Any], rounds: int) -> tuple[list[Round], int, int]:
    """Return the rounds, the number of the experts' tensors, and the bytes of an update."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        build(path, **shape, seed=1)
        engine = BenchEngine("engine 0")
        settings = RolloutSettings(max_prompt_tokens=32, max_response_tokens=32, timeout_s=TIMEOUT_S, kv_cache_mb=64)
        await engine.start(Setup(path, "float32", settings, 1, gpu=False))
        try:
            sender = Sender("shm", workers=1, host="", bucket_mb=64, timeout_s=TIMEOUT_S, device=torch.device("cpu"))
            loop, results = asyncio.get_running_loop(), list[Round]()

            def do(work: Coroutine[Any, Any, None]) -> Callable[[], object]:
                return asyncio.run_coroutine_threadsafe(work, loop).result

            for number in range(1 + rounds):
                own, stacks = await engine.experts(True), await engine.experts(False)
                tensors, prints = list(stream(path, number)), Fingerprinter()
                await engine.start_peak()
                peak = PeakMemory()
                begun = time.process_time() + await engine.cpu()
                await engine.start_update(TIMEOUT_S)
                moved = await asyncio.to_thread(sender.send, tensors, lambda header: do(engine.load_buckets([header], TIMEOUT_S)))
                await engine.finish_update(number + 1, TIMEOUT_S)
                loaded = time.process_time() + await engine.cpu()
                for name, tensor in tensors:
                    prints.add(name, tensor)
                check(prints.digest(), await engine.fingerprints(TIMEOUT_S), "the engine")
                verified = time.process_time() + await engine.cpu()
                results.append(Round(own, stacks, loaded - begun, verified - loaded, peak.extra() / 2**20, await engine.peak()))
            sender.close()
        finally:
            await engine.close()
    return results[1:], sum(len(name) for name, _ in tensors if not isinstance(name, str)), moved.nbytes


class Changes(NamedTuple):
    """CPU seconds of a transfer in shared memory without an engine, from the sender's tensors to the receiver's, and its bytes."""

    seconds: float
    nbytes: int


def changes(fraction: float | None, rounds: int) -> Changes:
    """Measure transfers of experts in bfloat16 of which a fraction of the elements change in each; None: everything is sent."""
    generator, results = torch.Generator().manual_seed(1), list[Changes]()
    stream: list[tuple[TensorName, Tensor]] = [
        ([f"{layer}.{expert}" for expert in range(16)], torch.randn(16, 1024, 512, generator=generator).bfloat16()) for layer in range(12)
    ]
    receiver = BucketReceiver(torch.device("cpu"))

    def announce(header: dict[str, Any]) -> Callable[[], object]:
        for _, tensor in receiver.receive_stacks([Header.parse(header)]):
            assert tensor.numel()
        return lambda: None

    delta = None if fraction is None else rounds + 2
    sender = Sender("shm", workers=1, host="", bucket_mb=64, timeout_s=TIMEOUT_S, device=torch.device("cpu"), delta=delta)
    for version in range(rounds + 1):
        begun = time.process_time()
        sent = sender.send(stream, announce, None, version)
        results.append(Changes(time.process_time() - begun, sent.nbytes))
        for _, tensor in stream:
            places = torch.randint(tensor.numel(), (int(tensor.numel() * (fraction or 0)),), generator=generator)
            tensor.view(-1)[places] *= 1.01
    sender.close()
    return Changes(statistics.median(one.seconds for one in results[1:]), results[-1].nbytes)


def main() -> int:
    options = argparse.ArgumentParser(prog="bench_sync", description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    rounds, missed = options.parse_args().rounds, False
    torch.set_num_threads(1)  # an engine is forked, which does not copy threads
    os.environ.update(environment(gpu=False))
    for label, shape in SHAPES.items():
        results, experts, nbytes = asyncio.run(measure(shape, rounds))
        middle = Round(*(statistics.median(values) for values in zip(*results, strict=True)))
        spread = max(one.own / one.stacks for one in results) - min(one.own / one.stacks for one in results)
        cheaper, share = middle.own / middle.stacks, middle.verify / (middle.move + middle.verify)
        missed |= (label == "small" and cheaper < RELOAD) or share > VERIFY
        print(f"{label}: {experts} tensors of experts, {nbytes / 2**20:.0f} MiB an update")
        ours, theirs = (seconds / experts * 1e6 for seconds in (middle.stacks, middle.own))
        print(f"  a tensor of an expert   {ours:6.0f} us, vLLM's own {theirs:.0f} us: {cheaper:.1f}x cheaper (spread {spread:.1f})")
        print(f"  move, both sides        {middle.move:6.3f} s CPU, {nbytes / middle.move / 1e9:.2f} GB/s")
        print(f"  verification            {middle.verify:6.3f} s CPU, {nbytes / middle.verify / 1e9:.2f} GB/s: {share:.0%} of the update")
        print(f"  memory at its peak      {middle.sender_peak:6.0f} MiB on the sender, {middle.engine_peak:.0f} MiB on the engine")
    whole = changes(None, rounds)
    print(f"{whole.nbytes / 2**20:.0f} MiB of experts in bfloat16, shared memory, no engine: {whole.seconds:.3f} s CPU")
    for fraction in CHANGED:
        some = changes(fraction, rounds)
        print(f"  {fraction:.0%} changed             {some.seconds:6.3f} s CPU, {some.nbytes / whole.nbytes:.1%} of the bytes")
    print(f"bounds: {RELOAD:g}x for small tensors, verification {VERIFY:.0%}: {'MISSED' if missed else 'kept'}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
