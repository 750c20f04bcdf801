"""Servers that are not ours as targets: vLLM, SGLang, llama-server, with nothing of skydraft installed there."""
