"""`python -m flax_layers.generate`, and text that is streamed in whole characters."""

import io
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_layers.generate import generate
from flax_layers.generate.command import main
from flax_layers.generate.folder import default_dtype, load, stop_tokens
from flax_layers.models import CheckpointError, Decoder, LayerConfig, ModelConfig, Tokenizer, save_pretrained
from flax_layers.models.fused import is_fused
from tests.support.golden_models import ROOT

CONFIG = ModelConfig(
    vocabulary=280, width=16, mlp_width=32, num_heads=2, num_kv_heads=1, head_dim=8, layers=(LayerConfig(),),
    max_positions=128, initializer_range=0.5, eos_token_ids=(1,),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a random model, with a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(0)), path, source=ROOT / "tokenizer")
    return path


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Runs the command on the folder; returns what it writes."""

    def run(*arguments, stdin="", model=folder):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        main(["--model", str(model), "--max-tokens", "12", "--implementation", "xla", *arguments])
        return capsys.readouterr()

    return run


def text_of(folder, prompt: str, special_tokens: bool = True, **options) -> str:
    loaded = load(folder, implementation="xla")
    tokens = loaded.tokenizer.encode(prompt, special_tokens=special_tokens).tolist()
    options = {"max_tokens": 12, "stop_tokens": loaded.stop_tokens} | options
    return loaded.tokenizer.decode(generate(loaded.model, [tokens], **options).results()[0].tokens)


@pytest.mark.full
def test_the_text_of_a_prompt(run, folder):
    written = run("--prompt", "Hello")
    assert written.out == text_of(folder, "Hello") + "\n"
    assert "prefill: " in written.err
    assert " tokens/s; compiled in " in written.err


@pytest.mark.full
def test_several_prompts_one_of_the_standard_input(run, folder):
    written = run("--prompt", "Hello", "a longer prompt", "--stdin", "--cache", "paged", stdin="x\n")
    texts = [text_of(folder, prompt) for prompt in ("Hello", "a longer prompt", "x\n")]
    assert written.out == "".join(f"[{i}]\n{text}\n" for i, text in enumerate(texts, 1))
    assert " of 3 texts" in written.err


@pytest.mark.full
def test_ctrl_c_ends_it_with_one_line(run, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("flax_layers.generate.command.show", interrupted)
    with pytest.raises(SystemExit) as ended:
        run("--prompt", "Hello")
    assert (ended.value.code, capsys.readouterr().err) == (130, "\nSIGINT ended the command.\n")


@pytest.mark.full
def test_chat(run, folder):
    prompt = Tokenizer(folder).chat([{"role": "user", "content": "Hello"}])
    assert run("--prompt", "Hello", "--chat").out == text_of(folder, prompt, special_tokens=False) + "\n"


@pytest.mark.full
def test_drawn_texts_repeat_with_the_seed(run):
    options = ("--prompt", "Hello", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.99", "--seed")
    first, again, other = (run(*options, seed).out for seed in "112")
    assert first == again != other


def test_the_file_of_generation_says_what_stops(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert stop_tokens(copy, CONFIG) == (1,)
    for eos, stops in ((7, (7,)), ([7, 8], (7, 8)), (None, (1,))):
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert load(copy).stop_tokens == stops
    (copy / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config.json is not JSON: .* or remove it"):
        load(copy)


@pytest.mark.full
def test_how_a_folder_is_loaded(folder):
    """In bfloat16 on a GPU, with fused projections on one device."""
    assert default_dtype() == (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    loaded = load(folder, jnp.dtype("bfloat16"))
    assert loaded.model.embed.embedding.dtype == loaded.model.init_caches(1, 4)[0].k.dtype == jnp.bfloat16
    assert is_fused(loaded.model)
    assert not is_fused(load(folder, mesh=jax.make_mesh((1,), ("model",))).model)


PROMPT = ("--prompt", "Hello")
ERRORS = {
    "no prompt": ((), "`--prompt` or `--stdin` is required: there is nothing to continue. Pass `--prompt TEXT`"),
    "empty prompt": (("--prompt", "a", ""), "`--prompt` must not be empty. Prompt 1 of 2 is. Leave it out"),
    "empty stdin": (("--stdin",), "`--stdin` needs a text. Standard input is empty"),
    "long prompt": (("--prompt", "€" * 200), "`prompts` must be shorter than the 128 positions"),
    "no folder": ((*PROMPT, "--model", "/nowhere"), "`--model` must be the folder of a checkpoint, .* no folder /now"),
    "no checkpoint": ((*PROMPT, "--model", str(ROOT / "tokenizer")), "`folder` must hold `config.json`"),
    "no tokenizer": ((*PROMPT, "--model", str(ROOT / "llama2")), "`folder` must hold `tokenizer.json`"),
    "dtype": ((*PROMPT, "--dtype", "int8"), "argument --dtype: invalid choice: 'int8'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_input(name, run, capsys):
    """One sentence on the standard error, and nothing else."""
    arguments, message = ERRORS[name]
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert "Traceback" not in written.err
    [line] = [line for line in written.err.splitlines() if "error: " in line]
    assert re.search(message, line), line


def test_chat_without_a_template(run, folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit):
        run("--prompt", "Hello", "--chat", model=copy)
    assert "`--chat` needs a chat template" in capsys.readouterr().err


def test_pieces_of_any_tokens_are_the_text_of_all(folder):
    """Tokens of bytes that are no characters, special ones, and those of a text between them."""
    tokenizer, rng = Tokenizer(folder), np.random.default_rng(0)
    text = tokenizer.encode("né😀 日本\n", special_tokens=False).tolist()
    for _ in range(20):
        noise = rng.integers(0, tokenizer.vocabulary, 30).tolist()
        cut = int(rng.integers(0, 30))
        tokens = noise[:cut] + text + noise[cut:] + text[: int(rng.integers(1, len(text)))]
        stream = tokenizer.text_stream()
        pieces = [stream.push([token]) for token in tokens]
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(tokens)
