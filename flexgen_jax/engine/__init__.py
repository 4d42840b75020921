"""The engine that a user calls, from prompts to outputs."""
