"""A Whisper-like decoder: cached self-attention, and cross keys that are projected once for all tokens."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_layers.nnx import FlexAttention
from jflex.masks import causal, padding

VOCABULARY, WIDTH, HEADS, LONGEST = 50, 64, 4, 32


class Decoder(nnx.Module):
    """One block; `frames` hides the padding of the audio."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.attention = FlexAttention(WIDTH, HEADS, mask_mod=causal(), rngs=rngs)
        self.cross = FlexAttention(WIDTH, HEADS, use_bias=True, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def _finish(self, x, keys, frames):
        x = x + self.cross(self.norms[1](x), inputs_kv=keys, mask_mod=padding(frames))
        return self.embed.attend(x + self.down(nnx.gelu(self.up(self.norms[2](x)))))

    def __call__(self, tokens, audio, frames):
        x = self.embed(tokens)
        return self._finish(x + self.attention(self.norms[0](x)), audio, frames)

    def decode(self, tokens, cache, keys, frames):
        x = self.embed(tokens)
        attended, cache = self.attention.decode(self.norms[0](x), cache)
        return self._finish(x + attended, keys, frames), cache


def transcribe(model, audio, frames, tokens: int):
    """Greedy tokens, one step of a compiled program each."""
    step = nnx.jit(Decoder.decode, donate_argnames="cache")
    keys, cache = model.cross.project_kv(audio), model.attention.init_cache(len(audio), max_length=LONGEST)
    text = jnp.zeros((len(audio), 1), jnp.int32)
    for _ in range(tokens):
        logits, cache = step(model, text[:, -1:], cache, keys, frames)
        text = jnp.concatenate([text, logits[:, -1].argmax(-1, keepdims=True).astype(jnp.int32)], axis=1)
    return text


def main(tokens: int = 12):
    model, audio = Decoder(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (2, 100, WIDTH))
    frames = jnp.array([100, 60])  # the second recording is shorter
    text = transcribe(model, audio, frames, tokens)
    again = model(text[:, :-1], audio, frames).argmax(-1)  # all at once, without a cache
    assert jnp.array_equal(again, text[:, 1:])
    print("\n".join(" ".join(map(str, row.tolist())) for row in text))


if __name__ == "__main__":
    main()
