"""The entry point `vllm.general_plugins`, which each vLLM process loads: it registers our architecture names.

It imports no models: vLLM imports the classes when it needs them.
"""

from __future__ import annotations

ARCHITECTURES = {
    "Qwen2ForCausalLM": "SkydraftQwen2",
    "Qwen3ForCausalLM": "SkydraftQwen3",
    "LlamaForCausalLM": "SkydraftLlama",
}


def register() -> None:
    """Register the judging models with vLLM. A second call does nothing."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES.values():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"skydraft.cloud.vllm.models:{name}")
