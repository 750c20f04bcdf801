"""The draft model and the target compute at the same time: drafts ahead, branches, and their costs."""
