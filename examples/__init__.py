"""Applications of doubleback, one folder each: `python -m examples.NAME`, all: `make examples`.

They are read and run from the repository; nothing in the library imports them.
"""
