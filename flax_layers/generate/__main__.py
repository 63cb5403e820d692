"""`python -m flax_layers.generate`: continues prompts with a model from a folder, and streams the text."""

from flax_layers.generate.command import main

if __name__ == "__main__":
    main()
