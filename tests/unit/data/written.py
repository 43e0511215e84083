"""Files of prompts, as people have them."""

import json
from pathlib import Path
from typing import Any

import pyarrow

from megarl.config import FileSource

ROW = {"prompt": "17 + 17?", "reward_model": {"ground_truth": "34", "style": "rule"}, "data_source": "sums", "extra_info": {"index": 7}}


def written(path: Path, *rows: Any) -> Path:
    """Write a JSONL file; a text row is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write(path: Path, *rows: Any) -> FileSource:
    """Write a JSONL file, as a source."""
    return FileSource(path=written(path, *rows))


def save_to_disk(path: Path, rows: list[dict[str, Any]], shards: int = 2, **state: Any) -> FileSource:
    """What `datasets` 4 writes: Arrow streams, and state.json with their names."""
    path.mkdir()
    names = [f"data-{n:05d}-of-{shards:05d}.arrow" for n in range(shards)]
    for n, name in enumerate(names):
        table = pyarrow.Table.from_pylist(rows[n * len(rows) // shards : (n + 1) * len(rows) // shards])
        with pyarrow.OSFile(str(path / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None, **state}))
    return FileSource(path=path)
