"""Plays an episode of an environment of verifiers, as an agent's command, in a Python that has its packages (written for 0.1.14).

    environment:
      source:
        type: agent
        command: [/venvs/verifiers/bin/python, megarl/environments/hubs/verifiers_agent.py, "wordle", '{"num_train_examples": 100}']
      sandbox: {network: true, readable: [/venvs/verifiers]}

The first argument is the environment's id, or module:Class; the second its arguments, as JSON. The episode's seed chooses the row of its
data set. The file needs nothing of megarl, and prints the reward and the environment's metrics.
"""

import asyncio
import importlib
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

try:
    verifiers: Any = importlib.import_module("verifiers")
    types: Any = importlib.import_module("verifiers.types")
except ImportError as error:
    sys.exit(f"verifiers is missing for {sys.executable}: {error} (pip install verifiers==0.1.14)")


def loaded(name: str, arguments: dict[str, Any]) -> Any:
    """Return the environment of an id, or of a class."""
    module, _, kind = name.partition(":")
    return getattr(importlib.import_module(module), kind)(**arguments) if kind else verifiers.load_environment(name, **arguments)


async def played(environment: Any, seed: int) -> dict[str, float]:
    """Play the row of this seed. Raises RuntimeError if the environment says that it failed."""
    data = environment.get_dataset()
    client = types.ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    output = await environment.run_rollout(data[seed % len(data)], client, os.environ["OPENAI_MODEL"], {})
    if output.get("error"):
        raise RuntimeError(output["error"])
    numbers = {name: float(value) for name, value in (output.get("metrics") or {}).items() if isinstance(value, int | float)}
    return {**numbers, "reward": float(output["reward"])}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        task = json.load(sys.stdin)
        outcome = asyncio.run(played(loaded(sys.argv[1], json.loads((sys.argv[2:] or ["{}"])[0])), task["seed"]))
    print(json.dumps(outcome))
