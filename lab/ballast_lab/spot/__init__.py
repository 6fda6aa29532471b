"""Jobs in clouds whose prices change and whose spot machines are taken away, replayed from logs."""
