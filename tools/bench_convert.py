"""Compare conversion with a copy of the same bytes and a transformers round trip, measured in one run: `python tools/bench_convert.py`.

A random bfloat16 Qwen3-MoE of 1.4 GB. Every side runs in a process of its own, whose imports are not counted; ours and the copy end when
their bytes are on the disk. The sides alternate, so that a busy machine slows all of them. Memory is the peak of the resident set beyond
what the process held before. Exit status: 1 if a bound is missed.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.peak_memory import PeakMemory

SIDES = ("copy", "to_megatron", "to_hf", "transformers")
SPEED = 0.6  # least speed, relative to a copy
SLACK = 64 << 20  # bytes that Python and torch allocate on first use
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "dtype": "bfloat16",
}


class Figure(NamedTuple):
    """The time and memory that one side took."""

    seconds: float
    memory: int  # bytes


def make_model(path: Path, layers: int) -> int:
    """Write the model, and return its size in bytes."""
    import torch
    from safetensors.torch import save_file

    from megarl.models.description import ModelDescription

    config = {**MODEL, "num_hidden_layers": layers}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    shapes = ModelDescription.of(config).expected()
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def side(name: str, source: Path, target: Path, workers: int) -> Callable[[], Any]:
    """Return one side as a function whose imports are already done."""
    if name == "copy":
        return lambda: copy(source, target)
    if name == "transformers":
        from transformers import Qwen3MoeForCausalLM

        return lambda: Qwen3MoeForCausalLM.from_pretrained(source, dtype="bfloat16").save_pretrained(target)
    import megarl.convert.engine
    import megarl.convert.to_hf
    import megarl.convert.to_megatron  # noqa: F401
    from megarl.convert.main import main

    verb = {"to_megatron": "hf-to-megatron", "to_hf": "megatron-to-hf"}[name]
    return lambda: main([verb, str(source), str(target), "--workers", str(workers)])


def copy(source: Path, target: Path) -> None:
    """Copy the files of a directory to disk."""
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb") as stream:
            os.fsync(stream.fileno())


def child(name: str, source: Path, target: Path, workers: int) -> None:
    """Run one side and print its figure."""
    run = side(name, source, target, workers)
    peak, begun = PeakMemory(), time.perf_counter()
    run()
    print(json.dumps(Figure(time.perf_counter() - begun, peak.extra())))


def measure(directory: Path, rounds: int, workers: int) -> dict[str, list[Figure]]:
    """Return the figures of every side in each round but the first."""
    results: dict[str, list[Figure]] = {name: [] for name in SIDES}
    places = {"copy": "model", "to_megatron": "model", "to_hf": "to_megatron", "transformers": "model"}
    for _ in range(rounds + 1):
        for name in SIDES:
            shutil.rmtree(directory / name, ignore_errors=True)
            arguments = ["--child", name, str(directory / places[name]), str(directory / name), "--workers", str(workers)]
            ran = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
            results[name].append(Figure(*json.loads(ran.stdout.splitlines()[-1])))
    assert (directory / "to_hf" / "model.safetensors").stat().st_size > 0
    return {name: figures[1:] for name, figures in results.items()}


def table(rounds: dict[str, list[Figure]], size: int, layer: int) -> Iterator[tuple[str, bool]]:
    """Yield the lines, and whether each keeps its bound: medians of the seconds, the spread of the rounds' ratios, the largest memory."""
    medians = {
        name: Figure(statistics.median(one.seconds for one in figures), max(one.memory for one in figures))
        for name, figures in rounds.items()
    }
    plain, other = medians["copy"], medians["transformers"]
    yield f"{'copy and fsync':26} {plain.seconds:7.2f} s {size / 1e9 / plain.seconds:7.2f} GB/s", True
    for name, label in (("to_megatron", "Hugging Face -> Megatron"), ("to_hf", "Megatron -> Hugging Face")):
        seconds, memory = medians[name]
        speed, most = plain.seconds / seconds, 2 * layer + SLACK
        ratios = [one.seconds / own.seconds for one, own in zip(rounds["copy"], rounds[name], strict=True)]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        bound = f"{speed:5.2f}x {spread} of the copy  bound {SPEED:g}x  {'holds' if speed >= SPEED else 'MISSED'}"
        yield f"{label:26} {seconds:7.2f} s {size / 1e9 / seconds:7.2f} GB/s  {bound}", speed >= SPEED
        verdict = f"{memory / layer:5.2f}x of the largest layer  bound {most / layer:.2f}x  {'holds' if memory <= most else 'MISSED'}"
        yield f"{'  memory':26} {memory / 1e9:7.3f} GB {'':13} {verdict}", memory <= most
    both, more = medians["to_megatron"].seconds + medians["to_hf"].seconds, max(medians["to_megatron"].memory, medians["to_hf"].memory)
    yield f"{'transformers load + save':26} {other.seconds:7.2f} s {'':13} ours there and back: {both:.2f} s", True
    yield f"{'  memory':26} {other.memory / 1e9:7.3f} GB {'':13} ours: {more / 1e9:.3f} GB", True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=13, help="of 106 MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]), Path(given.child[2]), given.workers)
        return 0
    from megarl.convert.plan import largest_layer, planned

    directory = Path(tempfile.mkdtemp(prefix="bench_convert-", dir=given.directory))
    try:
        size = make_model(directory / "model", given.layers)
        layer = largest_layer(planned(directory / "model", None, None, 1, 1)[0]).size
        lines = list(table(measure(directory, given.rounds, given.workers), size, layer))
    finally:
        shutil.rmtree(directory)
    print(f"{size / 1e9:.2f} GB, largest layer {layer / 1e9:.3f} GB, {given.workers} workers, {os.cpu_count()} processors")
    for line, _ in lines:
        print(line)
    return 0 if all(holds for _, holds in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
