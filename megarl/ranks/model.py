"""One model on the ranks of the grid, frozen or trained: forward passes over batches, and optimizer steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megarl.batch import Batch
from megarl.checkpoints.files import Content
from megarl.checkpoints.steps import trusted
from megarl.config import Layout, LoraSettings, ModelSettings, OptimizerSettings
from megarl.host.parking import Parking
from megarl.models.adapters import adapted, factor_weights, peft_config, target_of
from megarl.models.description import ModelDescription
from megarl.models.hf_writer import described
from megarl.models.image_processor import ImageProcessor
from megarl.models.predictors import KEPT
from megarl.observe.metrics import Max, Metric
from megarl.parallel import schedule
from megarl.parallel.backend import Backend
from megarl.parallel.build import DTYPES, build_chunks, transformer_config
from megarl.parallel.checkpoint.load import load
from megarl.parallel.checkpoint.state import ModelState
from megarl.parallel.export import export_stacks, export_weights, print_of_base, save_hf
from megarl.parallel.grid import Grid
from megarl.parallel.lora import factor_parameters, put_adapters, settings_of, without_adapters
from megarl.parallel.muon import matrices_of
from megarl.parallel.optimizer import StepInfo, Trainable, make_trainable
from megarl.parallel.predictor import PredictorPass
from megarl.parallel.routing import Routing, RoutingPass
from megarl.parallel.weights import load_hf, local_parameters, weight_buffers
from megarl.ranks.speed import speed, training_flops
from megarl.sync.fingerprint import Fingerprinter, Print
from megarl.sync.quantize import as_expected
from megarl.sync.wire import each

# (logits [R, V], or values [R, 1] of a value model; the entries' rows on the R axis; the entries) -> one number per entry [T], or a row
OutputReader = Callable[[Tensor, Tensor, Batch], Tensor]


class Model:
    """This rank's part of a model loaded from a Hugging Face directory."""

    def __init__(
        self,
        path: Path,
        settings: ModelSettings,
        layout: Layout,
        backend: Backend,
        grid: Grid,
        *,
        head: Literal["lm", "value"] = "lm",
        optimizer: OptimizerSettings | None = None,
        updates: int = 0,
        blank: bool = False,
        lora: LoraSettings | None = None,
    ) -> None:
        """Build the model, and load its weights unless it is `blank`. Collective.

        Args:
            path: the Hugging Face directory.
            settings: dtype and Megatron's fields; `weights` replaces the weights of a language model at `settings.path`.
            layout: the parallel layout of the ranks.
            backend: the hardware backend.
            grid: this rank's grid.
            head: "value" puts a scalar head in the place of the output layer.
            optimizer: the optimizer's settings; None: the model is frozen.
            updates: optimizer steps of the whole run, for the learning-rate schedule.
            blank: read no weights, since a checkpoint is loaded next. Until then they are NaN. With `lora` they are read.
            lora: put adapters beside the weights, which are then frozen.
        """
        self._grid, self._backend = grid, backend
        self._weights_parking, self._training_parking = Parking(backend.parking_buffer), Parking(backend.parking_buffer)
        self._head, self._tower = head, settings.vision == "train"
        mtp = "drop" if head != "lm" or settings.mtp is None else settings.mtp
        if mtp == "train" and optimizer is None:  # of a frozen model it is kept
            mtp = "keep"
        self.description = ModelDescription.read(path, mtp=mtp, drop_images=settings.drop_images)
        self._mtp_loss_weight = settings.mtp_loss_weight
        self._config = transformer_config(self.description, settings, layout, backend)
        images = None if self.description.sizes.vision is None else ImageProcessor(path, settings.min_pixels, settings.max_pixels)
        cut = {} if images is None or settings.min_pixels is settings.max_pixels is None else images.cut
        self._pixels = (cut["min_pixels"], cut["max_pixels"]) if cut else None  # what is saved is to see as it has seen here
        self._modules: list[Any] = build_chunks(
            self._config,
            self.description,
            backend,
            grad=optimizer is not None and lora is None,
            head=head,
            fp32_head=settings.fp32_head,
            adapted=lora is not None,
            images=images,
            tower=settings.vision == "train",
        )
        if blank and lora is None:
            for module in self._modules:
                for _, tensor in (*module.named_parameters(), *weight_buffers(module)):
                    tensor.data.fill_(torch.nan)
        elif settings.weights is not None and path == settings.path and head == "lm":
            load(trusted(settings.weights), {"policy": ModelState(self._modules, self.description)}, grid)
        else:
            load_hf(self._modules, self.description, grid)
        self._lora: dict[str, Any] | None = None  # what a checkpoint says of the adapters
        self._active = True  # the adapters, if there are any
        if lora is not None:
            self._lora = {
                **lora.model_dump(include={"rank", "alpha", "targets"}),
                "base": print_of_base(self._modules, self.description, grid),
            }
            put_adapters(self._modules, self.description, lora, grid)
        self._trainable: Trainable | None = None
        if optimizer is not None:
            matrices = matrices_of(self._modules, self.description, grid, optimizer.muon)
            self._trainable = make_trainable(self._modules, optimizer, updates, matrices)
        self.chunks = self._trainable.chunks if self._trainable is not None else self._modules
        self.routing = Routing(self.chunks, grid)
        self.topk = int(self._config.moe_router_topk) if self._config.num_moe_experts else 0  # experts per token; 0: a dense model
        self.layers = int(self._config.num_layers)  # of the whole model
        dtype, labels = str(self._config.params_dtype).removeprefix("torch."), self.description.labels(head)
        self._described: dict[str, Content] = {}
        if optimizer is not None and grid.rank == 0:
            files = described(path, dtype, labels, trained=True, drop_images=settings.drop_images, pixels=self._pixels)
            self._described = {**files}
            if self.description.predictors is not None and lora is None:  # a checkpoint of adapters has no weights of the base
                self._described[KEPT] = self.description.predictors

    @property
    def base(self) -> Model:
        """The same model without its adapters: their reference, whose weights are this model's own."""
        assert self._lora is not None
        base = copy.copy(self)
        base._active = False
        return base

    def forward_tokens(self, batches: Sequence[Batch], name: str, read: OutputReader, routing: RoutingPass | None = None) -> list[Batch]:
        """Run the model forward and compute one number per token, or a row of several, from its output. Collective.

        Args:
            batches: micro-batches of whole sequences, the same list on all ranks of a data-parallel replica.
            name: the numbers' name in `extra_T`.
            read: computes the numbers [T] from the output.
            routing: follows this model's routers.

        Returns:
            The batches with `extra_T[name]` [T]: the numbers of this rank's entries, NaN for entries of other ranks.

        Raises:
            FloatingPointError: a number is not finite at a loss token.
            RoutingError: experts should have been replayed but were not.
        """

        def loss_fn(output_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            value_T = read(output_RV, row_T, batch)
            if not value_T[batch.mask_T].isfinite().all():  # readers take NaN to mean "on another rank"
                raise FloatingPointError(f"{name}: {self.description.path} gives a number that is not finite")
            return value_T.sum(), (batch.extra_T["entry"], value_T)

        numbered = [batch.with_extra(entry=torch.arange(len(batch))) for batch in batches]
        with nullcontext() if self._active else without_adapters(self.chunks):
            results = iter(schedule.run(self.chunks, numbered, loss_fn, self._grid, forward_only=True, routing=routing))
        if routing is not None:
            routing.check()
        filled = []
        for batch in batches:
            value_T = torch.full((len(batch),), torch.nan)
            if len(batch) and self._grid.is_last_stage:
                entry_T, found_T = next(results)
                value_T = torch.full((len(batch), *found_T.shape[1:]), torch.nan)
                value_T[entry_T] = found_T.cpu()
            filled.append(batch.with_extra(**{name: value_T}))
        return filled

    def step(self, batches: Sequence[Batch], loss_fn: schedule.LossFn, routing: RoutingPass | None = None) -> tuple[list[Any], StepInfo]:
        """Take one optimizer step on the sum of the micro-batches' losses.

        Args:
            batches: the micro-batches of this data-parallel rank.
            loss_fn: (logits, rows, batch) -> a 0-dim loss, and a result to return with it.
            routing: follows this model's routers.

        Returns:
            The results that `loss_fn` returned on the last stage, one per micro-batch, then the metrics of a multi-token prediction layer,
            if there is one, and the optimizer's report of the step.

        Raises:
            FloatingPointError: the gradient is not finite; the weights are as before.
            RoutingError: experts were not replayed; the weights are as before.
        """
        assert self._trainable is not None, "a frozen model takes no steps"
        begun = time.perf_counter()
        self._trainable.zero_grad()
        predictor = self.predictor_pass()
        results = schedule.run(self.chunks, batches, loss_fn, self._grid, forward_only=False, routing=routing, predictor=predictor)
        if routing is not None:
            routing.check()
        if predictor is not None:
            results += predictor.results
        info = self._trainable.step()
        self._backend.synchronize()
        self._seconds = time.perf_counter() - begun
        if info.skipped:
            raise FloatingPointError(f"update: {info.norms}; the weights are as before this step")
        return results, info

    def predictor_pass(self) -> PredictorPass | None:
        """Let the multi-token prediction layer take part in a run over micro-batches; None: there is none. Collective."""
        if not self.description.predicts:
            return None
        self._wait_for_weights()  # the embedding may be sent to another stage before a forward pass
        return PredictorPass(self.chunks, self._grid, self.description.vocab, self._mtp_loss_weight)

    def performance(self, batches: Sequence[Batch], *, report: bool) -> dict[str, Metric]:
        """Return the speed of the last step, which was on these batches, and this rank's peak memory, as metrics.

        `report` says whether this rank reports the speed of its data-parallel replica, whose work is split equally over the
        context-parallel ranks.
        """
        memory: dict[str, Metric] = {f"perf/memory_{kind}_gb/max": Max(size) for kind, size in self._backend.peak_memory_gb().items()}
        if not report:
            return memory
        lengths = [length for batch in batches for length in batch.contexts()[1].tolist()]
        images = [one.image for batch in batches for own in batch.seen() for one in own]
        flops = training_flops(self.description, self._head, lengths, images, tower=self._tower)
        dtype = str(self._config.params_dtype).removeprefix("torch.")
        return memory | speed(flops, self._grid.world // self._grid.dp_size, self._seconds, self._backend.name, dtype)

    def park(self) -> None:
        """Move weights and optimizer off the device. Call `wake` before the model is used again."""
        self._wait_for_weights()
        self._weights_parking.park(self._weights())  # first: in float32 the optimizer has no copies of the weights, but these
        if self._trainable is not None:
            self._park_training(self._trainable.state())
        self._backend.empty_cache()

    def park_training(self) -> None:
        """Move all but the weights off the device, and the weights onto it if they are parked: enough for `stream`."""
        self._wait_for_weights()
        if self._trainable is not None:
            weights = {weight.untyped_storage()._cdata for weight in self._weights()}
            self._park_training([state for state in self._trainable.state() if state.untyped_storage()._cdata not in weights])
        self._backend.empty_cache()
        self._weights_parking.wake()
        self._backend.synchronize()

    def wake(self) -> None:
        """Move the model back to the device if it was parked."""
        self._weights_parking.wake()
        self._training_parking.wake()
        self._backend.synchronize()

    def _weights(self) -> list[Tensor]:
        return [weight for module in self._modules for weight in (*module.parameters(), *module.buffers())]

    def _park_training(self, state: list[Tensor]) -> None:
        assert self._trainable is not None
        self._training_parking.park(self._trainable.gradients(), keep=False)
        self._training_parking.park(state)

    def stream(self, dtype: str | None, *, by_stage: bool, by_expert_rank: bool = False, drafts: bool = False) -> Any:
        """Stream the weights that engines have as (Hugging Face name, tensor); every rank must iterate to the end.

        Args:
            dtype: their dtype; None: the model's.
            by_stage: each pipeline stage's on its first rank, instead of all on rank 0.
            by_expert_rank: experts on the first rank of the stage that has them.
            drafts: they draft with the multi-token prediction layer.
        """
        self._wait_for_weights()
        kind = DTYPES[dtype] if dtype else self._config.params_dtype
        description = self.description if drafts else self.description.trunk
        return export_stacks(self.chunks, description, self._grid, kind, by_stage=by_stage, by_expert_rank=by_expert_rank)

    def adapter_stream(self, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        """Stream the adapters' factors on rank 0, by PEFT's names, with their scale in B; every rank must iterate to the end.

        Args:
            dtype: their dtype; None: the model's.
        """
        self._wait_for_weights()
        settings, kind = settings_of(self.chunks), DTYPES[dtype] if dtype else self._config.params_dtype
        assert settings is not None, "a model without adapters"
        weights = factor_weights(adapted(self.description, settings).values())
        scale = settings.alpha / settings.rank
        for names, stack in export_weights(weights, factor_parameters(self.chunks), self._grid, torch.float32):
            for name, tensor in each(names, stack):
                yield name, (tensor * scale if name.endswith(".lora_B.weight") else tensor).to(kind)

    @property
    def adapter_config(self) -> dict[str, Any]:
        """PEFT's adapter_config.json of `adapter_stream`."""
        settings = settings_of(self.chunks)
        assert settings is not None, "a model without adapters"
        parts = adapted(self.description, settings).values()
        targets = (target_of(weight, one) for weight, factors in parts for one in factors)
        return peft_config(settings.model_copy(update={"alpha": settings.rank}), str(self.description.directory), targets)

    def base_prints(self, dtype: str | None) -> dict[str, Print]:
        """Return on rank 0 the fingerprints of the weights without adapters. Collective."""
        kind, prints = DTYPES[dtype] if dtype else self._config.params_dtype, Fingerprinter()
        weights = [weight for weight in self.description.weights(self._head) if not weight.alias]
        for names, stack in export_weights(weights, local_parameters(self.chunks, self._grid.ep_rank), self._grid, kind):
            prints.add(names, stack)
        return prints.digest()

    def quantized(self, stream: Any, dtype: str | None, quantization: str) -> Any:
        """Quantise a weight stream on the rank that sends it.

        Args:
            stream: from `stream`, in the model's dtype.
            dtype: the dtype of the engines' weights that are not quantised; None: the model's.
            quantization: `rollout.quantization`.

        Returns:
            The stream that engines of this quantisation expect.
        """
        rest = dtype or str(self._config.params_dtype).removeprefix("torch.")
        return as_expected(stream, self.description.trunk.update(rest, quantization))

    def saved(self) -> ModelState:
        """Return the state of the model and its optimizer, as saved in a checkpoint. Collective."""
        self._wait_for_weights()
        return ModelState(self.chunks, self.description, self._trainable, self._described, lora=self._lora)

    def save(self, target: Path) -> None:
        """Write the model as a Hugging Face directory, with adapters merged and as a PEFT directory inside. Collective."""
        self._wait_for_weights()
        save_hf(self.chunks, self.description, self._grid, target, self._pixels)

    def _wait_for_weights(self) -> None:
        if self._trainable is not None:
            self._trainable.wait_for_weights()
