"""Responses as a file of a checkpoint: those that a resumed run learns from but could not sample again with its weights."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

import numpy as np
import ray

from megarl.batch import Sample, VersionSpan
from megarl.data.prompts import Prompt
from megarl.images import PlacedImage
from megarl.ranks.response_file import ARRAYS, EXPERTS, META, ResponseFile
from megarl.ranks.step_plan import Group
from megarl.response import EpisodeSummary, Response
from megarl.rewards.score import Score
from megarl.step.groups import StepGroups

Stages = Sequence[Sequence[int]]
"""The MoE layers of each pipeline stage."""


def dump(step_groups: StepGroups, stages: Stages) -> ResponseFile:
    """Return the groups, with all tokens, log-probs, weight versions and experts, as a file to write.

    `stages` says how the experts are split over the pipeline stages.
    """
    groups = []
    for group in step_groups.groups:
        scores = [asdict(score) for score in group.scores]
        groups.append((group.responses, {"place": group.place, "scores": scores, "greedy": group.greedy, "asked": group.asked}))
    layers = [layer for stage in stages for layer in stage]
    return ResponseFile(groups, step_groups.counts, sorted(range(len(layers)), key=layers.__getitem__))


def load(file: PathLike[str], prompts: Sequence[Prompt], stages: Stages) -> StepGroups:
    """Load a file that `dump` returned into this session's object store, response by response.

    Args:
        file: the file to read.
        prompts: the prompts of data.train.
        stages: the pipeline stages over which to split the experts; they may differ from before.
    """
    with np.load(file, allow_pickle=False) as arrays:
        meta = json.loads(arrays[META].tobytes())
        groups = [
            Group(
                one["place"],
                prompts[one["place"]],
                [_response(saved, arrays, stages) for saved in one["responses"]],
                [_score(saved) for saved in one["scores"]],
                one["greedy"],
                tuple(one["asked"]),
            )
            for one in meta["groups"]
        ]
    return StepGroups(groups, meta["counts"])


def _score(saved: dict[str, Any]) -> Score:
    """Read a score. One that is missing may have been saved by an earlier version, in which it was a 0 with an error."""
    return Score(**saved) if saved["error"] is None else Score(None, error=saved["error"])


def _response(saved: dict[str, Any], arrays: Any, stages: Stages) -> Response:
    plain, number = dict(saved["response"]), saved["arrays"]
    versions = [VersionSpan(*span) for span in plain.pop("weight_versions")]
    episode, images = plain.pop("episode"), [PlacedImage.of(one) for one in plain.pop("images", ())]
    own_arrays = {name: arrays[f"{number}.{name}"] for name in ARRAYS if f"{number}.{name}" in arrays}
    sampled = saved["sample"]
    sample = Sample(
        prompt_length=plain["prompt_length"],
        finish_reason=sampled["finish_reason"],
        weight_versions=tuple(versions),
        turn_rewards=[(end, reward) for end, reward in sampled["turn_rewards"]],
        starts=plain.get("starts", ()),
        images=images,
        **own_arrays,
    )
    experts, layers = None, sorted(layer for stage in stages for layer in stage)
    rows = arrays[name] if (name := f"{number}.{EXPERTS}") in arrays else None
    if rows is not None:
        experts = [[ray.put(rows[:, [layers.index(layer) for layer in stage]]) for stage in stages]]
    return Response(
        **plain | {"payload": ray.put(sample), "experts": experts},
        episode=None if episode is None else EpisodeSummary(**episode),
        weight_versions=tuple(versions),
        images=images,
    )
