"""`python -m flax_layers.serve`: an OpenAI-compatible server for a model."""

from flax_layers.serving.command import main

if __name__ == "__main__":
    main()
