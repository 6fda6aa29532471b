"""The steps of a job's pass: pure functions from a view to what has to be done, one idea a file."""
