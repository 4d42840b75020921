"""Pure layer math: Flax modules applied functionally, with the weights as an argument."""
