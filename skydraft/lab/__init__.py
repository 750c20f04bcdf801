"""The lab: what measures the pair, and what lets its draft model learn. The pair itself needs none of it.

- `evaluation/` runs settings on prompts, keeps a record of each text, and makes the report of the records.
- `tasks/` are prompts with a check of the answer: sets, their checks, and code that runs in isolation.
- `learning/` keeps answers of the target, trains an adapter of the draft model with them, and calibrates it.

Only the command line imports this group. It uses the pair by the public interface (`skydraft.api`). Plots need the
extra `report`, sets of tasks the extra `tasks`, and training the extra `learn`. Records, lessons and adapters are
files: all figures of a report can be computed again from `records.jsonl`. docs/measuring.md, docs/tasks.md and
docs/learning.md are its pages.
"""
