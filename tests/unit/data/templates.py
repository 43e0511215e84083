"""Chat templates in the manner of well-known ones, short, and a tokenizer for each."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALLS = (
    "{%- for call in m.tool_calls or [] -%}{%- set call = call.function or call -%}{{ '<tool_call>{\"name\": \"' + call.name + '\", ' }}"
    "{{ '\"arguments\": ' }}{{ call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{ '}</tool_call>' }}{%- endfor -%}"
)
TOOLS = "{%- if tools -%}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{%- endif -%}"
PROMPT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
# Qwen2.5: roles that it does not know are ignored.
CHATML = (
    TOOLS + "{%- for m in messages -%}{%- if m.role in ['system', 'user', 'tool'] -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|im_start|>assistant\n' + (m.content or '') }}" + CALLS + "{{ '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}" + PROMPT
)
# Qwen3: reasoning, also as a part of the content, is written after the last question only, and then always.
QWEN3 = (
    TOOLS + "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- if m.role in ['system', 'user', 'tool'] -%}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' -%}{%- set content = m.content or '' -%}{%- set thought = m.reasoning_content or '' -%}"
    "{%- if '</think>' in content -%}{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last -%}{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif -%}{{ content }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}"
    "{%- endif -%}{%- endfor -%}"
    + PROMPT.replace(
        "{%- endif -%}",
        "{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}{%- endif -%}",
    )
)
THINKING = QWEN3[: QWEN3.rindex(PROMPT[:29])] + "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"
# DeepSeek-R1: the generation prompt opens reasoning, and a finished turn has none. Calls are JSON texts beside `content: null`.
R1 = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|user|>' + m.content }}"
    "{%- elif m.role == 'assistant' and m.tool_calls -%}{{ '<|assistant|>' + ('' if m.content is none else m.content) }}"
    "{%- for call in m.tool_calls -%}{{ call.function.name + ' ' + call.function.arguments }}{%- endfor -%}{{ eos_token }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|><think>\n' }}{%- endif -%}"
)
# Llama 3: any role, all texts trimmed; a call takes the place of the content, and its arguments are an object.
LLAMA3 = (
    "{{ bos_token }}{%- for m in messages -%}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.tool_calls -%}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{%- else -%}{{ m.content | trim }}{%- endif -%}{{ '<|eot_id|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)
# Gemma: no system message, turns that alternate, the assistant is "model", all texts trimmed.
GEMMA = (
    "{{ bos_token }}{%- for m in messages -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('alternate') }}"
    "{%- endif -%}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
# Phi-3: the whole text ends with another token.
PHI3 = (
    "{%- for m in messages -%}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ eos_token }}{%- endif -%}"
)
BARE = (  # no end token at all
    "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
ENDS = {  # the token that ends a turn, and the tokenizer's own
    "chatml": ("<|im_end|>", "<|im_end|>"),
    "qwen3": ("<|im_end|>", "<|im_end|>"),
    "thinking": ("<|im_end|>", "<|im_end|>"),
    "r1": ("<|end|>", "<|end|>"),
    "llama3": ("<|eot_id|>", "<|eot_id|>"),
    "gemma": ("<end_of_turn>", "<|end|>"),
    "phi3": ("<|end|>", "<|pad|>"),
    "bare": ("<|end|>", "<|end|>"),
}
TEMPLATES = {"chatml": CHATML, "qwen3": QWEN3, "thinking": THINKING, "r1": R1, "llama3": LLAMA3, "gemma": GEMMA, "phi3": PHI3, "bare": BARE}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>")


def dressed(tiny: PreTrainedTokenizerBase, name: str) -> Any:
    """The tiny tokenizer with a template and its special tokens."""
    tokenizer: Any = copy.deepcopy(tiny)
    tokenizer.add_special_tokens({"bos_token": "<|bos|>", "extra_special_tokens": [*SPECIAL, "<|user|>", "<|assistant|>", "<|system|>"]})
    tokenizer.eos_token = ENDS[name][1]
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer
