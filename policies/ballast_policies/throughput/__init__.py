"""What runs how fast where: tables, measurements, and estimates of what was never seen."""
