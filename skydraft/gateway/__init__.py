"""The gateway: HTTP interfaces and a chat page for a pair of models. The pair works without it.

Each of the four interfaces has one file, with its request body and its answer: `chats`, `completions`, `responses` and
`messages`. Each body becomes an `Ask` (`schema`), which `requests` turns into a `GenerateRequest` for the pair.

`doorkeeper` checks keys, origins and sizes. `desk` gives each client its share of the places. `app` connects them, and
`server` listens. `page/` is the chat page.

Only the command line imports this group. It needs the extra `gateway`, or `service` for all optional features. See
docs/gateway.md and docs/chat.md.
"""
