"""Where a job may be placed: types of fields of its spec."""
