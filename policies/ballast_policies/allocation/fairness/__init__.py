"""What the fairness policies share: levels raised together, teams, and capacity left idle."""
