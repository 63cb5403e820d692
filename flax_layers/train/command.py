"""How the commands of training and of the demo end: an error or a signal gets one line, not a traceback."""

import signal
import sys
from collections.abc import Callable

from flax_layers.models import CheckpointError
from flax_layers.train.errors import InputError, Interrupted, LossError


def run_command(main: Callable[[], object]) -> None:
    """Runs a command.

    Args:
        main: What it does.

    Raises:
        SystemExit: With status 1 after an error, with 128 and the number of the signal after SIGINT or SIGTERM.
    """
    try:
        main()
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(128 + interrupted.signal)
    except KeyboardInterrupt:  # outside of the training loop
        print("SIGINT ended the command.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (InputError, CheckpointError, LossError, ModuleNotFoundError, OSError) as error:
        sys.exit(f"error: {error}")
