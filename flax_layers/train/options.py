"""The command line of `python -m flax_layers.train`."""

import argparse
import math
import pathlib
from collections.abc import Callable

from flax_layers.train.optimizer import REMAT
from flax_layers.train.parallel import ORDERS
from flax_layers.train.setup import BIASES, SHAPES
from jflex.context_parallel import STRATEGIES


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that are not None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line, or `arguments` in its place; returns the options by name."""
    parser = argparse.ArgumentParser(
        prog="python -m flax_layers.train",
        description="Trains a decoder on documents packed into rows. Run the same command again to resume from the "
        "last checkpoint in --output.",
        formatter_class=_HelpFormatter,
    )
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_computation(parser.add_argument_group("computation"))
    _add_output(parser.add_argument_group("output"))
    return parser.parse_args(arguments)


def _number(kind: type[float], rule: str, allowed: Callable[[float], bool]) -> Callable[[str], float]:
    """Reads a number, and refuses one that is not allowed."""

    def read(text: str) -> float:
        number = kind(text)
        if not allowed(number):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {number}")
        return number

    read.__name__ = kind.__name__  # argparse names it in its errors
    return read


_positive = _number(int, "at least 1", lambda number: number >= 1)
_count = _number(int, "at least 0", lambda number: number >= 0)
_length = _number(int, "at least 2, a token and the next", lambda number: number >= 2)
_share = _number(float, "at least 0 and less than 1", lambda number: 0 <= number < 1)
_factor = _number(float, "at least 0", lambda number: 0 <= number < math.inf)
_rate = _number(float, "more than 0", lambda number: 0 < number < math.inf)


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    start = group.add_mutually_exclusive_group()
    start.add_argument("--model", type=pathlib.Path, help="folder of a Hugging Face checkpoint to train on")
    start.add_argument(
        "--config",
        type=pathlib.Path,
        help="folder with a config.json, and maybe a tokenizer.json: this model, from scratch",
    )
    start.add_argument("--shape", choices=list(SHAPES), default="tiny", help="a named model, from scratch")
    add("--sizes", help="sizes of a model from scratch, as width=256,layers=8; see flax_layers.train.setup")
    add("--bias", choices=list(BIASES), help="learned attention bias in place of the rotary embedding")


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    many = {"type": pathlib.Path, "nargs": "+", "metavar": "PATH"}
    add(
        "--data",
        required=True,
        **many,
        help="text files, .jsonl with a text, a prompt and its completion, or a chat in each line, token files (.npy, "
        ".bin), or folders of them",
    )
    add("--field", help=".jsonl field of a text or messages; default: messages, else prompt and completion, else text")
    add("--weight-field", help=".jsonl field of a number that multiplies the loss of the line")
    add("--held-out", **many, help="files of the same kinds for the held-out loss")
    add(
        "--held-out-share",
        type=_share,
        default=0.01,
        help="share of the rows, at the end, that is held out without --held-out",
    )
    add("--held-out-batches", type=_positive, default=16, help="batches in an evaluation, at most")
    add("--tokenizer", help="`bytes`, or a folder with a tokenizer.json; default: the folder of --model or --config")
    add(
        "--end-token",
        type=int,
        help="token that ends a document; default: the first eos_token_id of config.json, or else the tokenizer's",
    )
    add("--token-dtype", choices=["uint16", "uint32"], default="uint16", help="dtype of .bin files")


def _add_training(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--steps", type=_positive, default=1000, help="steps in all, with those before a resume")
    add("--batch", type=_positive, default=8, help="rows in a step")
    add("--length", type=_length, default=1024, help="tokens in a row")
    add("--learning-rate", type=_rate, default=3e-4, help="peak learning rate")
    add("--warmup", type=_count, help="steps to the peak; default: a tenth of the schedule, at most 50")
    add("--final-share", type=_factor, default=0.1, help="final learning rate as a fraction of the peak; 1: constant")
    add("--schedule-steps", type=_positive, help="schedule length; later steps keep the last rate; default: --steps")
    add("--train", nargs="+", metavar="PATTERN", help="parameters to train, as '*.attention.*'; default: all")
    add("--weight-decay", type=_factor, default=0.1, help="weight decay of AdamW, for kernels and embeddings")
    add("--clip", type=_rate, default=1.0, help="maximum global norm of the gradient")
    add("--seed", type=int, default=0, help="random seed of the weights and of the order of rows")


def _add_computation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mesh", default="data=1", help="device mesh, as data=2,fsdp=1,context=2,model=4")
    add(
        "--context-strategy",
        choices=list(STRATEGIES),
        default="all_gather",
        help="how devices on the axis `context`, which divide the tokens of a row, exchange keys",
    )
    add("--context-order", choices=list(ORDERS), default="zigzag", help="order in which they divide the tokens")
    add("--accumulate", type=_positive, default=1, help="micro-batches in a step, computed one after the other")
    add("--remat", choices=list(REMAT), default="none", help="activations that the backward pass recomputes")
    add("--loss-chunk", type=_positive, default=4096, help="tokens whose logits a device holds at a time")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the computation")
    add("--implementation", help="jflex implementation; default: the first that can run here")
    add("--peak-flops", help="FLOP/s of a device, for the utilization: a number, or `measure`; default: from a table")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output", type=pathlib.Path, default=pathlib.Path("train_output"), help="folder of the run")
    add("--log-dir", type=pathlib.Path, help="folder of event files for TensorBoard; needs tensorboardX")
    add("--save-every", type=_count, default=500, help="steps between checkpoints; 0: only at the end")
    add("--keep", type=_positive, default=2, help="checkpoints to keep")
    add("--evaluate-every", type=_count, default=100, help="steps between held-out losses; 0: at the end")
    add("--export", type=pathlib.Path, help="folder to write a Hugging Face checkpoint to at the end")
    add(
        "--export-dtype",
        choices=["bfloat16", "float16", "float32"],
        help="dtype of the exported tensors; default: the dtype of --model, float32 from scratch",
    )
    add(
        "--accept-changes",
        action="store_true",
        help="resume although options or data differ from those of the checkpoint; the model must be the same",
    )
