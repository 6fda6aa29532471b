"""Which jobs may share a GPU with another, and how fast they are beside it."""
