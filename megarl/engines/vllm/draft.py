"""The model with which an engine drafts: a layer of multi-token prediction, whose embedding and output layer are the engine's model's own.

Only vLLM's own processes import this file.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.utils import extract_layer_index


class DraftLayers(nn.ModuleList):
    """The parts of a draft model that are its own, for vLLM's reload, which would otherwise take shared layers for its."""

    def __init__(self, draft: nn.Module, model: nn.Module) -> None:
        super().__init__(list(_own(draft, {id(module) for module in model.modules()})))
        self.layer = next(extract_layer_index(name) for name, _ in draft.named_parameters() if ".layers." in name)

    @property
    def prefix(self) -> str:
        """What the names of its tensors in a checkpoint begin with."""
        return f"model.layers.{self.layer}."


def _own(module: nn.Module, shared: set[int]) -> Iterator[nn.Module]:
    if not any(id(part) in shared for part in module.modules()):
        yield module
    elif id(module) not in shared:
        assert not [*module.parameters(recurse=False)], f"{type(module).__name__} has weights beside shared layers"
        for child in module.children():
            yield from _own(child, shared)


def draft_of(runner: Any) -> nn.Module | None:
    """Return the model with which a worker drafts; None if it does not."""
    drafter = getattr(runner, "drafter", None)
    return None if drafter is None else drafter.model


class DraftCounter:
    """Counts the tokens that a worker drafts, and those of them that are accepted."""

    def __init__(self, runner: Any) -> None:
        self.drafted = self.accepted = 0
        sample: Callable[..., Any] = runner._sample

        def counted(logits: Any, metadata: Any) -> Any:
            output = sample(logits, metadata)
            if metadata is not None:
                # A row has the accepted tokens and one more; what is left of it is -1 (rejection_sampler.py:51).
                self.drafted += sum(metadata.num_draft_tokens)
                self.accepted += int(torch.count_nonzero(output.sampled_token_ids >= 0)) - len(output.sampled_token_ids)
            return output

        runner._sample = counted

    def taken(self) -> tuple[int, int]:
        """Return the numbers of drafted and of accepted tokens since the last call."""
        counts, self.drafted, self.accepted = (self.drafted, self.accepted), 0, 0
        return counts
