"""A pair of toy speech-captioning models: the Qwen2.5-Omni thinker at toy size, trained on espeak-ng clips."""
