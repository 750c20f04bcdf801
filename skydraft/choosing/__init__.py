"""Which token comes next: choose(logits, prefix), the same on both sides."""
