"""Cost of HTTP beside the engine alone: the part `http` of ``python -m benchmarks engine``."""

import contextlib
import dataclasses
import gc
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.questions.engine import Results, Sizes, drive
from benchmarks.questions.generation import Shape, jax_model
from benchmarks.questions.question import Measured
from benchmarks.questions.serving import Load, Timing, records_of
from benchmarks.results.schema import Record
from benchmarks.run.jobs import Job, run_job


def http_loads(shape: Shape, sizes: Sizes) -> Measured:
    """The closed loops of clients, by the engine alone and by HTTP with clients in processes of their own; a job."""
    from flax_layers.serving import Engine

    model, results = jax_model(shape), Results()
    for name, load, options in sizes.cases("http"):
        engine = Engine(model, options)
        engine.warm_up()
        with served(engine, shape.vocabulary) as url:
            drive(engine, dataclasses.replace(load, requests=load.concurrency, seed=1), shape.vocabulary)
            alone = drive(engine, load, shape.vocabulary)
            client = _by_processes(url, load, shape.vocabulary)
        rates = []
        for kind, timings in (("engine alone", alone), ("HTTP", client)):
            records, remarks, *_ = records_of(timings, load)
            rates.append(records[0].value.median)
            for record in records:
                results.add(dataclasses.replace(record, name=f"{name}, {kind}: {record.name.partition(': ')[2]}"))
            results.remarks += remarks
        results.add(Record.single(f"{name}: cost of HTTP", 100 * (1 - rates[1] / rates[0]), "%"))
        del engine
        gc.collect()  # its cache, which cycles keep
    return results.measured()


def _by_processes(url: str, load: Load, vocabulary: int) -> list[Timing]:
    """Puts a load on a server by processes of 32 clients each."""
    parts = max(1, load.concurrency // 32)
    share = {"requests": load.requests // parts, "concurrency": load.concurrency // parts}
    common = {"url": url, "vocabulary": vocabulary, "begin": time.perf_counter() + 2 + parts}  # when all have started
    loads = [common | {"load": dataclasses.replace(load, **share, seed=part)} for part in range(parts)]
    jobs = [Job("client", "benchmarks.questions.serving", "loaded", arguments) for arguments in loads]
    with ThreadPoolExecutor(parts) as pool:
        return [timing for timings in pool.map(run_job, jobs) for timing in timings]


@contextlib.contextmanager
def served(engine: Any, vocabulary: int) -> Iterator[str]:
    """Starts an engine and a server around it in this process, as `flax_layers.serve` does; yields its URL."""
    from flax_layers.serving.api.http import Served, create_app
    from flax_layers.serving.server import Launch, Server, bind, url_of

    bound, ready = bind("127.0.0.1", 0), threading.Event()
    server = Server(create_app(engine, byte_level(vocabulary), Served("model")), Launch(engine, ready=ready.set))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        ready.wait()
        yield url_of(bound)
    finally:
        server.should_exit = True
        thread.join()


def byte_level(vocabulary: int) -> Any:
    """A byte-level tokenizer with made-up words up to the vocabulary."""
    from flax_layers.models import Tokenizer
    from flax_layers.serving.demo_model import ByteTokenizer

    state = json.loads(ByteTokenizer().serialized())
    words = state["model"]["vocab"]
    words |= {f"w{number}": number for number in range(len(words), vocabulary)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(json.dumps(state))
        return Tokenizer(folder)
