"""Import vLLM on a CPU without modules an engine there never uses, which take two fifths of `megarl generate`'s CPU time on a tiny model.

With TORCH_COMPILE_DISABLE torch compiles nothing; an engine that is given tokens reads no chats, tool calls or images, and loads models
with vLLM's own code. vLLM nevertheless imports torch's compilers, the parsers and packages of a chat server, image fetching and
transformers' model loading.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.light_transformers import light_transformers


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that returns what it decorates unchanged."""
    return function if callable(function) else _as_it_is


class _Unused:
    """A stand-in for a class that is only inherited from, caught, or used by features that are never switched on."""


LATER = object()  # stands for a function that imports the real module when it is called

# By module: the names that vLLM 0.30.0 and transformers 5.19.0 import from it at their own import, and where they do.
STAND_INS: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "allow_in_graph": _as_it_is,  # transformers/modeling_utils.py:1169, through torch.compiler
        "assume_constant_result": _as_it_is,  # transformers/integrations/deepgemm.py:143
        "disable": _as_it_is,  # transformers/generation/continuous_batching/cache.py:392, through torch.compiler
    },
    "torch._dynamo.symbolic_convert": {"InliningInstructionTranslator": _Unused},  # vllm/compilation/decorators.py:15
    "torch._inductor.custom_graph_pass": {"CustomGraphPass": _Unused},  # vllm/compilation/passes/inductor_pass.py:22
    "torch._inductor.runtime.triton_helpers": {"libdevice": None},  # vllm/v1/worker/gpu/metrics/logits.py:4, for GPUs
    "vllm.env_override": {},  # vllm/__init__.py:14: patches for the compilers
    "vllm.reasoning": {"ReasoningParserManager": _Unused},  # vllm/config/reasoning.py:8, vllm/v1/structured_output/__init__.py:11
    "vllm.parser.engine.adapters": {"ParserEngineReasoningAdapter": _Unused},  # vllm/v1/structured_output/__init__.py:10
    "vllm.entrypoints.chat_utils": {  # vllm/renderers/hf.py:23
        "PROMPT_EMBEDS_PLACEHOLDER_TOKEN": "",
        "ChatTemplateResolutionError": _Unused,
        "load_chat_template": LATER,
        "parse_chat_messages": LATER,
        "parse_chat_messages_async": LATER,
    },
    "vllm.entrypoints.serve.elastic_ep.middleware": {"set_scaling_elastic_ep": LATER},  # vllm/v1/engine/async_llm.py:21
    # transformers' model loading, which imports torch's DTensor and sympy.
    "transformers.conversion_mapping": {  # transformers/integrations/hub_kernels.py:26
        "get_checkpoint_conversion_mapping": LATER,
        "register_checkpoint_conversion_mapping": LATER,
    },
    "transformers.generation.utils": {"GenerationMixin": _Unused},  # transformers/models/auto/auto_factory.py:41
    "vllm.model_executor.layers.quantization.compressed_tensors.utils": {  # vllm/model_executor/layers/quantization/online/base.py:33
        "should_ignore_layer": LATER,
    },
    # Vision models.
    "transformers.models.auto.image_processing_auto": {"get_image_processor_config": LATER},  # vllm/transformers_utils/config.py:21
    "vllm.transformers_utils.processor": {
        "cached_get_processor": LATER,  # vllm/renderers/hf.py:49
        "cached_processor_from_config": LATER,  # vllm/multimodal/processing/context.py:23
        "get_processor": LATER,  # vllm/model_executor/models/vision.py:22, like the next
        "get_processor_config": LATER,
    },
    "vllm.multimodal.media.connector": {
        "MEDIA_CONNECTOR_REGISTRY": None,  # vllm/multimodal/media/__init__.py:5, like the next
        "MediaConnector": _Unused,
        "merge_media_io_kwargs": LATER,  # vllm/renderers/params.py:9
    },
    "vllm.connections": {"global_http_connection": None},  # vllm/assets/base.py:8: fetches images
    "cpuinfo": {},  # vllm/usage/usage_lib.py:16: for usage reports to vLLM's developers, which VLLM_NO_USAGE_STATS switches off
}


@contextmanager
def light_import() -> Iterator[None]:
    """Put the STAND_INS in place for a block that imports vLLM with TORCH_COMPILE_DISABLE set; later imports get the real modules.

    Importing a name that a stand-in lacks fails inside the block, so that another version of vLLM reveals what it needs.
    """
    stand_ins = {name: _module(name, names) for name, names in STAND_INS.items() if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        # Otherwise vllm/model_executor/model_loader/reload/meta.py:157 is hidden from the compiler (torch/utils/_python_dispatch.py:115).
        undispatched = patch.object(TorchDispatchMode, "_should_skip_dynamo", lambda: False)
        with _folders_read_once(), patch.object(torch, "compile", _as_it_is), undispatched:
            yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        vars(sys.modules.get("transformers.generation", sys)).pop("GenerationMixin", None)  # transformers caches the stand-in there
    if "torch._dynamo" in stand_ins:
        torch._dynamo = _Dynamo()  # replaced when the real module is imported
    torch._check_with = _check_with


@contextmanager
def _folders_read_once() -> Iterator[None]:
    """Cache transformers' scan of its thousand model files for names, which it does twice (__init__.py:814, models/__init__.py:552)."""
    with light_transformers():
        from transformers.utils import import_utils
    read = import_utils.create_import_structure_from_path
    with patch.object(import_utils, "create_import_structure_from_path", cache(read)):
        yield


def _check_with(error_type: Any, cond: bool | torch.SymBool, message: Callable[[], str], in_full: Any = torch._check_with) -> None:
    """Pass if `cond` is True; torch/__init__.py:1726 imports sympy even to test that, at an engine's first token (sampler.py:349)."""
    if cond is not True:
        in_full(error_type, cond, message)


class _Dynamo:
    """The value of torch._dynamo until it is imported. vLLM's sampler calls it for every token to mark dynamic sizes (sampler.py:347)."""

    def __getattr__(self, name: str) -> Any:
        if name == "decorators" and "torch._dynamo" not in sys.modules:
            return _Decorators()
        return getattr(importlib.import_module("torch._dynamo"), name)


class _Decorators:
    """The value of torch._dynamo.decorators until torch._dynamo is imported."""

    def mark_unbacked(self, *_: Any) -> None:
        """Do nothing: no compiler reads the mark."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo.decorators"), name)


def _module(name: str, names: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({one: _later(name, one) if what is LATER else what for one, what in names.items()})
    return module


def _later(module: str, name: str) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    return call
