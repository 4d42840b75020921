"""Tiers, transfers and the executor that walks a schedule's steps."""
