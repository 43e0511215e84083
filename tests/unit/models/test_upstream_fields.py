"""What is handed on to Megatron and vLLM: no field that is refused by name has gone upstream."""

from megarl.engines.vllm import arguments
from megarl.models.optimizer_fields import DDP, OPTIMIZER, ddp_fields, optimizer_fields


def test_what_is_refused_by_name_is_there_to_be_refused() -> None:
    for owned, fields in (
        (OPTIMIZER, optimizer_fields()),
        (DDP, ddp_fields()),
        (arguments.OWNED | arguments.ON_CPU, arguments.argument_fields()),
    ):
        assert owned.keys() - fields.keys() == set() and fields.keys() - owned.keys()
