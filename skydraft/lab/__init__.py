"""The lab: measure the pair, and let its draft model learn. The pair works without it.

- `evaluation/` runs modes on prompts, records each text, and makes a report from the records.
- `tasks/` has prompts with a check of the answer: sets, their checks, and isolation for code.
- `learning/` keeps the target's answers, trains an adapter of the draft model with them, and calibrates it.

Only the command line imports this group. It uses the pair through the public interface (`skydraft.api`). Plots need
the extra `report`, sets of tasks the extra `tasks`, and training the extra `learn`. Records, lessons and adapters are
files. All figures of a report can be computed again from `records.jsonl`. See docs/measuring.md, docs/tasks.md and
docs/learning.md.
"""
