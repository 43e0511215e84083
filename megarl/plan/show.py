"""The tables of a plan."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from megarl.plan.devices import GB, IMBALANCE, MEAN_LENGTH, NETWORK_SHARE, PREFILL_MFU, STREAM_SHARE, TRAIN_MFU
from megarl.plan.ranks import GroupMemory
from megarl.plan.search import FittingLayout
from megarl.plan.whole import Plan

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "working set", "sync", "sync buckets", "context")


def tables(plan: Plan, layouts: Sequence[FittingLayout], closest: str | None = None) -> Iterator[Table | str]:
    """What `megarl plan` prints, from top to bottom.

    Args:
        plan: the plan of the configuration.
        layouts: the result of `search`.
        closest: the result of `nearest`, if nothing fits.
    """
    ranks = sum(group.layout.ranks for group in plan.groups)
    engines, other = f"{plan.engines} for engines", plan.device.engines
    engines += f": {other.name} of {plan.engine_memory / GB:g} GB" if other is not None else ", the same ones" if plan.shared else ""
    where = f"{ranks} for ranks" + (f", {engines}" if plan.engines else "")
    where += f", {plan.teaching} for teachers' engines" if plan.teaching else ""
    yield (
        f"{plan.architecture}: {plan.parameters / 1e9:.1f} B parameters, {plan.active / 1e9:.1f} B active; {plan.gpus} GPUs of "
        f"{plan.memory / GB:g} GB ({where}). GB are 10^9 bytes."
    )
    for group in plan.groups:
        yield _group(group, plan.memory)
    if plan.engine is not None:
        yield _engine(plan)
    if plan.teachers:
        yield _teachers(plan)
    if plan.host is not None:
        yield _host(plan)
    if plan.times is not None:
        yield _times(plan)
        yield _assumptions(plan)
    if layouts:
        yield _found(layouts)
        yield from (f"{number}: {' '.join(one.changes) or 'the configuration as it is'}" for number, one in enumerate(layouts, 1))
    yield from (f"assumed: {note}" for note in plan.notes)
    if plan.host is not None and plan.host.payload.warning is not None:
        yield f"warning: {plan.host.payload.warning}"
    yield from (f"does not fit: {fault}" for fault in plan.faults)
    if closest is not None:
        yield f"no layout fits these GPUs; the nearest, {closest}"
    if not plan.faults:
        yield "fits"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _group(group: GroupMemory, memory: float) -> Table:
    layout, stages, worst = group.layout, group.stages, group.worst
    parts = [part for part in PARTS if any(part in stage.parts for stage in stages)]
    shape = ", ".join(
        f"{key} {getattr(layout, key)}" for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp") if getattr(layout, key) not in (1, None)
    )
    table = _table(
        f"GB on a rank of {group.name}: {layout.ranks} ranks, {shape}", "stage", "rank", "parameters", "phase", *parts, "sum", ""
    )
    for stage in stages:
        sizes = [f"{stage.parts[part] / GB:.1f}" if part in stage.parts else "" for part in parts]
        mark = ("> " if stage.total > memory else "") + ("worst" if stage is worst else "")
        table.add_row(
            str(stage.stage), str(stage.rank), f"{stage.parameters / 1e9:.2f} B", stage.phase, *sizes, f"{stage.total / GB:.1f}", mark
        )
    return table


def _engine(plan: Plan) -> Table:
    engine = plan.engine
    assert engine is not None
    table = _table(
        f"GB on a GPU of an engine: {plan.engines // engine.devices} engines of {_shape(engine.tp, engine.dp)}",
        *("share", "weights", "buffers", "keys, values", "live sequences of an engine", "for each GPU", "weight update"),
    )
    table.add_row(
        f"{plan.engine_memory * engine.share / GB:.1f}",
        f"{engine.weights / GB:.1f}",
        f"{engine.overhead / GB:.1f}",
        f"{engine.cache / GB:.1f}",
        f"{engine.live:.0f} of {engine.longest} tokens",
        f"{engine.live / engine.devices:.1f}",
        f"{plan.receiver / GB:.1f}",
    )
    return table


def _teachers(plan: Plan) -> Table:
    table = _table(
        f"GB on a GPU of a teacher's engine: {plan.teaching} GPUs", "teacher", "tp", "share", "weights", "buffers", "keys, values"
    )
    for name, one in plan.teachers.items():
        sizes = (plan.memory * one.share, one.weights, one.overhead, one.cache)
        table.add_row(name, str(one.tp), *(f"{size / GB:.1f}" for size in sizes))
    return table


def _shape(tp: int, dp: int) -> str:
    """The size of an engine."""
    return f"tp {tp}" + f", dp {dp}" * (dp > 1)


def _host(plan: Plan) -> Table:
    host = plan.host
    assert host is not None
    table = _table(
        "GB of host memory on a node",
        "processes",
        "checkpoint staging",
        "waiting models",
        "experts",
        "object store",
        "sum",
        "a step's payload",
    )
    table.add_row(
        f"{(host.ranks + host.engines) / GB:.0f}",
        f"{host.staging / GB:.0f}",
        f"{host.waiting / GB:.0f}",
        f"{host.routes / GB:.1f}",
        f"{host.store / GB:.1f}",
        f"{host.total / GB:.0f}",
        f"{host.payload.step / GB:.1f}"
        + (f" x {host.payload.batches} steps" if host.payload.batches > 1 else "")
        + (", and it spills" if host.payload.warning else ""),
    )
    return table


def _times(plan: Plan) -> Table:
    times = plan.times
    assert times is not None
    title = "seconds of a step" + (": the longer of generate and of score + update + park, and sync" if times.ahead else "")
    table = _table(title, "generate", "score", "update", "sync", "park", "step")
    table.add_row(*(f"{value:.0f}" for value in (times.generate, times.score, times.update, times.sync, times.park, times.step)))
    return table


def _assumptions(plan: Plan) -> str:
    kinds = "; ".join(
        f"{one.name} of {one.flops / 1e12:.0f} TFLOP/s x {TRAIN_MFU} (prompts {PREFILL_MFU}), {one.bandwidth / 1e12:.1f} TB/s x "
        f"{STREAM_SHARE}, {one.link / 1e9:.0f} GB/s in a node and {one.network / 1e9:.0f} between nodes x {NETWORK_SHARE}"
        for one in (plan.device, plan.device.engines)
        if one is not None
    )
    return f"assumed, and not measured: {kinds}; mean lengths {MEAN_LENGTH} of the longest; busiest experts {IMBALANCE} of the mean"


def _found(layouts: Sequence[FittingLayout]) -> Table:
    engines = ["GB node", "engines", "live"] if layouts[0].replicas else []
    sizes = ("ranks", "tp", "pp", "cp", "ep", "dp")
    table = _table(
        "layouts that fit; within a tenth of the fastest, fewest stages first",
        "",
        *sizes,
        "GB rank",
        *engines,
        "s step",
    )
    for number, one in enumerate(layouts, 1):
        engine_cells = (
            [f"{one.host / GB:.0f}", f"{one.replicas} x {_shape(one.engine_tp, one.engine_dp)}", f"{one.live:.0f}"] if engines else []
        )
        layout = [str(getattr(one.layout, size)) for size in sizes]
        table.add_row(str(number), *layout, f"{one.bytes / GB:.1f}", *engine_cells, f"{one.seconds:.0f}")
    return table
