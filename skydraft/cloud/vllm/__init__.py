"""vLLM as the engine of a target: the judge that asks it, and the code that runs in its worker process."""
