"""One file for each family of schedules: functions that build the order of actions."""
