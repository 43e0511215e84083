"""Directories of tiny models whose matrices are quantised as published checkpoints have them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.models.description import ModelDescription

# How quantization_config says it: DeepSeek-V3 and Kimi-K2; Qwen3-FP8, whose scales are bfloat16; GLM-4.5-FP8; one scale for each matrix.
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


SCHEMES: dict[str, tuple[dict[str, Any], str, torch.dtype]] = {
    "blocks": (BLOCKS, "_scale_inv", torch.float32),
    "bfloat16_scales": ({**BLOCKS, "modules_to_not_convert": ["lm_head"]}, "_scale_inv", torch.bfloat16),
    "rows": (_compressed("channel"), "_scale", torch.bfloat16),
    "whole": ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, "_scale_inv", torch.float32),
}


def quantized(source: Path, target: Path, scheme: str = "blocks") -> dict[str, Tensor]:
    """Write the directory quantised; return the numbers that its tensors stand for, each block multiplied by its scale in float32."""
    config, suffix, kind = SCHEMES[scheme]
    shutil.copytree(source, target)
    given = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**given, "dtype": "bfloat16", "quantization_config": config}))
    model = ModelDescription.read(source)
    matrices = {name for weight in model.weights("lm") if weight.linear for name in weight.hf}
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if name not in matrices:
            stored[name] = meant[name] = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()
            continue
        rows, columns = {"rows": (1, tensor.shape[1]), "whole": tensor.shape}.get(scheme, (128, 128))
        strips = [strip.split(columns, 1) for strip in tensor.split(rows, 0)]
        scales = torch.tensor([[float(part.abs().max()) / 448 for part in strip] for strip in strips]).to(kind)
        values, products = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), torch.empty(tensor.shape)
        for i, strip in enumerate(strips):
            for j, part in enumerate(strip):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                values[place] = (part / scales[i, j].float()).to(torch.float8_e4m3fn)
                products[place] = values[place].float() * scales[i, j].float()
        stored[name], stored[name + suffix], meant[name] = values, scales if scheme != "whole" else scales[0, 0], products.bfloat16()
        if scheme == "whole":
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(1.0)
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return meant
