"""The configuration changes that are allowed when a run resumes from a checkpoint."""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megarl.checkpoints.places import contents, paths

_SERVER = ("url", "url_file", "token_env", "batch_size", "timeout_s", "attempts", "backoff_s", "deadline_s")
_TEACHER = ("url", "token_env", "connections", "timeout_s", "attempts", "backoff_s", "deadline_s")
# Dotted keys, each including everything below it. Changing any other key would make it a different run, and is refused.
MAY_DIFFER = (
    # where the run takes place, what is logged, what is saved
    *("name", "run_dir", "cluster", "log", "save"),
    # how the work is split: the results are the same up to rounding
    *("layout", "placement", "model.recompute", "*.micro_batch_tokens", "sync"),
    *("model.megatron.num_layers_in_first_pipeline_stage", "model.megatron.num_layers_in_last_pipeline_stage"),
    *("model.megatron.recompute_*", "model.megatron.moe_token_dispatcher_type", "*optimizer.ddp"),
    # where the optimizer's moments are kept: checkpoints have the same format whether or not it is offloaded
    *("*optimizer.megatron.optimizer_cpu_offload", "*optimizer.megatron.optimizer_offload_fraction"),
    *("*optimizer.megatron.use_torch_optimizer_for_cpu_offload", "*optimizer.megatron.overlap_cpu_optimizer_d2h_h2d"),
    *("*optimizer.megatron.pin_cpu_grads", "*optimizer.megatron.pin_cpu_params"),
    *("rollout.replicas", "rollout.tp", "rollout.dp", "rollout.expert_parallel", "rollout.max_num_seqs", "rollout.kv_cache_mb"),
    *("rollout.request_routing", "rollout.gpu_memory_fraction", "rollout.timeout_s", "rollout.engine.args"),
    *("reward.workers", "reward.timeout_s", "reward.sandbox"),
    *(f"{source}.{key}" for source in ("reward.source", "reward.source.parts.*.source") for key in _SERVER),
    *(f"{server}.{key}" for server in ("distillation.server", "distillation.servers.*") for key in _TEACHER),
    *("environment.workers", "environment.max_concurrent", "environment.source.processes", "environment.sandbox"),
    *("environment.source.url", "environment.source.token_env", "environment.source.connections"),
    # how long the run takes (a cosine schedule then ends at the new last step), and what is evaluated and monitored
    *(
        "*.steps",
        "*.eval_every",
        "*.eval_at_start",
        "train.on_alarm",
        "train.best",
        "train.patience",
        "data.eval",
        "eval",
        "reward.eval",
        "model.base",
        "routing.sample",
        "routing.alarm",
    ),
)
# Exceptions: keys below the ones above that change what the engines sample by more than rounding.
MAY_NOT = ("rollout.engine.args.kv_cache_dtype",)
_ABSENT = "(absent)"


Contents = Mapping[str, str]
"""Fingerprints of the files at a path, as `places.contents` returns them."""


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], fingerprints: Mapping[str, Contents | str] | None = None) -> list[str]:
    """Return one line for each refused change, with the dotted key and both values, or the path and the files that have changed there.

    Args:
        saved: the checkpoint's configuration, as returned by model_dump(mode="json").
        now: the run's configuration, likewise.
        fingerprints: those of the files that were at the paths of `saved`; they may be elsewhere now. Earlier versions saved one text for
            each path, which says nothing now.
    """
    before = {key: files for key, files in (fingerprints or {}).items() if isinstance(files, Mapping)}
    differing = {key: (old, new) for key, old, new in _differences(saved, now, "") if not _free(key)}
    lines = []
    for key in [*differing, *(key for key in before if key not in differing and not _free(key))]:
        place = _at(now, key)
        current = contents(Path(place)) if key in before and isinstance(place, str) else None
        if current is not None and current == before[key]:
            continue
        if key in differing:
            old, new = differing[key]
            lines.append(f"{key}: {old!r} in the checkpoint and {new!r} now: a resumed run cannot change it")
        elif isinstance(place, str):
            lines.append(f"{key}: {place} {_changes(before[key], current)}: a resumed run cannot change it")
    return lines


def changed_files(saved: Contents, current: Contents | None) -> list[str]:
    """Return the names of the files that were changed, added or removed; the name of a path that is itself a file is empty."""
    now = current or {}
    return sorted(name for name in saved.keys() | now.keys() if saved.get(name) != now.get(name))


def _changes(saved: Contents, current: Contents | None) -> str:
    if current is None:
        return "was read by the run, and cannot be read any more"
    names = [name for name in changed_files(saved, current) if name]
    if not names:
        return "has other contents than when the checkpoint was saved"
    others = f" and {len(names) - 1} more files there" if len(names) > 1 else ""
    return f"is not what it was when the checkpoint was saved ({names[0]}{others})"


def _at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key; None if there is none."""
    for name in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(name)] if name.isdecimal() and int(name) < len(tree) else None
        else:
            tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def completed(saved: Mapping[str, Any], kind: type[BaseModel]) -> Mapping[str, Any]:
    """Add the keys that did not exist yet when a checkpoint was saved, with their defaults, which leave everything as it was.

    Args:
        saved: the checkpoint's configuration, as returned by model_dump(mode="json").
        kind: the configuration's class.

    Returns:
        The whole configuration, likewise; `saved` itself if it is no longer valid.
    """
    try:
        # These sections may differ, and so may the names of their keys in earlier versions.
        return kind.model_validate_json(json.dumps({**saved, "log": {}, "cluster": {}}), strict=True).model_dump(mode="json")
    except ValidationError:
        return saved


def held_by(tree: Mapping[str, Any]) -> dict[str, Contents]:
    """Return fingerprints, by dotted key, of the files at paths that may change only if the files are the same. `tree`: model_dump()."""
    fingerprints = {key: contents(path) for key, path in paths(tree) if not _free(key)}
    return {key: one for key, one in fingerprints.items() if one is not None}


def _differences(saved: Any, now: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if _sections(saved) and _sections(now) and len(saved) == len(now):
        saved, now = ({str(number): one for number, one in enumerate(items)} for items in (saved, now))
    if not isinstance(saved, Mapping) or not isinstance(now, Mapping):
        if saved != now:
            yield key, saved, now
        return
    if saved.get("type") != now.get("type"):  # a different variant of the section: comparing its other keys would say nothing
        yield f"{key}.type", saved.get("type", _ABSENT), now.get("type", _ABSENT)
        return
    for name in sorted(saved.keys() | now.keys()):
        yield from _differences(saved.get(name, _ABSENT), now.get(name, _ABSENT), f"{key}.{name}" if key else name)


def _sections(value: Any) -> bool:
    """Return whether a value is a list of sections, such as the parts of a sum."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def _free(key: str) -> bool:
    parts = key.split(".")
    above = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return key not in MAY_NOT and any(fnmatchcase(one, pattern) for one in above for pattern in MAY_DIFFER)
