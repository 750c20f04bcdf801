"""vLLM as the engine of a target: the judge that asks it, and what runs in its worker process."""
