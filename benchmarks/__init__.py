"""One module for each word of bench.py."""
