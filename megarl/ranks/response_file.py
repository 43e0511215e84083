"""Responses as a checkpoint file; the rank that writes it fetches them from the object store, prompt by prompt."""

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError

from megarl.batch import Sample
from megarl.engines.parts import whole
from megarl.errors import ContentLost
from megarl.response import Response
from megarl.text.display import one_line

ARRAYS = ("tokens", "rollout_logp", "loss_mask")  # the arrays of a sample
EXPERTS, META = "experts", "meta"


@dataclass(frozen=True)
class ResponseFile:
    """An .npz with the tokens, log-probs, masks and experts of each response; its last member is a JSON text with everything else.

    Only the responses to one prompt at a time are in memory, besides what the driver knows of all of them.
    """

    groups: Sequence[tuple[Sequence[Response], Mapping[str, Any]]]  # per prompt: its responses, and further values to keep
    counts: Mapping[str, float]  # written unchanged
    order: Sequence[int]  # the order in which the MoE layers' experts are written

    def write(self, file: Any) -> None:
        """Write it sequentially into a file that need not be seekable. Raise ContentLost if responses are lost."""
        groups = []
        with zipfile.ZipFile(file, "w") as archive:
            for number, (responses, known) in enumerate(self.groups):
                groups.append({**known, "responses": self._write(archive, str(number), responses)})
            meta = json.dumps({"groups": groups, "counts": self.counts})
            _add(archive, META, np.frombuffer(meta.encode(), np.uint8))

    def _write(self, archive: zipfile.ZipFile, name: str, responses: Sequence[Response]) -> list[dict[str, Any]]:
        payloads = _fetch([part for response in responses for part in (*response.before, response.payload)])
        experts = _fetch([stage for response in responses for part in response.experts or () for stage in part])
        written = []
        for index, response in enumerate(responses):
            own = f"{name}.{index}"
            parts: list[Sample] = list(islice(payloads, 1 + len(response.before)))
            sample = whole(parts) if response.before else parts[0]
            for array in ARRAYS:
                if (value := getattr(sample, array)) is not None:
                    _add(archive, f"{own}.{array}", value)
            if response.experts is not None:
                rows = [np.concatenate(list(islice(experts, len(part))), axis=1) for part in response.experts]
                _add(archive, f"{own}.{EXPERTS}", np.concatenate(rows)[:, self.order])
            plain = asdict(replace(response, payload=None, experts=None, before=()))
            sampled = {"finish_reason": sample.finish_reason, "turn_rewards": sample.turn_rewards}
            written.append({"response": plain, "sample": sampled, "arrays": own})
        return written


def _fetch(references: list[Any]) -> Iterator[Any]:
    try:
        return iter(ray.get(references))
    except ObjectLostError as error:
        raise ContentLost(f"responses that are under way are lost: {one_line(str(error))}") from error


def _add(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
