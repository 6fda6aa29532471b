"""What has happened: lately, in memory (:mod:`.recent`)."""
