"""Training: `python -m flax_layers.train`, and its parts for programs of your own."""

from flax_layers.train.dataset.corpus import Batches, Corpus, Rows, read_corpus
from flax_layers.train.errors import InputError, Interrupted, LossError, SaveError
from flax_layers.train.loop import Plan, Progress, Run
from flax_layers.train.loss import next_token_weights, summed_cross_entropy
from flax_layers.train.memory import Memory, step_memory
from flax_layers.train.optimizer import Recipe
from flax_layers.train.parallel import make_mesh, parse_mesh
from flax_layers.train.trainer import Computation, Trainer, create_model

__all__ = [
    "Batches",
    "Computation",
    "Corpus",
    "InputError",
    "Interrupted",
    "LossError",
    "Memory",
    "Plan",
    "Progress",
    "Recipe",
    "Rows",
    "Run",
    "SaveError",
    "Trainer",
    "create_model",
    "make_mesh",
    "next_token_weights",
    "parse_mesh",
    "read_corpus",
    "step_memory",
    "summed_cross_entropy",
]
