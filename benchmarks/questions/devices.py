"""A cost model of causal attention on 2 to 1,024 GPUs: ``python -m benchmarks devices``. It measures nothing.

Where ``python -m benchmarks context`` has measured several GPUs of one host, its figures stand beside the model's, in
the table and in the picture; where it has not, both say that the model was not checked. What goes in:

* bytes that a device sends, from `jflex.explain` of the call;
* rates of the kernels of one H200, from ``results/h200/main.json``: causal, 32 query and 8 key heads of 128. They are
  taken to be the same for short shards, which they are not;
* bandwidths of data sheets, and a latency that is a guess (`Network`).

All-gather and all-to-all come before and after the kernels; a ring sends while a kernel runs, and a step takes as long
as the slower of both. All work is balanced (zigzag). Between nodes, gathers use every adapter of a node, and a hop of a
ring that of one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.problems import Problem
from benchmarks.questions.context import DIRECTIONS, Case
from benchmarks.results import schema
from benchmarks.results.schema import ResultFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PATH = schema.FOLDER / "model" / "context_parallel.png"
LENGTHS = (2**18, 2**20, 2**22)
DEVICES = tuple(2**i for i in range(1, 11))
SHOWN = (8, 64, 1024)  # in the printed table
STRATEGIES = ("all_gather", "ring", "ulysses")
_LENGTH = re.compile(r", S (\d+),")  # in a title
_MEASURED = Problem(2, 8192, 8192, 32, 8, 128, "causal")
UNCHECKED = "a model, not checked against a measurement of several GPUs"


@dataclasses.dataclass(frozen=True)
class Network:
    """Links of a GPU, in bytes/s of one direction.

    Attributes:
      node: GPUs of a node.
      inside: NVLink 4 of an H200: 900 GB/s in both directions (data sheet of NVIDIA).
      between: InfiniBand NDR, one adapter of 400 Gbit/s for each GPU, as in a DGX H200 (data sheet of NVIDIA).
      latency: Seconds of a transfer, a guess.
    """

    node: int = 8
    inside: float = 450e9
    between: float = 50e9
    latency: float = 10e-6


class Rates(NamedTuple):
    """FLOP/s of the kernels of one GPU."""

    forward: float
    backward: float

    @classmethod
    def measured(cls, folder: pathlib.Path = schema.FOLDER) -> Rates:
        """Those of the committed result file."""
        result = schema.read(folder / "h200" / "main.json")
        assert result is not None  # it is committed
        found = [result.find(_MEASURED, "jflex", direction) for direction in ("forward", "backward")]
        forward, backward = (record.tflops * 1e12 for record in found if record is not None)
        return cls(forward, backward)


class Modelled(NamedTuple):
    """Seconds of a forward and a backward pass: those of the kernels alone, and all."""

    kernels: float
    total: float

    @property
    def efficiency(self) -> float:
        """The share of the time that kernels run."""
        return self.kernels / self.total


@functools.cache
def sent(strategy: str, devices: int, length: int) -> tuple[int, int]:
    """Bytes that a device sends in a forward and in a backward pass, as `jflex.explain` says."""
    import jax
    import jax.numpy as jnp

    import jflex

    x = lambda heads: jax.ShapeDtypeStruct((1, length, heads, _MEASURED.D), jnp.bfloat16)
    mesh = jax.sharding.AbstractMesh((devices,), ("context",))
    account = jflex.explain(
        jflex.context_parallel_attention, x(_MEASURED.Hq), x(_MEASURED.Hkv), x(_MEASURED.Hkv), mesh=mesh,
        strategy=strategy, implementation="xla",
    )  # fmt: skip
    return account.bytes_sent, account.bytes_sent_backward


def modelled(strategy: str, devices: int, length: int, rates: Rates, network: Network) -> Modelled | None:
    """The model; None where the strategy cannot divide the heads.

    >>> one_link = modelled("all_gather", 8, 2**20, Rates(7e14, 5e14), Network())
    >>> two_links = modelled("all_gather", 8, 2**20, Rates(7e14, 5e14), Network(inside=900e9))
    >>> one_link.kernels == two_links.kernels and one_link.total > two_links.total > one_link.kernels
    True
    """
    if strategy == "ulysses" and _MEASURED.Hkv % devices:
        return None
    pairs = _MEASURED.Hq * length**2 / 2  # causal
    flops = 4 * _MEASURED.D * pairs, 10 * _MEASURED.D * pairs
    kernels = [x / devices / rate for x, rate in zip(flops, rates, strict=True)]
    moved = sent(strategy, devices, length)
    transfers = [_transfer(strategy, devices, x, network) for x in moved]
    if strategy == "ring":
        steps = [(own / devices, hop / (devices - 1)) for own, hop in zip(kernels, transfers, strict=True)]
        return Modelled(sum(kernels), sum(own + (devices - 1) * max(own, hop) for own, hop in steps))
    return Modelled(sum(kernels), sum(kernels) + sum(transfers))


class Check(NamedTuple):
    """A measured forward and backward pass, in the balanced order, and what the model says of it."""

    strategy: str
    devices: int
    length: int
    measured: float  # seconds
    alone: float  # on one device
    modelled: float

    @property
    def efficiency(self) -> float:
        """The measured speed-up as a share of the devices."""
        return self.alone / self.measured / self.devices


def checks(result: ResultFile | None, rates: Rates, network: Network) -> list[Check]:
    """Every measured run of causal attention beside the model.

    Args:
      result: Of ``python -m benchmarks context``; None if there is none.
      rates: Of the model.
      network: Likewise.
    """
    if result is None:
        return []
    length = int(_LENGTH.findall(result.about["title"])[0])
    seconds = {record.name: record.value.median for record in result.records}
    alone = seconds.get(f"{Case('causal', DIRECTIONS[1]).name(0)}: time")
    found = []
    for strategy, count in itertools.product(STRATEGIES, DEVICES):
        time = seconds.get(f"{Case('causal', DIRECTIONS[1], strategy, 'balanced').name(count)}: time")
        model = None if time is None else modelled(strategy, count, length, rates, network)
        if time is not None and alone is not None and model is not None:
            found.append(Check(strategy, count, length, time, alone, model.total))
    return found


def label(found: Sequence[Check]) -> str:
    """What the model is, for its picture and its table.

    >>> label([])
    'a model, not checked against a measurement of several GPUs'
    >>> label([Check("ring", 2, 2**18, 1.0, 1.9, 0.98)])
    'a model, checked against measurements of 2 GPUs of one host alone'
    """
    counts = sorted({x.devices for x in found})
    measured = " and ".join(map(str, counts))
    return f"a model, checked against measurements of {measured} GPUs of one host alone" if counts else UNCHECKED


def measured_file(folder: pathlib.Path = schema.FOLDER) -> ResultFile | None:
    """The measurement of H200s, whose rates are in the model."""
    return schema.read(folder / "h200" / "context.json")


def _transfer(strategy: str, devices: int, moved: int, network: Network) -> float:
    """Seconds in which each device sends so many bytes."""
    if devices <= network.node:
        return moved / network.inside + network.latency * (devices - 1)
    if strategy == "ring":  # one GPU of each node sends to the next node, and the others wait for it
        return moved / network.between + network.latency * (devices - 1)
    outside = moved / (devices - 1) * (devices - network.node)  # what a node lacks, through all of its adapters
    between = outside / (network.node * network.between)
    return max(between, moved / network.inside) + network.latency * (devices - 1)


def draw(rates: Rates, network: Network, found: Sequence[Check] = ()) -> Figure:
    """The share of the time that kernels run, by GPUs, for each length and strategy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(LENGTHS), 3.6), layout="constrained")
    for axis, length in zip(figure.subplots(1, len(LENGTHS), sharey=True), LENGTHS, strict=True):
        for strategy in STRATEGIES:
            points = [(n, modelled(strategy, n, length, rates, network)) for n in DEVICES]
            shown = [(n, 100 * point.efficiency) for n, point in points if point is not None]
            [line] = axis.plot(*zip(*shown, strict=True), marker="o", label=strategy)
            own = [x for x in found if (x.strategy, x.length) == (strategy, length)]
            axis.scatter(
                [x.devices for x in own],
                [100 * x.efficiency for x in own],
                marker="x",
                color=line.get_color(),
                zorder=3,
            )
        axis.axvline(network.node, color="grey", linestyle=":")
        axis.set(xscale="log", title=f"{length:,} tokens", xlabel="GPUs", ylim=(0, 105))
        axis.set_xticks(SHOWN, [f"{n:,}" for n in SHOWN])
    figure.axes[0].set_ylabel("time in kernels, %")
    figure.axes[0].legend(loc="lower left")
    figure.suptitle(f"causal attention, forward and backward, 32 / 8 heads of 128: {label(found)}", fontsize=10)
    return figure


def table(rates: Rates, network: Network, found: Sequence[Check] = ()) -> list[str]:
    """The same for some numbers of GPUs, and the model beside what was measured, as lines."""
    lines = [f"time in kernels, {label(found)}", f"{rates}, {network}"]
    for x in found:
        ratio = f"measured over model {x.measured / x.modelled:.2f}, {x.alone / x.measured:.2f} times one GPU"
        times = f"model {x.modelled:.4g} s, measured {x.measured:.4g} s"
        lines.append(f"  {x.length:,} tokens, {x.strategy}, {x.devices} GPUs: {times}: {ratio}")
    for length in LENGTHS:
        for strategy in STRATEGIES:
            models = [modelled(strategy, n, length, rates, network) for n in SHOWN]
            cells = ["heads do not divide" if x is None else f"{x.efficiency:.0%} of {x.total:.3g} s" for x in models]
            row = ", ".join(f"{n} GPUs: {cell}" for n, cell in zip(SHOWN, cells, strict=True))
            lines.append(f"  {length:,} tokens, {strategy}: {row}")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    """Draws the model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks devices", description="Draws a cost model.")
    parser.add_argument("--out", type=pathlib.Path, default=PATH, metavar="FILE", help=f"default: {PATH}")
    measured = "context.json of H200s to check the model against; default: the one in benchmarks/results/h200"
    parser.add_argument("--measured", type=pathlib.Path, metavar="FILE", help=measured)
    options = parser.parse_args(words)
    rates, network = Rates.measured(), Network()
    result = measured_file() if options.measured is None else schema.read(options.measured)
    found = checks(result, rates, network)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(rates, network, found).savefig(options.out, dpi=110)
    print("\n".join([*table(rates, network, found), str(options.out)]))
