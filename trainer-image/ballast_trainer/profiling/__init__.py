"""What layers, links and steps cost, measured in the running job."""
