"""The loop: draft, gate, verify, commit."""
