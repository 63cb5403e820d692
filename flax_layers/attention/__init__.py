"""The attention layers' one core, for both flavours of Flax."""
