"""The policies, one a file: objective, and how its optimum is found."""
