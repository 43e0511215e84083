"""Part conversion: a Hugging Face directory of 128 experts a layer to the device, and back as a stream, every tensor by its fingerprint."""

import json
from pathlib import Path
from typing import Any

import torch

from megarl.config import ModelSettings
from tests.gpu.process import Run
from tests.gpu.report import Report
from tests.gpu.shards import SHARD, SMALL
from tests.gpu.timing import seconds_of


def convert(grid: Any, directory: Path, small: bool) -> dict[str, Any]:
    """Writes two layers of Qwen3-30B-A3B, loads them twice, and streams them with fingerprints. Figures, and what differs."""
    from safetensors.torch import save_file

    from megarl.models.description import ModelDescription
    from megarl.parallel.backend import choose
    from megarl.parallel.build import build_chunks, transformer_config
    from megarl.parallel.export import export_stacks
    from megarl.parallel.weights import load_hf
    from megarl.sync.fingerprint import Fingerprinter

    backend = choose()
    shard = {**SHARD, "num_experts": 128, **({**SMALL, "num_experts": 16} if small else {})}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shard))
    model = ModelDescription.read(directory)
    tensors = {
        name: torch.randn(*shape, device=backend.device).mul_(0.02).to(torch.bfloat16).cpu().contiguous()
        for name, shape in model.expected().items()
    }
    written = Fingerprinter()
    for name, tensor in tensors.items():
        written.add(name, tensor.to(backend.device))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    config = transformer_config(model, ModelSettings(path=directory, dtype="bfloat16"), grid.layout, backend)
    chunks = build_chunks(config, model, backend, grad=False)

    def load() -> None:
        load_hf(chunks, model, grid)

    def stream(prints: Fingerprinter | None = None) -> None:
        for name, tensor in export_stacks(chunks, model, grid, torch.bfloat16):
            if prints is not None:
                prints.add(name, tensor)

    figures: dict[str, Any] = {"GB": size / 1e9, "tensors": len(tensors)}
    exported = Fingerprinter()
    for what, work in (("load, first", load), ("load", load), ("stream, first", stream), ("stream", stream)):
        figures[f"{what} GB/s"] = size / seconds_of(work) / 1e9
    figures["stream with fingerprints GB/s"] = size / seconds_of(lambda: stream(exported)) / 1e9
    before, after = written.digest(), exported.digest()
    return {**figures, "differ": [name for name in before if after.get(name) != before[name]][:3], "exported": len(after)}


def check(there: Run, report: Report, directory: Path, *, small: bool = False) -> None:
    """Converts on the device; `directory` is made."""
    figures = there(convert, directory, small)
    report.figures |= figures
    report.check(figures["exported"] == figures["tensors"] and not figures["differ"], f"exported: {figures['differ']} differ")
