"""Measurements on the real pair. Each module is a command: python -m bench.identity, python -m bench.speed."""
