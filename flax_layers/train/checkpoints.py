"""Checkpoints of a run: orbax writes them; a save that fails leaves the earlier ones."""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from flax_layers.models.optional import needs
from flax_layers.train.errors import InputError, SaveError
from flax_layers.train.trainer import State

with needs("orbax", "train"):
    from orbax import checkpoint as ocp


class Checkpoints:
    """The checkpoints in a folder, of one run. A context manager.

    Each holds everything that the next step depends on. It has a temporary name until it is complete.

    Args:
        folder: Made if it does not exist.
        about: What a resumed run must share, as JSON; each entry is compared.
        keep: How many are kept; older ones are removed after a newer one is complete.
    """

    def __init__(self, folder: pathlib.Path, about: Mapping[str, Any], keep: int = 2):
        self.folder = folder.absolute()
        self._about = json.loads(json.dumps(about))
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
        return (
            "There is no checkpoint"
            if step is None
            else f"The last good checkpoint is of step {step}, {self.folder}/{step}"
        )

    def save(self, step: int, state: State) -> None:
        """Writes a checkpoint, and waits for it.

        Args:
            step: Of the state.
            state: What is written.

        Raises:
            SaveError: Writing failed; earlier checkpoints are what they were.
        """
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
                "Make room on the disk, or lower `--keep`; then run the same command again to resume from there."
            ) from error

    def restore(self, like: State) -> State:
        """The newest checkpoint.

        Args:
            like: Arrays, or shapes with dtypes and shardings, as the state should have.

        Returns:
            The state.

        Raises:
            InputError: The checkpoint is of another model or of other data; the message lists what differs.
        """
        step = self.latest()
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        differences = [
            f"{name}: {about.get(name)!r} in the checkpoint, {value!r} in this run"
            for name, value in self._about.items()
            if about.get(name) != value
        ]
        if differences:
            raise InputError(
                f"`--output` holds a checkpoint of another run, {self.folder}/{step}, which this one cannot resume:"
                "\n  " + "\n  ".join(differences) + "\nUse the options of that run, or another `--output`."
            )
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict())
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        return State(**restored["state"])
