"""The gateway: any OpenAI client, and a chat page, talk to the pair. The pair itself needs none of it.

Four interfaces are served, and each is one file with the body that it reads and the answer that it writes: `chats`,
`completions`, `responses` and `messages`. Each body becomes an `Ask` (`schema`), which `requests` turns into what the
pair decodes (`GenerateRequest`).

`doorkeeper` checks keys, origins and sizes. `desk` gives each client its share of the places. `app` joins them, and
`server` listens. `page/` is the chat page.

Only the command line imports this group. It needs the extra `gateway`, or `service` for all that it can use.
docs/gateway.md and docs/chat.md are its pages.
"""
