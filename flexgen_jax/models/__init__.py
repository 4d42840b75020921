"""Models: config, shapes, storage formats, checkpoints, tokenizer. Imports no JAX."""
