"""What vLLM finds by the entry point `vllm.general_plugins`, in each of its processes: our names of its architectures.

Nothing is imported here: vLLM imports the classes where it needs them.
"""

from __future__ import annotations

ARCHITECTURES = {
    "Qwen2ForCausalLM": "SkydraftQwen2",
    "Qwen3ForCausalLM": "SkydraftQwen3",
    "LlamaForCausalLM": "SkydraftLlama",
}


def register() -> None:
    """Tell vLLM of the judging models. A second time changes nothing."""
    from vllm import ModelRegistry

    for name in ARCHITECTURES.values():
        if name not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(name, f"skydraft.cloud.vllm.models:{name}")
