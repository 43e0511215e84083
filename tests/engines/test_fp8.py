"""fp8 engines: they hold the trainer's quantised weights bit for bit, and compute what quantised weights and inputs give."""

import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megarl.config import RolloutSettings
from megarl.engines.engine import Setup, WeightSyncError
from megarl.engines.generate import Generated, Sampling
from megarl.engines.vllm import engine as engines
from megarl.models.description import ModelDescription
from megarl.sync.fingerprint import Fingerprinter, Print, compare
from megarl.sync.quantize import as_expected, dequantize, quantize
from tests.engines.engine_host import Host
from tests.engines.test_updates import Corruptible
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, Trainer, generate, logp
from tests.quantized_models import quantized as fp8_directory
from tests.rows import rows
from tools.make_tiny_model import build

SIZES: dict[str, Any] = {"layers": 2, "hidden": 512, "experts": 4, "expert_hidden": 256}  # on two workers, too, each holds whole blocks
KEPT = 13  # tensors that are not quantised: embedding, head, final norm, and four norms and a router in each layer
SAMPLED = Sampling(n=4, temperature=1.0, max_tokens=24, seed=0)
Stream = list[tuple[str, Tensor]]


def stored(path: Path) -> Stream:
    return list(load_file(path / "model.safetensors").items())


def quantized(path: Path, dtype: str, stream: Iterable[tuple[str, Tensor]]) -> Stream:
    """What rank 0 sends of it to a fp8 engine whose other weights have this dtype."""
    model = ModelDescription.read(path)
    return list(as_expected(stream, model.update(dtype, "fp8")))  # type: ignore[arg-type]  # it has no stacks


@asynccontextmanager
async def started(
    path: Path, dtype: str = "float32", tp: int = 1, kind: type[Corruptible] = Corruptible, blank: bool = True, spread: bool = False
) -> AsyncIterator[tuple[Corruptible, Trainer]]:
    settings = RolloutSettings(
        max_prompt_tokens=32, max_response_tokens=24, timeout_s=TIMEOUT_S, kv_cache_mb=64, quantization="fp8", fp32_head=True, tp=tp
    ).model_copy(update={"expert_parallel": spread})
    engine = kind("engine 0")
    await engine.start(Setup(path, dtype, settings, 1, gpu=False, report_experts=True, blank=blank))
    trainer = Trainer(engine, "shm", tp)
    try:
        yield engine, trainer
    finally:
        trainer.close()
        await engine.close()


class QuantizedInputs(TorchFunctionMode):
    """Quantises the inputs of linear layers with one of these weights: e4m3 in groups of 128 columns of each token."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._places, self.calls = {weight.untyped_storage().data_ptr() for weight in weights}, 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and args[1].untyped_storage().data_ptr() in self._places:
            self.calls += 1
            groups = args[0].unflatten(-1, (-1, 128))
            scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
            args = ((groups / scale).to(torch.float8_e4m3fn).float().mul(scale).flatten(-2), *args[1:])
        return func(*args, **(kwargs or {}))


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()


@torch.no_grad()
def dequantized(model: Any) -> list[Tensor]:
    """Round the matrices of its layers, except the routers', as fp8 engines do; return those."""
    named = model.named_parameters()
    rounded = [weight for name, weight in named if name.endswith("_proj.weight") or name.endswith(("gate_up_proj", "down_proj"))]
    for weight in rounded:
        weight.copy_(dequantize(*quantize(weight)))
    return rounded


def gap(model: Any, generated: Sequence[Generated]) -> tuple[float, float]:
    """The mean and the median |log-prob| gap between an engine's samples and transformers."""
    samples = [sample for answer in generated for sample in answer.samples]
    gaps = [torch.from_numpy(one.rollout_logp) - logp(model, one.tokens.tolist(), one.prompt_length, 1.0) for one in samples]
    gap_T = torch.cat(gaps).abs()
    return float(gap_T.mean()), float(gap_T.median())


async def _gaps(model: Path, other: Path, tp: int, spread: bool) -> list[tuple[float, float]]:
    """Of two updates: to the unquantised model, and to transformers with quantised weights and inputs."""
    found = []
    async with started(model, tp=tp, spread=spread) as (engine, trainer):
        for path in (model, other):
            digest = await trainer.update(quantized(model, "float32", stored(path)))
            held = await engine.fingerprints(TIMEOUT_S)
            assert compare(digest, held) == [] and len(digest) == 2 * len(stored(path)) - KEPT
            generated = await generate(engine, PROMPTS, SAMPLED)
            reference = transformers_model(path)
            found.append(gap(reference, generated))
            with QuantizedInputs(dequantized(reference)) as inputs:
                found.append(gap(reference, generated))
            assert inputs.calls > 0
        await engine.sleep(TIMEOUT_S, keep_weights=True)
        await engine.wake("weights", TIMEOUT_S)
        assert await engine.fingerprints(TIMEOUT_S) == held
        await engine.sleep(TIMEOUT_S, keep_weights=False)
        await engine.wake("weights", TIMEOUT_S)
        assert compare(await trainer.update(quantized(model, "float32", stored(model))), await engine.fingerprints(TIMEOUT_S)) == []
        await engine.wake("kv_cache", TIMEOUT_S)
        assert np.isfinite(gap(transformers_model(model), await generate(engine, PROMPTS, SAMPLED))).all()
    return found


@pytest.mark.parametrize(("tp", "spread"), rows([(1, False), (2, False), (2, True)], [(2, True)]), ids=["tp1", "tp2", "tp2-experts-spread"])
def test_an_fp8_engine_computes_what_quantised_weights_and_inputs_give(host: Host, tmp_path: Path, tp: int, spread: bool) -> None:
    """Of most tokens the gap to transformers is float32's. Where a sum in another order lands on the other side of a rounding boundary, the
    step is an e4m3 one; how many tokens that befalls depends on the machine's matrix products, and the mean stays far below the gap of
    the quantisation itself."""
    for name, seed in (("model", 1), ("other", 2)):
        build(tmp_path / name, **SIZES, seed=seed)
    whole, computed, whole_again, computed_again = host.run(_gaps, tmp_path / "model", tmp_path / "other", tp, spread)
    for (unquantised, _), (mean, median) in ((whole, computed), (whole_again, computed_again)):
        assert 0.02 <= unquantised <= 0.5
        assert mean <= unquantised / 10 and median <= 1e-5


def digest_of(stream: Stream) -> dict[str, Print]:
    prints = Fingerprinter()
    for name, tensor in stream:
        prints.add(name, tensor)
    return prints.digest()


async def _reads(path: Path) -> None:
    async with started(path, "bfloat16", tp=2, blank=False) as (engine, _):
        assert compare(digest_of(quantized(path, "bfloat16", stored(path))), await engine.fingerprints(TIMEOUT_S)) == []
        [answer] = (await generate(engine, PROMPTS[:1], SAMPLED))[0].samples[:1]
        assert len(answer.tokens) > answer.prompt_length


def test_an_engine_without_a_trainer_quantises_its_directory_in_the_same_way(host: Host, tmp_path: Path) -> None:
    build(tmp_path / "model", **SIZES, seed=1)
    host.run(_reads, tmp_path / "model")


async def _corruptions(path: Path, tp: int) -> None:
    stream = quantized(path, "float32", stored(path))
    layer = "model.layers.1."
    cases = {
        "fp8_expert": [f"{layer}mlp.experts.3.down_proj.weight"],
        "fp8_expert_scale": [f"{layer}mlp.experts.2.gate_proj.weight_scale_inv"],
        "fp8_kernel_scale": [f"{layer}mlp.experts.2.gate_proj.weight_scale_inv"],
        "fp8_linear": [f"{layer}self_attn.q_proj.weight"],
        "fp8_linear_scale": [f"{layer}self_attn.v_proj.weight_scale_inv"],
    }
    async with started(path, tp=tp) as (engine, trainer):
        for what, names in cases.items():
            digest = await trainer.update(stream)
            await engine._call("megarl_corrupt", what, timeout_s=TIMEOUT_S)
            assert compare(digest, await engine.fingerprints(TIMEOUT_S)) == names


@pytest.mark.parametrize("tp", rows([1, 2], [2]))
def test_a_changed_bit_or_scale_is_named(host: Host, tmp_path: Path, tp: int) -> None:
    build(tmp_path / "model", **SIZES, seed=1)
    host.run(_corruptions, tmp_path / "model", tp)


async def _faulty(path: Path) -> None:
    stream = quantized(path, "float32", stored(path))
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    gate = "model.layers.1.mlp.gate.weight"
    whole = dict(stored(path))
    index = next(place for place, (one, _) in enumerate(stream) if one == name)
    faults: dict[str, Stream] = {
        f"{name}: came as float32, and the engine's model has float8_e4m3fn": [*stream[:index], (name, whole[name])],
        f"{name}_scale_inv: did not come": stream[: index + 1] + stream[index + 2 :],
        f"{gate}: came as float8_e4m3fn, and the engine's model has float32": [(gate, quantize(whole[gate])[0])],
    }
    async with started(path) as (engine, trainer):
        for message, tensors in faults.items():
            with pytest.raises(WeightSyncError, match=message):
                await trainer.update(tensors)
        assert compare(await trainer.update(stream), await engine.fingerprints(TIMEOUT_S)) == []


def test_a_tensor_in_the_wrong_form_is_refused_by_name(host: Host, tmp_path: Path) -> None:
    build(tmp_path / "model", **SIZES, seed=1)
    host.run(_faulty, tmp_path / "model")


def test_a_router_that_vllm_would_quantise_is_refused_even_without_verification(host: Host, tmp_path: Path) -> None:
    """vLLM's Qwen3-MoE does, unless it is told which modules to leave."""
    build(tmp_path / "model", **SIZES, seed=1)
    host.run(_disagreement_of_a_router, tmp_path / "model")


async def _disagreement_of_a_router(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        arguments = engines.engine_arguments

        def all_converted(*given: Any, **named: Any) -> dict[str, Any]:
            made = arguments(*given, **named)
            del made["hf_overrides"]["quantization_config"]["modules_to_not_convert"]
            return made

        patch.setattr(engines, "engine_arguments", all_converted)
        async with started(path) as (_, trainer):
            message = r"^engine 0: model\.layers\.0\.mlp\.gate\.weight: the engine holds it in float8_e4m3fn, and .* would send float32$"
            with pytest.raises(WeightSyncError, match=message):
                await trainer.update(quantized(path, "float32", stored(path)))


async def _family(path: Path, tp: int, stream: Stream) -> list[str]:
    async with started(path, tp=tp) as (engine, trainer):
        first = await trainer.update(stream)
        differing = compare(first, await engine.fingerprints(TIMEOUT_S))
        generated = await generate(engine, PROMPTS, SAMPLED)
        assert all(torch.isfinite(torch.from_numpy(sample.rollout_logp)).all() for one in generated for sample in one.samples)
        return differing


LATENT = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "head_dim": 64}


SUITE: list[tuple[str, int, dict[str, Any]]] = [("glm4_moe", 2, {}), ("qwen2_tied", 1, {}), ("deepseek_v3", 1, LATENT)]


@pytest.mark.parametrize(("family", "tp", "changes"), rows([*SUITE, ("phi3", 2, {}), ("mixtral", 1, {})], SUITE))
def test_every_form_of_layer_holds_what_was_sent(host: Host, tmp_path: Path, family: str, tp: int, changes: dict[str, Any]) -> None:
    """Dense layers and shared experts, biases, one tensor of several projections, tied embeddings, multi-latent attention."""
    build(tmp_path / "model", **SIZES, seed=1, family=family, **changes)
    stream = quantized(tmp_path / "model", "float32", stored(tmp_path / "model"))
    assert host.run(_family, tmp_path / "model", tp, stream) == []


async def _kernels() -> None:
    from megarl.engines.vllm.cpu.fp8 import dequantized_inputs, product

    generator = torch.Generator().manual_seed(1)
    inputs_TC, weight_OC = torch.randn(5, 300, generator=generator), torch.randn(200, 300, generator=generator)
    inputs_TC[2, :128] = 0
    value_OC, scale_IJ = quantize(weight_OC)
    rounded_TC = dequantized_inputs(inputs_TC)
    for token in range(5):
        for start in range(0, 300, 128):
            group, found = inputs_TC[token, start : start + 128], rounded_TC[token, start : start + 128]
            scale = group.abs().max().clamp(min=1e-10) / 448
            assert torch.equal(found, (group / scale).to(torch.float8_e4m3fn).float() * scale)
    wanted_TO = rounded_TC.double() @ dequantize(value_OC, scale_IJ).double().T
    assert torch.allclose(product(inputs_TC, value_OC, scale_IJ).double(), wanted_TO, atol=1e-4)


def test_the_kernel_of_a_cpu_is_the_sum_of_rounded_products(host: Host) -> None:
    host.run(_kernels)


async def _experts() -> None:
    """Each token's experts in any order; those that an expert map gives to another worker are left to it."""
    from types import SimpleNamespace

    from megarl.engines.vllm.cpu.fp8 import TorchBlockExperts, product

    generator = torch.Generator().manual_seed(1)
    w13, s13 = quantize(torch.randn(4, 512, 128, generator=generator))
    w2, s2 = quantize(torch.randn(4, 128, 256, generator=generator))
    hidden_TC, weight_TK = torch.randn(6, 128, generator=generator), torch.rand(6, 2, generator=generator)
    expert_TK = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3], [1, 2]], dtype=torch.int32)

    def computed(first: int, expert_map: Tensor | None) -> Tensor:
        experts = TorchBlockExperts.__new__(TorchBlockExperts)
        held = slice(first, first + (4 if expert_map is None else 2))
        experts.quant_config = SimpleNamespace(w1_scale=s13[held], w2_scale=s2[held])
        output = torch.empty(6, 128)
        nothing = torch.empty(0)
        experts.apply(
            output, hidden_TC, w13[held], w2[held], weight_TK, expert_TK, "silu", 4, expert_map, None, None, nothing, nothing, None, False
        )
        return output

    wanted = torch.zeros(6, 128)
    for token in range(6):
        for slot in range(2):
            expert = int(expert_TK[token, slot])
            gate, up = product(hidden_TC[token : token + 1], w13[expert], s13[expert]).chunk(2, -1)
            wanted[token] += weight_TK[token, slot] * product(torch.nn.functional.silu(gate) * up, w2[expert], s2[expert])[0]
    assert torch.allclose(computed(0, None), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    halves = computed(0, torch.tensor([0, 1, -1, -1], dtype=torch.int32)) + computed(2, torch.tensor([-1, -1, 0, 1], dtype=torch.int32))
    assert torch.allclose(halves, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_experts_of_other_workers_are_left_to_them(host: Host) -> None:
    host.run(_experts)


async def _published(plain: Path, path: Path, quantization: Literal["fp8"] | None) -> None:
    settings = RolloutSettings(
        max_prompt_tokens=32, max_response_tokens=24, timeout_s=TIMEOUT_S, kv_cache_mb=64, quantization=quantization, fp32_head=True
    )
    held = []
    for place in (path, plain):
        engine = Corruptible("engine 0")
        await engine.start(Setup(place, "float32", settings, 1, gpu=False, report_experts=True, blank=False))
        try:
            generated = await generate(engine, PROMPTS, SAMPLED)
            held.append(
                (await engine.fingerprints(TIMEOUT_S), [sample.tokens.tolist() for answer in generated for sample in answer.samples])
            )
        finally:
            await engine.close()
    assert held[0] == held[1]


@pytest.mark.parametrize("quantization", rows([None, "fp8"], ["fp8"]))
def test_an_engine_of_a_published_fp8_directory_holds_what_that_means(
    host: Host, tmp_path: Path, quantization: Literal["fp8"] | None
) -> None:
    """As an engine of the bfloat16 directory does that it stands for, whichever of them is quantised."""
    build(tmp_path / "made", **SIZES, seed=1)
    meant = fp8_directory(tmp_path / "made", tmp_path / "fp8")
    shutil.copytree(tmp_path / "made", tmp_path / "plain")
    save_file(meant, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    host.run(_published, tmp_path / "plain", tmp_path / "fp8", quantization)
