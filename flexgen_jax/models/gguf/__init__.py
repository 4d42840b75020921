"""GGUF files: the container, its quantized blocks, and its metadata of model and tokenizer,
converted to the files of a Hugging Face folder."""
