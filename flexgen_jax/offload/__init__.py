"""The memory tiers, the transfers between them, and the executor that walks a schedule's steps."""
