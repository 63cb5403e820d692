"""Rules from the primitives of JAX to the operations of a program."""
