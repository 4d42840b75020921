"""What a model is: config, shapes, formats, checkpoints, tokenizer. No JAX."""
