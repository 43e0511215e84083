"""MLflow: the server, database or folder that MLFLOW_TRACKING_URI names."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar

from megarl.observe.trackers.base import TrackedRun

ID = "megarl.run_id"  # the tag by which another start finds its run, since MLflow chooses its own ids
NOTES = "mlflow.note.content"  # the tag that MLflow shows as the description
MAX_PARAMS, MAX_CHARS = 100, 6000  # MLflow's limits: parameters of one call, characters of a value
CLOSE_S = 60.0  # longest wait at the end for numbers that are still being reported


class Mlflow:
    """The MLflow run that bears the run's id. A thread reports the numbers, so that no step waits for the server.

    `write` and `close` raise what an earlier report has raised.
    """

    package: ClassVar[str] = "mlflow"
    variable: ClassVar[str | None] = "MLFLOW_TRACKING_URI"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        log = run.settings
        self._client = MlflowClient()
        project = self._client.get_experiment_by_name(log.project)
        experiment = self._client.create_experiment(log.project) if project is None else project.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`{ID}` = '{run.id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {ID: run.id, NOTES: log.notes, "group": log.group, **dict.fromkeys(log.tags, "true")}
            created = self._client.create_run(
                experiment, run_name=run.name, tags={key: tag for key, tag in tags.items() if tag is not None}
            )
            self._id = created.info.run_id
            # Parameters can be set only once: what a resumed run changes is in its config.yaml.
            params = [Param(key, json.dumps(value)[:MAX_CHARS]) for key, value in _flat(run.config)]
            for first in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        self._error: Exception | None = None
        self._reports: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._report, name="mlflow", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        now = get_current_time_millis()
        metrics = [Metric(_name(name), value, now, step) for name, value in values.items()]
        self._reports.put(partial(self._client.log_batch, self._id, metrics))
        self._raise()

    def close(self, *, failed: bool) -> None:
        self._reports.put(partial(self._client.set_terminated, self._id, "FAILED" if failed else "FINISHED"))
        self._reports.put(None)
        self._thread.join(CLOSE_S)
        self._raise()
        if self._thread.is_alive():
            raise TimeoutError(f"the last rows were not reported within {CLOSE_S:g} s")

    def _report(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                report()
            except Exception as error:
                self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _name(metric: str) -> str:
    """Return a metric's name in MLflow, which allows no `@`, and whose file store has no room for events/x beside events/x/y."""
    group, slash, rest = metric.partition("/")
    return group + slash + re.sub(r"[^\w\-. :]", "_", rest)


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a configuration and their values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
