"""Checkpoints of a run: orbax writes them; a save that fails leaves the earlier ones."""

import json
import pathlib
import shutil
from collections.abc import Collection, Mapping
from typing import Any

import jax

from flax_layers.models.checkpoint.optional import needs
from flax_layers.train.errors import InputError, SaveError
from flax_layers.train.trainer import State

with needs("orbax", "train"):
    from orbax import checkpoint as ocp

_LONGEST = 200


class Checkpoints:
    """The checkpoints in a folder, of one run. A context manager.

    Each holds everything that the next step depends on. It has a temporary name until it is complete. `about` is what a
    resumed run must share, as JSON: each entry is compared, and those in `changeable` may differ if `accept_changes`.
    Of the checkpoints, the newest `keep` are kept; an older one is removed after a newer one is complete.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        about: Mapping[str, Any],
        keep: int = 2,
        *,
        changeable: Collection[str] = (),
        accept_changes: bool = False,
    ):
        self.folder = folder.absolute()
        self._about = json.loads(json.dumps(about))
        self._changeable = frozenset(changeable)
        self._accept_changes = accept_changes
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._manager.close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        return self._manager.latest_step()

    def last_good(self) -> str:
        """The newest checkpoint in words."""
        step = self.latest()
        if step is None:
            return "There is no checkpoint"
        return f"The last good checkpoint is of step {step}, {self.folder}/{step}"

    def save(self, step: int, state: State) -> None:
        """Writes a checkpoint, and waits for it. Raises SaveError if that fails; earlier ones are what they were."""
        if step == self.latest():
            return
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), about=ocp.args.JsonSave(self._about))
        try:
            self._manager.save(step, args=parts, force=True)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # orbax passes on what TensorStore says as ValueError
            for half in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(half, ignore_errors=True)
            reason = str(error).strip().splitlines()[0]
            raise SaveError(
                f"The checkpoint of step {step} could not be written to {self.folder}: {reason}\n{self.last_good()}. "
                "Make room on the disk, or lower `--keep`; then run the same command again."
            ) from error

    def check(self) -> list[str]:
        """Compares this run with the newest checkpoint, if any; returns the accepted differences, one line each.

        Raises InputError if there are others; the message lists all.
        """
        step = self.latest()
        if step is None:
            return []
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        changed = [name for name, value in self._about.items() if about.get(name) != value]  # an absent option is None
        lines = [f"{x}: {_shown(about, x)} in the checkpoint, {_shown(self._about, x)} in this run" for x in changed]
        acceptable = self._changeable.issuperset(changed)
        if changed and not (acceptable and self._accept_changes):
            title = f"`--output` holds a checkpoint of another run, {self.folder}/{step}, which this one cannot resume:"
            raise InputError("\n  ".join([title, *lines]) + f"\n{_remedy(about, changed, acceptable)}")
        return lines

    def restore(self, like: State) -> State:
        """The newest checkpoint, in the dtypes and shardings of `like`. Raises InputError as `check`."""
        self.check()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        restored = self._manager.restore(self.latest(), args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        return State(**restored["state"])


def _shown(about: Mapping[str, Any], name: str) -> str:
    text = repr(about[name]) if name in about else "not recorded"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _remedy(about: Mapping[str, Any], changed: Collection[str], acceptable: bool) -> str:
    """Remedy for differences from `about`."""
    remedy = "Use the options of that run, or another `--output`."
    if acceptable:
        remedy += " `--accept-changes` resumes with the options and data of this run."
    steps = about.get("--schedule-steps")
    if acceptable and steps is not None and "--schedule-steps" in changed:
        remedy += (
            f" `--schedule-steps {steps}` keeps the schedule of that run; later steps keep its last learning rate."
        )
    return remedy
