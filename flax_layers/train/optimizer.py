"""AdamW with warm-up, cosine decay and clipping: optax, put together."""

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from flax_layers.models import mods
from flax_layers.models.checkpoint.optional import needs
from flax_layers.train.errors import InputError

with needs("optax", "train"):
    import optax

_DECAYING = ("kernel", "embedding")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """AdamW with its schedule.

    Attributes:
        steps: Length of the schedule. Later steps keep its last learning rate.
        warmup: Steps until it is reached, by equal increments from 0: the first step has one of them, and the last of
            these steps the largest rate. Default: a tenth of the schedule, at most 50.
        final_share: The last learning rate, as a fraction of the largest. 1 keeps it constant after the warm-up.
        weight_decay: Of kernels and embeddings. Biases, scales of norms and parameters of score mods do not decay.
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of their squares.
        clip: Largest global norm of the gradient.
    """

    steps: int
    learning_rate: float = 3e-4
    warmup: int | None = None
    final_share: float = 0.1
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    clip: float = 1.0

    def __post_init__(self):
        if self.steps < 1:
            raise InputError(f"`steps` must be at least 1. Got {self.steps}. Train for at least one step.")

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up, by default or not."""
        return min(50, max(self.steps // 10, 1)) if self.warmup is None else self.warmup

    def schedule(self) -> optax.Schedule:
        """The learning rate of each step.

        Example:
            >>> rate = Recipe(steps=100, learning_rate=1.0, warmup=10).schedule()
            >>> [round(float(rate(step)), 2) for step in (0, 9, 100)]
            [0.1, 1.0, 0.1]
        """
        rate, warmup = self.learning_rate, max(self.warmup_steps, 1)
        return optax.warmup_cosine_decay_schedule(
            rate / warmup, rate, warmup - 1, max(self.steps, warmup), rate * self.final_share
        )

    def optimizer(self) -> optax.GradientTransformation:
        """Clipping, then AdamW, whose state has the form of the parameters."""
        adam = optax.adamw(self.schedule(), self.b1, self.b2, weight_decay=self.weight_decay, mask=_decays)
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


def _decays(parameters: Mapping[str, jax.Array]) -> dict[str, bool]:
    """Marks the parameters that decay, by their paths."""
    names = {path: path.split(".") for path in parameters}
    return {path: parts[-1] in _DECAYING and "score_mod" not in parts for path, parts in names.items()}


def trained_paths(paths: Collection[str], patterns: Sequence[str] | None) -> frozenset[str]:
    """The paths that a pattern matches, as in a shell; None: all. Raises InputError if a pattern matches none."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matched = set(paths if patterns is None else ())
    for pattern in patterns or ():
        if not (more := fnmatch.filter(paths, pattern)):
            known = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", path) for path in paths)
            nearest = ", ".join(difflib.get_close_matches(pattern, known, cutoff=0))
            raise InputError(f"`--train` must match parameters. {pattern!r} matches none. The nearest are {nearest}.")
        matched.update(more)
    return frozenset(matched)


def _products() -> Callable[..., bool]:
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, mods.remat_policy())


REMAT: dict[str, Callable[[], Any]] = {"none": lambda: False, "products": _products, "blocks": mods.remat_policy}
"""By name. `none`: nothing is recomputed. `products`: everything between matrix products. `blocks`: whole blocks,
except for the output and lse of attention, which jflex names as residuals."""
