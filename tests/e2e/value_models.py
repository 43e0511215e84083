"""Value models that no training has made."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.data.tokenizer import load_tokenizer


def of_random_taste(policy: Path, out: Path, seed: int) -> Path:
    """The policy's backbone under a random head: a reward model whose scores differ, and mean nothing."""
    tensors = {name: tensor for name, tensor in load_file(policy / "model.safetensors").items() if "lm_head" not in name}
    hidden = next(tensor for name, tensor in tensors.items() if name in ("model.norm.weight", "model.language_model.norm.weight")).numel()
    return _value_model(policy, out, tensors, torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) / hidden**0.5)


def biased_by_position(policy: Path, out: Path, marker: str, scale: float) -> Path:
    """A value model whose value is `scale` times the share of the token `marker` among those so far, about.

    With a token that stands in the prompt once, the value fades as the response grows, whatever the response is. Everything but the
    first layer's attention is zero; that attention is uniform, as its keys are zero, and carries one feature from the embeddings on.
    """
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(policy / "model.safetensors").items() if "lm_head" not in name}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    is_marker, share, always = range(3)  # features of the residual stream; `always` keeps the norms from scaling the others up
    tensors["model.embed_tokens.weight"][:, always] = 1.0
    tensors["model.embed_tokens.weight"][load_tokenizer(policy).convert_tokens_to_ids(marker), is_marker] = 1.0
    tensors["model.layers.0.self_attn.v_proj.weight"][0, is_marker] = 1.0
    tensors["model.layers.0.self_attn.o_proj.weight"][share, 0] = 1.0
    head = torch.zeros(1, tensors["model.norm.weight"].numel())
    head[0, share] = scale / head.numel()
    return _value_model(policy, out, tensors, head)


def _value_model(policy: Path, out: Path, tensors: dict[str, torch.Tensor], head: torch.Tensor) -> Path:
    """A directory like the policy's with other tensors and a scalar head."""
    shutil.copytree(policy, out)
    config = json.loads((policy / "config.json").read_text())
    kind = re.sub("ForCausalLM|ForConditionalGeneration", "ForSequenceClassification", config["architectures"][0])
    changed = config | {"architectures": [kind], "num_labels": 1, "id2label": {"0": "LABEL_0"}}
    (out / "config.json").write_text(json.dumps(changed))
    save_file({**tensors, "score.weight": head}, out / "model.safetensors", metadata={"format": "pt"})
    return out
