"""Images for vLLM, as megarl has placed them in the prompt and cuts them: the ranks' patches and the ranks' tokens.

vLLM would cut images itself, with transformers' processor of its own choice, and write their tokens into the prompt. Here it is given both,
by content hash, and its processor is replaced by one that knows the sizes of the largest image alone. No torchvision is needed for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.engines.engine import Request, Text
from megarl.images import Image
from megarl.lazy_torch import Tensor, torch
from megarl.models.description import ModelDescription
from megarl.models.image_processor import ImageProcessor

CACHE_GB = 0.5  # of patches in an engine, and of the hashes of these in the process that sends it requests
TOKENS, PATCHES = "megarl_most_tokens", "megarl_patch_numbers"  # keys of `mm_processor_kwargs`
_KIND = "image"


def arguments(model: ModelDescription, processor: ImageProcessor, longest: int) -> dict[str, Any]:
    """Return the engine arguments of a model that sees images.

    Args:
        model: the model.
        processor: its processor.
        longest: the most tokens of a prompt, and so of an image.
    """
    vision = model.sizes.vision
    assert vision is not None
    return {
        "limit_mm_per_prompt": {"image": longest, "video": 0},
        "mm_processor_cache_gb": CACHE_GB,
        "mm_processor_kwargs": {TOKENS: min(longest, processor.most_tokens), PATCHES: vision.pixels},
    }


def install(config: Any) -> None:
    """Let vLLM use `_Given` for the model of a vLLM configuration, if it sees images, in this process."""
    if not config.multimodal_config or TOKENS not in (config.multimodal_config.mm_processor_kwargs or {}):
        return
    from vllm.model_executor.model_loader import get_model_architecture

    register(get_model_architecture(config)[0])


def register(model: type) -> None:
    """Let vLLM use `_Given` for a class of models."""
    from vllm.multimodal.registry import _ProcessorFactories

    from megarl.upstream.expect import expect

    expect(_ProcessorFactories.build_processor, "info = self.info(ctx)", "return self.processor(info, dummy_inputs_builder, cache=cache)")
    model._processor_factory = _ProcessorFactories(info=_Sizes, dummy_inputs=_Largest, processor=_Given)  # type: ignore[attr-defined]


class _Sizes:
    """What vLLM asks before it starts: how many tokens an image has at most."""

    skip_prompt_length_check = False
    supported_mm_limits: Mapping[str, int | None] = {_KIND: None}

    def __init__(self, context: Any) -> None:
        self.ctx = context
        self._multimodal = context.model_config.multimodal_config
        self.allowed_mm_limits = {_KIND: self._multimodal.get_limit_per_prompt(_KIND)}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {_KIND: self._multimodal.mm_processor_kwargs[TOKENS]}

    def get_data_parser(self) -> None:
        return None

    @property
    def default_tok_params(self) -> Any:
        from vllm.renderers import TokenizeParams

        return TokenizeParams(max_total_tokens=self.ctx.model_config.max_model_len)


class _Largest:
    """Stands for the largest images, by which vLLM measures the memory that it needs on a GPU."""

    def __init__(self, sizes: _Sizes) -> None:
        self.sizes = sizes

    def get_dummy_processor_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> int:
        return mm_counts.get(_KIND, 0)


class _Given:
    """In the place of vLLM's processor of a model, which nobody calls with an image."""

    def __init__(self, info: _Sizes, dummy_inputs: _Largest, *, cache: Any = None) -> None:
        self.info, self.dummy_inputs, self.cache = info, dummy_inputs, cache

    def apply(self, count: int, timing_ctx: Any) -> Any:
        """Return so many of the largest images, each in one row."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        configuration = self.info.ctx.model_config
        given, merge = configuration.multimodal_config.mm_processor_kwargs, configuration.hf_config.vision_config.spatial_merge_size
        tokens = given[TOKENS]
        patches_PN = torch.zeros(tokens * merge**2, given[PATCHES])
        images = [item(patches_PN, (1, merge, tokens * merge), merge)] * count
        places = [PlaceholderRange(offset=number * tokens, length=tokens) for number in range(count)]
        hashes = [f"largest {number}" for number in range(count)]
        return mm_input([0] * (tokens * count), {_KIND: images}, {_KIND: hashes}, {_KIND: places})


def item(patches_PN: Tensor, grid: tuple[int, int, int], merge: int) -> Any:
    """Return an image as vLLM's model of Qwen3-VL takes it.

    Args:
        patches_PN: its P patches, of N numbers each.
        grid: patches by frame, row and column.
        merge: patches of the side of a square that becomes one token.
    """
    from transformers import BatchFeature
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems

    fields = BatchFeature({"pixel_values": patches_PN, "image_grid_thw": torch.tensor([grid])})
    return MultiModalKwargsItems.from_hf_inputs(fields, _create_qwen2vl_field_factory(merge)(fields))[_KIND][0]


class ImagePrompts:
    """Makes vLLM's inputs of requests with images.

    Args:
        processor: cuts images as the ranks do.
        token: the model's image token.
        cache: vLLM's cache of what it has been sent, by hash; None: everything is sent each time.
    """

    def __init__(self, processor: ImageProcessor, token: int, cache: Any) -> None:
        self._processor, self._token, self._cache = processor, token, cache

    def prompt(self, request: Request | Text) -> Any:
        """Return the input of a request with images, each of which is cut unless vLLM still has it.

        Raises:
            ValueError: the prompt has other tokens where an image stands, or its file is gone or has changed.
        """
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        end = 0
        for number, placed in enumerate(request.images):
            tokens = request.tokens[placed.start : placed.end]
            if placed.start < end or tokens != [self._token] * placed.image.tokens:
                name = f"request {request.id!r}" if isinstance(request, Request) else "a text to score"
                raise ValueError(
                    f"{name}: image {number} has {placed.image.tokens} tokens from token {placed.start} on, and the prompt "
                    f"has {tokens.count(self._token)} there"
                )
            end = placed.end
        hashes = [key(placed.image) for placed in request.images]
        items = [self._item(placed.image, name) for placed, name in zip(request.images, hashes, strict=True)]
        places = [PlaceholderRange(offset=placed.start, length=placed.image.tokens) for placed in request.images]
        return mm_input(list(request.tokens), {_KIND: items}, {_KIND: hashes}, {_KIND: places})

    def _item(self, image: Image, name: str) -> Any:
        if self._cache is None:
            return item(self._processor.pixels(image), image.grid, image.merge)
        new: Any = None if self._cache.is_cached_item(name) else (item(self._processor.pixels(image), image.grid, image.merge), [])
        return self._cache.get_and_update_item(new, name)[0]


def key(image: Image) -> str:
    """Return the hash by which vLLM knows an image: its content, and how it is cut."""
    return f"{image.digest}-{'x'.join(map(str, image.grid))}"
