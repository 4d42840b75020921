"""A server that speaks OpenAI's HTTP interface."""
