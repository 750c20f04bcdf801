"""Measurements on the real pair: `python -m bench` lists them."""
