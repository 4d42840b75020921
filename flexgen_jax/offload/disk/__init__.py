"""The disk tier: arrays in files, and reads past the page cache."""
