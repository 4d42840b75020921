"""Policies by linear program: memory, time, simulation, and the search."""
