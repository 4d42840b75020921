"""What a user calls, from prompts to outputs."""
