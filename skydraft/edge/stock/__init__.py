"""Servers without skydraft as targets: vLLM, SGLang, llama-server, with nothing of skydraft installed there."""
