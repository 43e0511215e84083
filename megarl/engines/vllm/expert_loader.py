"""Load new experts into the layers of a vLLM worker: many in one copy, directly into the layer's own memory.

vLLM itself calls `load_weights` for each expert's tensor, which costs 240 to 300 us of bookkeeping whatever its size: the wrapped loader of
the layerwise reload (vllm/model_executor/model_loader/reload/layerwise.py:126, make_online_process_loader) keeps the arguments, runs the
loader once to count elements, and once more when the layer is complete. Here the layer's memory is allocated when its first expert arrives;
each stack is copied into it by the layer's own rule for tensor parallelism and padding, and counted for the reload, which packs the layer
once it is complete.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import CopyCounter, materialize_layer
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
from vllm.model_executor.models.granitemoe import GraniteMoeForCausalLM

from megarl.engines.vllm.checkpoint_paths import checkpoint_path
from megarl.models.weight_map import SCALES
from megarl.sync.wire import TensorName, each

_GATE, _UP, _DOWN = "w1", "w3", "w2"  # vLLM's names for the projections; experts without gates have their up projection in the gate's place


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores experts."""

    joined: bool = False  # one tensor for gate and up, whose rows follow each other
    transposed: bool = False


def stored_as(model: nn.Module) -> Stored:
    """Return how the checkpoints of a model store its experts."""
    if isinstance(model, GraniteMoeForCausalLM):
        return Stored(joined=True)
    turned = any(getattr(layer, "is_fused_checkpoint_transposed", False) for layer in model.modules())  # Qwen3-VL-MoE's
    return Stored(joined=turned, transposed=turned)


def expert_names(path: str, layer: RoutedExperts, stored: Stored) -> list[list[str]]:
    """Return the Hugging Face names of the gate, up and down projections of this worker's experts in a layer.

    gpt-oss, Granite and Qwen3-VL-MoE have one tensor for gate and up, and Nemotron-H has no gate.

    Args:
        path: the layer's path in the checkpoint.
        layer: the layer.
        stored: from `stored_as`.
    """
    return [[name for name, place in names.items() if place is not None] for names in _placed(path, layer, stored)]


def parts_of(layer: RoutedExperts) -> tuple[str, ...]:
    """Return what the names of the parameters of one projection add to "weight": "" for the weight itself, and SCALES for fp8 scales.

    Other quantisations, and gpt-oss, are left to vLLM's own `load_weights`: then it is ().
    """
    method = layer.quant_method
    if isinstance(layer, GptOssRoutedExperts):
        return ()
    if isinstance(method, UnquantizedFusedMoEMethod):
        return ("",)
    return ("", SCALES) if isinstance(method, Fp8MoEMethod) and method.block_quant and method.weight_scale_refine is None else ()


def _placed(path: str, layer: RoutedExperts, stored: Stored) -> list[dict[str, int | None]]:
    """Return, for each projection of `expert_names`, the place of every expert's in the layer's memory; None: another worker holds it.

    With expert parallelism a worker holds some experts, in their order; its `expert_map` has -1 for the others.
    """
    prefix = path.removesuffix(".routed_experts")
    local = list(range(layer.local_num_experts)) if layer.expert_map is None else layer.expert_map.tolist()
    own = [place for place in local if place >= 0]
    if own != list(range(layer.local_num_experts)):
        raise NotImplementedError(f"{path}: its experts are placed as {local}, not in their order")
    if stored.joined and not stored.transposed:
        forms = [f"{prefix.removesuffix('.experts')}.{name}_linear.{{}}.weight" for name in ("input", "output")]
    elif stored.transposed or isinstance(layer, GptOssRoutedExperts):
        forms = [f"{prefix}.{{}}.{name}" for name in ("gate_up_proj", "down_proj")]
    else:
        kinds = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        forms = [f"{prefix}.{{}}.{kind}.weight" for kind in kinds if kind]
    return [{form.format(expert): None if place < 0 else place for expert, place in enumerate(local)} for form in forms]


def _kinds(layer: RoutedExperts, stored: Stored) -> list[tuple[str, ...]]:
    """Return which of vLLM's projections each tensor of `expert_names` holds."""
    if stored.joined:
        return [(_GATE, _UP), (_DOWN,)]
    return [(_GATE,), (_UP,), (_DOWN,)] if layer.moe_config.is_act_and_mul else [(_GATE,), (_DOWN,)]


class ExpertLoader:
    """Loads the experts of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._stored = stored = stored_as(model)
        self._places = {
            name + scales: (layer, of, place, f"{'w2' if _DOWN in of else 'w13'}_weight{scales}")
            for path, layer in model.named_modules()
            if isinstance(layer, RoutedExperts)
            for scales in parts_of(layer)
            for of, names in zip(_kinds(layer, stored), _placed(checkpoint_path(model, path), layer, stored), strict=True)
            for name, place in names.items()
        }

    def own(self, names: list[str]) -> tuple[int, int]:
        """Return the range of a stack's tensors that this worker needs: its own experts, or all of what are not experts."""
        if names[0] not in self._places:
            return 0, len(names)
        held = [index for index, name in enumerate(names) if self._places[name][2] is not None]
        return (held[0], held[-1] + 1) if held else (0, 0)

    def holds(self, name: TensorName) -> bool:
        """Whether `load` takes these tensors."""
        return (name if isinstance(name, str) else name[0]) in self._places

    def load(self, name: TensorName, tensor: Tensor) -> bool:
        """Load one expert's tensor, or a stack of the same tensor of consecutive experts, during a layerwise reload.

        Args:
            name: the Hugging Face name, or those of the stack.
            tensor: the whole tensor, not sharded for tensor parallelism. It is read at once and not kept.

        Returns:
            Whether these are experts; if not, nothing has been loaded. Other workers' experts are passed over.
        """
        names, stack = ([name], tensor[None]) if isinstance(name, str) else (name, tensor)
        if not self.holds(name):
            return False
        start, stop = self.own(names)
        if start == stop:
            return True
        names, stack = names[start:stop], stack[start:stop]
        layer, kinds, first, parameter = self._places[names[0]]
        assert first is not None
        if [self._places[one] for one in names] != [(layer, kinds, first + index, parameter) for index in range(len(names))]:
            return all([self.load(*one) for one in each(names, stack)])
        if self._stored.transposed:
            stack = stack.transpose(1, 2)
        info = get_layerwise_info(layer)
        assert info.load_numel_total is not None, "start comes before load"
        materialize_layer(layer, info)
        with CopyCounter() as counter:
            for kind, part in zip(kinds, stack.chunk(len(kinds), 1), strict=True):
                layer._load_model_weight_or_group_weight_scale(
                    shard_dim=2 if kind == _DOWN else 1,
                    expert_data=getattr(layer, parameter).data[first : first + len(names)],
                    shard_id=kind,
                    loaded_weight=part,
                    tp_rank=layer.moe_config.tp_rank,
                )
        info.load_numel += counter.copied_numel
        if info.load_numel >= info.load_numel_total:
            _layerwise_process(layer, info)
        return True
