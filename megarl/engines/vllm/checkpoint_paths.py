"""Where checkpoints call a model's modules otherwise than vLLM does.

Only vLLM's own processes import this file.
"""

from torch import nn
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.model_executor.models.granitemoe import GraniteMoeForCausalLM
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

from megarl.models.vision import TEXT

# vLLM's -> the checkpoint's, as in the models' hf_to_vllm_mapper.
_NAMES: dict[type[nn.Module], dict[str, str]] = {
    GptOssForCausalLM: {"attn": "self_attn", "embedding": "embed_tokens"},
    GraniteMoeForCausalLM: {"gate": "router.layer"},
    NemotronHForCausalLM: {"model": "backbone", "embed_tokens": "embeddings"},
    DeepSeekMTP: {"mtp_block": ""},
}


def checkpoint_path(model: nn.Module, path: str) -> str:
    """Return a checkpoint's path of one of vLLM's modules."""
    if supports_multimodal(model):  # of vLLM's models of images only those of which `models.vision` is true are run
        start, _, rest = path.partition(".")
        return f"model.{path}" if start == "visual" else rest.replace("model.", TEXT, 1)
    names = {"base_layer": "", **_NAMES.get(type(model), {})}  # a layer with adapters has the one without them in it
    return ".".join(name for part in path.split(".") if (name := names.get(part, part)))
