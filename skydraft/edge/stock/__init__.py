"""Servers without skydraft as targets: vLLM, SGLang, llama-server and chat hosts."""
