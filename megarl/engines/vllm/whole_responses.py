"""Send each response from vLLM's core to its front end in one message, instead of one message per token.

vLLM sends sampled tokens to its front end one by one, even if only the final output is requested; sending, decoding and collecting
them (v1/engine/output_processor.py:657) costs a process half as much as the engine's own work. Here the tokens of such a response wait
in the core until it ends. A response with stop texts does not wait, since the front end is what finds these.

Only vLLM's core imports this file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from megarl.upstream.expect import expect


class WholeResponses:
    """The unfinished responses of one core."""

    def __init__(self) -> None:
        self._begun = defaultdict[str, _Response](_Response)

    def install(self) -> None:
        """Patch vLLM's scheduler and core. Must be called before the core creates its scheduler."""
        update = Scheduler.update_from_output
        expect(update, "new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))", "EngineCoreOutputs(outputs=outs)")

        def update_from_output(scheduler: Any, *arguments: Any) -> dict[int, EngineCoreOutputs]:
            messages = update(scheduler, *arguments)
            for message in messages.values():
                message.outputs = self.ended(message.outputs, scheduler.requests)
            self.forget(scheduler.requests)
            return {client: one for client, one in messages.items() if one.outputs or one.scheduler_stats or one.finished_requests}

        def abort(core: Any, names: list[str]) -> None:
            """Abort these requests and send their partial responses; those that have already ended are ignored."""
            for request in core.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED):
                last = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
                core.output_queue.put_nowait((request.client_index, EngineCoreOutputs(outputs=self.ended([last], {}))))

        def counts(core: Any) -> dict[str, int]:
            """Return the number of tokens, prompt and response, of each unfinished request; exact while the scheduler is paused."""
            return {name: request.num_tokens for name, request in core.scheduler.requests.items()}

        Scheduler.update_from_output = update_from_output
        EngineCoreProc.megarl_abort, EngineCoreProc.megarl_counts = abort, counts

    def ended(self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Any]) -> list[EngineCoreOutput]:
        """Keep back the outputs of unfinished responses, and complete those of finished ones.

        Args:
            outputs: the outputs of one step.
            requests: the unfinished requests, by id.

        Returns:
            The outputs to send: those that end a response, with all its earlier tokens, and those of responses that do not wait.
        """
        sent = []
        for output in outputs:
            if output.finish_reason is None and _waits(requests[output.request_id].sampling_params):
                self._begun[output.request_id].add(output)
                continue
            if (response := self._begun.pop(output.request_id, None)) is not None:
                response.add(output)
                response.into(output)
            sent.append(output)
        return sent

    def forget(self, requests: Mapping[str, Any]) -> None:
        """Drop responses that vLLM has ended without an output because its front end has abandoned them."""
        if len(self._begun) > len(requests):
            for name in self._begun.keys() - requests.keys():
                del self._begun[name]


def _waits(parameters: Any) -> bool:
    return parameters.output_kind == RequestOutputKind.FINAL_ONLY and not parameters.stop


class _Response:
    """The outputs of one request so far."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs = [_Rows(), _Rows(), _Rows()]  # the arrays of LogprobsLists
        self._experts = _Rows()
        self._prefill: Any = None

    def add(self, output: EngineCoreOutput) -> None:
        self._tokens += output.new_token_ids
        if output.new_logprobs is not None:
            for rows, more in zip(self._logprobs, output.new_logprobs[:3], strict=True):
                rows.add(more)
        if output.routed_experts is not None:
            self._experts.add(output.routed_experts)
        self._prefill = self._prefill or output.prefill_stats

    def into(self, output: EngineCoreOutput) -> None:
        """Put everything kept into one output."""
        output.new_token_ids, output.prefill_stats = self._tokens, self._prefill
        if self._logprobs[0]:
            output.new_logprobs = LogprobsLists(*(rows.array() for rows in self._logprobs))
        if self._experts:
            output.routed_experts = self._experts.array()


class _Rows:
    """Concatenates rows of equal dtype and shape. Keeps bytes, not arrays, each of which would cost a hundred bytes per token."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def __bool__(self) -> bool:
        return bool(self._bytes)

    def add(self, rows: np.ndarray[Any, Any]) -> None:
        self._bytes += rows.tobytes()
        self._dtype, self._shape = rows.dtype, rows.shape[1:]

    def array(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._bytes, self._dtype).reshape(-1, *self._shape)
