"""The loop over steps: when batches enter, what is loaded, copied, stored and freed."""
