"""What each side reads: messages and speech as token ids."""
