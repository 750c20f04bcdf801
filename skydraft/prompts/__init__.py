"""The prompt of each side: messages and speech as token ids."""
