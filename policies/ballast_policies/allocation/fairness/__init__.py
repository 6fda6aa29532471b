"""Common parts of the fairness policies: water filling, teams, and the use of idle capacity."""
