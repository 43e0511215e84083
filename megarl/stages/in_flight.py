"""Responses as a file of a checkpoint: what a run that goes on learns from, and could not sample again from the weights it has."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
import ray

from megarl.batch import Sample, VersionSpan
from megarl.data.prompts import Prompt
from megarl.response import Episode, Response
from megarl.rewards.score import Score
from megarl.rollout.parts import whole
from megarl.stages.rollout import Collected, Group

ARRAYS = ("tokens", "rollout_logp", "loss_mask")  # of a sample
EXPERTS = "experts"

Stages = Sequence[Sequence[int]]
"""The MoE layers of each pipeline stage."""


def dump(collected: Collected, stages: Stages) -> bytes:
    """The groups with all tokens, log-probs, weight versions and experts, which are fetched from the object store for it.

    stages: as which the experts are kept.
    """
    order = np.argsort([layer for stage in stages for layer in stage])
    every = [response for group in collected.groups for response in group.responses]
    payloads: Iterator[Sample] = iter(ray.get([part for response in every for part in (*response.before, response.payload)]))
    experts = iter(ray.get([stage for response in every for part in response.experts or () for stage in part]))
    arrays: dict[str, np.ndarray] = {}
    groups = []
    for group in collected.groups:
        responses = []
        for response in group.responses:
            number = str(len(arrays))  # of the first array; names need only be unique
            parts = list(islice(payloads, 1 + len(response.before)))
            sample = whole(parts) if response.before else parts[0]
            for name in ARRAYS:
                if (value := getattr(sample, name)) is not None:
                    arrays[f"{number}.{name}"] = value
            if response.experts is not None:
                rows = [np.concatenate(list(islice(experts, len(part))), axis=1) for part in response.experts]
                arrays[f"{number}.{EXPERTS}"] = np.concatenate(rows)[:, order]
            plain = asdict(replace(response, payload=None, experts=None, before=()))
            sampled = {"finish_reason": sample.finish_reason, "turn_rewards": sample.turn_rewards}
            responses.append({"response": plain, "sample": sampled, "arrays": number})
        scores = [asdict(score) for score in group.scores]
        groups.append({"place": group.place, "responses": responses, "scores": scores, "greedy": group.greedy, "asked": group.asked})
    meta = json.dumps({"groups": groups, "counts": collected.counts})
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, meta=np.frombuffer(meta.encode(), np.uint8), **arrays)
    return file.getvalue()


def load(data: bytes, prompts: Sequence[Prompt], stages: Stages) -> Collected:
    """What `dump` was given, in this session's object store.

    Args:
        data: that it returned.
        prompts: of data.train.
        stages: as which the experts are to be kept; they may be others than before.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        meta = json.loads(arrays["meta"].tobytes())
        groups = [
            Group(
                one["place"],
                prompts[one["place"]],
                [_response(saved, arrays, stages) for saved in one["responses"]],
                [Score(**score) for score in one["scores"]],
                one["greedy"],
                tuple(one["asked"]),
            )
            for one in meta["groups"]
        ]
    return Collected(groups, meta["counts"])


def _response(saved: dict[str, Any], arrays: Any, stages: Stages) -> Response:
    plain, number = dict(saved["response"]), saved["arrays"]
    versions = [VersionSpan(*span) for span in plain.pop("weight_versions")]
    episode = plain.pop("episode")
    held = {name: arrays[f"{number}.{name}"] for name in ARRAYS if f"{number}.{name}" in arrays}
    sampled = saved["sample"]
    sample = Sample(
        prompt_length=plain["prompt_length"],
        finish_reason=sampled["finish_reason"],
        weight_versions=tuple(versions),
        turn_rewards=[(end, reward) for end, reward in sampled["turn_rewards"]],
        **held,
    )
    experts, layers = None, sorted(layer for stage in stages for layer in stage)
    rows = arrays[name] if (name := f"{number}.{EXPERTS}") in arrays else None
    if (name := f"{number}.routed_experts") in arrays:  # in older checkpoints, of all layers, where the response was not done
        rows = arrays[name][:, layers]
    if rows is not None:
        experts = [[ray.put(rows[:, [layers.index(layer) for layer in stage]]) for stage in stages]]
    return Response(
        **plain | {"payload": ray.put(sample), "experts": experts},
        episode=None if episode is None else Episode(**episode),
        weight_versions=tuple(versions),
    )
