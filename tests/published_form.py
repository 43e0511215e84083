"""A tiny Qwen3.5 in the form in which its publisher stores the large ones: beside a model of images, experts in stacks."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIGHT, PREDICTOR = "model.visual.patch_embed.proj.bias", "mtp.fc.weight"


def published(text: Path, out: Path) -> dict[str, Tensor]:
    """Write a text model as a model of text and images with a layer of multi-token prediction.

    Args:
        text: a directory of a tiny qwen3_5 or qwen3_5_moe.
        out: the directory to write.

    Returns:
        The tensors of the text model, which it stands for.
    """
    shutil.copytree(text, out)
    config = json.loads((text / "config.json").read_text())
    architecture, kind = config.pop("architectures")[0].removesuffix("ForCausalLM"), config["model_type"].removesuffix("_text")
    config |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True, "full_attention_interval": 4, "mlp_only_layers": []}
    whole = {"architectures": [f"{architecture}ForConditionalGeneration"], "model_type": kind, "text_config": config}
    whole |= {"image_token_id": 3, "tie_word_embeddings": config["tie_word_embeddings"], "vision_config": {"depth": 1, "hidden_size": 32}}
    (out / "config.json").write_text(json.dumps(whole))
    (out / "preprocessor_config.json").write_text("{}")
    tensors = load_file(text / "model.safetensors")
    stored = {SIGHT: torch.zeros(3), PREDICTOR: torch.ones(2, 2), "mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(4, 2, 2)}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stored[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(config["num_hidden_layers"]):
        for stack, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            experts = f"layers.{layer}.mlp.experts."
            parts = [[tensors.get(f"model.{experts}{n}.{leaf}.weight") for leaf in leaves] for n in range(config.get("num_experts", 0))]
            if parts:
                stored[f"model.language_model.{experts}{stack}"] = torch.stack([torch.cat(own) for own in parts])  # type: ignore[arg-type]
    save_file(stored, out / "model.safetensors")
    return tensors
