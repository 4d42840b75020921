"""The machine that a run is on: its memory, its speed, and the caches that it keeps."""
