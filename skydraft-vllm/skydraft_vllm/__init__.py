"""Let vLLM check drafts from skydraft's devices.

vLLM loads `skydraft_vllm.Drafts` as its proposer (`--speculative-config`, method `custom_class`) and asks it for drafts
after each step. Devices send drafts to a port of the same process. vLLM checks them in its next step.
"""

from skydraft_vllm.proposer import Drafts

__all__ = ["Drafts"]
