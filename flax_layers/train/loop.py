"""The training loop: steps, logging, evaluation and checkpoints."""

import collections
import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flax_layers.train.dataset.corpus import Rows
from flax_layers.train.errors import Interrupted, LossError, saving
from flax_layers.train.flops import multiplied_parameters, step_flops
from flax_layers.train.log import Hook, Log
from flax_layers.train.trainer import Metrics, Trainer

if TYPE_CHECKING:
    from flax_layers.train.checkpoints import Checkpoints

_SMOOTHED = 20


class Progress(NamedTuple):
    """Progress after one step."""

    step: int
    """Steps taken so far."""
    loss: float
    """Before the step, nats for each scored token."""
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float | None
    """Of the last steps; None in the first, which compiles."""
    utilization: float | None
    """Model FLOP utilization; None if the peak is not known."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """When to save, evaluate and stop.

    Attributes:
        steps: In all, with those before a restored checkpoint.
        save_every: Steps between checkpoints; 0: only at the end.
        evaluate_every: Steps between held-out losses; 0: only at the end.
        peak_flops: Peak FLOP/s of all devices together, if known.
    """

    steps: int
    save_every: int = 0
    evaluate_every: int = 0
    peak_flops: float | None = None

    def is_due(self, every: int, step: int) -> bool:
        """True if an action of period `every` follows the step; the last step has all actions."""
        return step == self.steps or (every > 0 and step % every == 0)


@dataclasses.dataclass
class Run:
    """A trainer, its data and its outputs.

    While the device computes a step, the host makes the batch of the next and then reads the metrics of the one before,
    so they overlap.

    Attributes:
        trainer: It may have taken steps.
        batch_at: The batch of each step, by number from 0 on.
        plan: What is done when.
        held_out: Batches that it is not trained on.
        checkpoints: Where they go; None: nowhere.
        log: Where each step is written; None: nowhere.
        on_step: Called with the progress of each step.
        on_evaluation: Called with each step that is evaluated, and its held-out loss.
        hooks: Called with the step and the numbers of each line of the log, by name: for other logs.
    """

    trainer: Trainer
    batch_at: Callable[[int], Rows]
    plan: Plan
    held_out: list[Rows] = dataclasses.field(default_factory=list)
    checkpoints: "Checkpoints | None" = None
    log: Log | None = None
    on_step: Callable[[Progress], None] = lambda progress: None
    on_evaluation: Callable[[int, float], None] = lambda step, loss: None
    hooks: Sequence[Hook] = ()

    def finish(self) -> None:
        """Takes all steps that are left.

        Raises:
            LossError: A loss or a gradient is not finite.
            SaveError: A checkpoint or the log could not be written.
            Interrupted: By a signal; a checkpoint was written before.
        """
        shapes = {path: value.shape for path, value in self.trainer.state.parameters.items()}
        plan, meter = self.plan, _Meter(self.plan.peak_flops)
        multiplied = multiplied_parameters(shapes, self.trainer.config, self.trainer.trained)
        waiting: tuple[int, Metrics, Rows] | None = None
        start = int(self.trainer.state.step)
        with _signals() as received:
            for step in range(start + 1, plan.steps + 1):
                rows = self.batch_at(step - 1)
                meter.begin()
                metrics = self.trainer.step(rows)
                if waiting is not None:
                    self._report(*waiting, meter, multiplied)
                waiting = step, metrics, rows
                saves, evaluates = (plan.is_due(every, step) for every in (plan.save_every, plan.evaluate_every))
                if saves or evaluates or received or step == start + 1:
                    self._report(*waiting, meter, multiplied)
                    waiting = None
                    ends = bool(received)  # a signal from here on ends the run after the next step
                    self._pause(step, saves or ends, evaluates)
                    meter.pause()
                    if ends:
                        self._interrupt(step, received[0])

    def _pause(self, step: int, saves: bool, evaluates: bool) -> None:
        if saves and self.checkpoints is not None:
            self.checkpoints.save(step, self.trainer.state)
        if evaluates and self.held_out:
            loss = self.trainer.mean_loss(self.held_out)
            self._write(step=step, held_out_loss=loss)
            self.on_evaluation(step, loss)

    def _report(self, step: int, metrics: Metrics, rows: Rows, meter: "_Meter", multiplied: float) -> None:
        """Waits for a step, raises if it is not finite, and reports it."""
        loss, norm, rate = (float(value) for value in metrics)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise LossError(
                f"The loss of step {step} is {loss}, the norm of its gradient {norm}. The run ends here. "
                f"{self._last_good()}. The same command would fail at the same step: resume with a lower "
                "`--learning-rate` or `--clip` and `--accept-changes`, or look at the data of this step."
            )
        speed, utilization = meter.end(rows, step_flops(self.trainer.config, multiplied, rows.document_ids))
        progress = Progress(step, loss, norm, rate, speed, utilization)
        self._write(**progress._asdict())
        self.on_step(progress)

    def _interrupt(self, step: int, number: int) -> None:
        name = signal.Signals(number).name
        resume = "" if self.checkpoints is None else " Run the same command again to resume."
        raise Interrupted(
            f"{name} ended the run after step {step} of {self.plan.steps}. {self._last_good()}.{resume}", number
        )

    def _write(self, step: int, **numbers: float | None) -> None:
        """Adds a line to the log, and calls the hooks."""
        if self.log is not None:
            with saving(self.log.path, self._last_good):
                self.log.write(step=step, **numbers)
        for hook in self.hooks:
            hook(step, {name: value for name, value in numbers.items() if value is not None})

    def _last_good(self) -> str:
        return "Nothing was saved" if self.checkpoints is None else self.checkpoints.last_good()


class _Meter:
    """Speed of the last steps, without the first, which compiles, and without pauses."""

    def __init__(self, peak_flops: float | None):
        self._peak = peak_flops
        self._recent: collections.deque[tuple[float, int, float]] = collections.deque(maxlen=_SMOOTHED)
        self._clock: float | None = None
        self._compiled = False

    def begin(self) -> None:
        if self._clock is None:
            self._clock = time.perf_counter()

    def pause(self) -> None:
        self._clock = None

    def end(self, rows: Rows, flops: float) -> tuple[float | None, float | None]:
        """Tokens a second and utilization, at the end of a step."""
        now = time.perf_counter()
        if self._compiled and self._clock is not None:
            self._recent.append((now - self._clock, rows.tokens.size, flops))
        self._compiled, self._clock = True, now
        if not self._recent:
            return None, None
        seconds, tokens, flops = (sum(column) for column in zip(*self._recent, strict=True))
        return tokens / seconds, None if self._peak is None else flops / seconds / self._peak


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the first SIGINT or SIGTERM; a second one has its usual effect."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # where Python hears no signals
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def receive(number, frame):
        received.append(number)
        restore()

    for number in before:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
