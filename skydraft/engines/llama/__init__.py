"""Engines of llama.cpp: GGUF files."""
