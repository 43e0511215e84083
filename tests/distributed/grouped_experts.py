"""Experts as Megatron saves them with `--moe-grouped-gemm`, without Transformer Engine, which that takes to train.

Which names and places they have is decided by Megatron's own TEGroupedMLP.sharded_state_dict, and by a method of TEGroupedLinear, a class
that is not defined without Transformer Engine: it is compiled from Megatron's source.
"""

import ast
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

METHOD = "_sharded_state_dict_grouped"


@cache
def _method() -> Any:
    from megatron.core import utils
    from megatron.core.dist_checkpointing import mapping
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(spec.submodule_search_locations[0]) / "extensions" / "transformer_engine.py"
    [method] = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef) and node.name == METHOD]
    scope = {
        "torch": torch,
        "ShardedObject": mapping.ShardedObject,
        "replace_prefix_for_sharding": replace_prefix_for_sharding,
        "make_sharded_tensors_for_checkpoint": make_sharded_tensors_for_checkpoint,
        "get_pg_size": utils.get_pg_size,
        "get_pg_rank": utils.get_pg_rank,
    }
    exec(compile(ast.Module([method], []), str(file), "exec"), scope)
    return scope[METHOD]


class GroupedLinear(nn.Module):
    """As much of TEGroupedLinear as a checkpoint needs: the weight of each local expert, and a state of Transformer Engine's."""

    use_bias = False

    def __init__(self, weights: Sequence[Tensor], axis: int, groups: SimpleNamespace) -> None:
        super().__init__()
        for index, weight in enumerate(weights):
            self.register_parameter(f"weight{index}", nn.Parameter(weight))
        self.num_gemms, self._axis, self._pg_collection, self._tp_group = len(weights), axis, groups, groups.expt_tp

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        pass

    def _split_extra_state(self, state: Tensor) -> list[Tensor]:
        return [state] * self.num_gemms

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return _method()(self, {f"{index}.weight": self._axis for index in range(self.num_gemms)}, prefix, sharded_offsets, metadata)


class GroupedExperts(nn.Module):
    """As much of TEGroupedMLP as a checkpoint needs, with the weights of a SequentialMLP."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.config, self.num_local_experts = experts.config, experts.num_local_experts
        self.ep_group, self.tp_group = experts.ep_group, experts.tp_group
        groups = SimpleNamespace(
            ep=experts.ep_group, expt_tp=experts.tp_group, expt_dp=experts.dp_group, expt_dp_gtp_remat=experts.dp_group
        )
        self.linear_fc1 = GroupedLinear([expert.linear_fc1.weight for expert in experts.local_experts], 0, groups)
        self.linear_fc2 = GroupedLinear([expert.linear_fc2.weight for expert in experts.local_experts], 1, groups)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        return TEGroupedMLP.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def group_experts(module: nn.Module) -> int:
    """Put GroupedExperts in the place of every SequentialMLP, and return their number."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    places = [(parent, name) for parent in module.modules() for name, child in parent.named_children() if isinstance(child, SequentialMLP)]
    for parent, name in places:
        setattr(parent, name, GroupedExperts(getattr(parent, name)))
    return len(places)
