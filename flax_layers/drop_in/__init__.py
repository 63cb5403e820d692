"""`attention_fn` for the attention layers of Flax."""
