"""`python -m flax_layers.generate`: continues prompts with a checkpoint, and streams the text."""

from flax_layers.generate.command import main

if __name__ == "__main__":
    main()
