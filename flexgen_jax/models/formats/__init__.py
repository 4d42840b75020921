"""Formats of stored numbers: what they are (`format`, `storage`), those that have a name (`known`),
and how published files are read (`published`, `readers`, ...)."""
