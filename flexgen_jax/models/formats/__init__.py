"""Formats of stored numbers: definitions (`format`, `storage`), named formats (`known`), and
readers of published files (`published`, `readers`, ...)."""
