"""The draft model and the target write at the same time: drafts ahead, branches, and what they cost."""
