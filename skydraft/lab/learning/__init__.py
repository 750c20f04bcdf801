"""Let the draft model learn from the target. Prompts are kept only where the user says so, on this device."""
