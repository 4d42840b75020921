"""GGUF files: the container, its blocks of numbers, and what its metadata says of the model and the
tokenizer, as the files of a Hugging Face folder would say it."""
