"""Transfer of adapters alone to engines that have the base model: megabytes, through Ray."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from safetensors.torch import save
from torch import Tensor

from megarl.config import SyncSettings
from megarl.observe.metrics import Last, Metric
from megarl.ranks.publisher import waited
from megarl.sync.fingerprint import Fingerprinter, Print, check


def publish_adapter(
    engines: Sequence[Any],
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    base: Mapping[str, Print] | None,
    version: int,
    settings: SyncSettings,
) -> dict[str, Metric]:
    """Let every engine use an adapter as `version`.

    Args:
        engines: the engines' actors.
        tensors: the factors, by PEFT's names, with the scale in B.
        config: PEFT's adapter_config.json.
        base: the fingerprints of the base model, if these engines' have not been compared.
        version: the version of the weights, which samples then carry.
        settings: time limit, and whether to verify.

    Returns:
        Metrics of the transfer.

    Raises:
        FingerprintMismatch: names the tensors, of the base or of the adapter, whose bits in an engine differ (`settings.verify`).
        FloatingPointError: names the factors that are not finite.
    """
    begun, prints, factors = time.perf_counter(), Fingerprinter(), dict[str, Tensor]()
    for name, tensor in tensors:
        factors[name] = tensor.cpu().contiguous()
        prints.add(name, factors[name])
    expected, content = prints.digest(), save(factors, metadata={"format": "pt"})
    stored = ray.put(content)

    def all_(method: str, *arguments: Any) -> list[Any]:
        references = [getattr(engine, method).remote(*arguments, settings.timeout_s) for engine in engines]
        return waited(references, method, settings.timeout_s)

    all_("load_adapter", stored, dict(config), version)
    moved = time.perf_counter()
    if settings.verify:
        for index, engine_prints in enumerate(all_("adapter_fingerprints")):
            check(expected, engine_prints, f"engine {index}")
        for index, engine_prints in enumerate(all_("fingerprints") if base is not None else []):
            assert base is not None
            check(base, engine_prints, f"engine {index}")
    return {
        "sync/tensors": Last(len(factors)),
        "sync/mb": Last(len(content) / 2**20),
        "timing_s/sync_move": Last(moved - begun),
        "timing_s/sync_verify": Last(time.perf_counter() - moved),
    }
