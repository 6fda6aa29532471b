"""Rounds: from shares of time to gangs on nodes, again every few minutes."""
