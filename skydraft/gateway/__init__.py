"""OpenAI's interface and the chat page: any app talks to the pair."""
